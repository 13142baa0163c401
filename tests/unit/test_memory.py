"""Free memory is the machine's, or what a control group leaves."""

from pathlib import Path

import pytest

from volley.memory import available_memory, peak_above_now, return_freed_memory, total_memory

GIB = 2**30


def tree(root: Path, files: dict[str, str]) -> Path:
    machine = {"proc/meminfo": f"MemTotal: 999 kB\nMemAvailable: {8 * GIB // 1024} kB\n"}
    for name, text in {**machine, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_this_machine_has_some() -> None:
    assert 0 < available_memory() < 2**50


def test_without_a_control_group_it_is_the_machines(tmp_path: Path) -> None:
    assert available_memory(tree(tmp_path, {})) == 8 * GIB
    assert available_memory(tree(tmp_path, {"proc/self/cgroup": "0::/\n"})) == 8 * GIB


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_a_group_without_a_limit_bounds_nothing(tmp_path: Path, limit: str) -> None:
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": limit, "sys/fs/cgroup/memory.current": "5"}
    assert available_memory(tree(tmp_path, files)) == 8 * GIB


def test_version_2_bounds_by_the_tightest_group_above(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/container",
        "sys/fs/cgroup/pod/memory.max": str(4 * GIB),
        "sys/fs/cgroup/pod/memory.current": str(3 * GIB),
        "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        "sys/fs/cgroup/pod/container/memory.max": "max",
        "sys/fs/cgroup/pod/container/memory.current": str(3 * GIB),
    }
    assert available_memory(tree(tmp_path, files)) == 2 * GIB


def test_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/kubepods/pod1",
        "sys/fs/cgroup/memory.max": str(3 * GIB),
        "sys/fs/cgroup/memory.current": str(GIB),
    }
    assert available_memory(tree(tmp_path, files)) == 2 * GIB


def test_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/docker/a\n",
        "sys/fs/cgroup/memory/docker/a/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/docker/a/memory.usage_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/docker/a/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
    }
    assert available_memory(tree(tmp_path, files)) == GIB // 2


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": str(GIB),
        "sys/fs/cgroup/memory.current": str(GIB + 1),
    }
    assert available_memory(tree(tmp_path, files)) == 0


def test_the_total_is_the_machines_or_the_tightest_limit(tmp_path: Path) -> None:
    assert total_memory(tree(tmp_path, {})) == 999 * 1024
    group = {"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/memory.max": "4096\n"}
    assert total_memory(tree(tmp_path, group)) == 4096
    assert available_memory() <= total_memory()


def test_freed_memory_is_given_back_and_was_once_used() -> None:
    kept = [bytearray(b"x" * 4096) for _ in range(30_000)]  # too small for the allocator to map each by itself
    del kept
    return_freed_memory()
    assert peak_above_now() > 60_000_000
