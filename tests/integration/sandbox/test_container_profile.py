"""The seccomp profile of reward containers: the complete sandbox works under it, but not under a narrower one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reward_servers.sandbox import policy

pytestmark = pytest.mark.integration

PROFILE = json.loads(Path("deploy/seccomp/volley-sandbox.json").read_text())
(RULE,) = PROFILE["syscalls"]

# Installs the profile as a seccomp filter, as a container runtime does, and then judges one program.
UNDER = """
import ctypes, os, struct, sys
from reward_servers.sandbox import seccomp
from reward_servers.sandbox.syscalls import machine_table
denied = {denied!r}
_, number = machine_table()
body = [each for name in denied if name in number
        for each in seccomp._on_number(number[name], [(seccomp._RETURN, 0, 0, seccomp.EPERM)])]
program = seccomp._encode([(seccomp._LOAD, 0, 0, seccomp._NUMBER_AT), *body, (seccomp._RETURN, 0, 0, seccomp.ALLOW)])
code = ctypes.create_string_buffer(program)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges, which containers have too
made = Program(len(program) // 8, ctypes.addressof(code))
assert libc.prctl(22, 2, ctypes.byref(made), 0, 0) == 0, os.strerror(ctypes.get_errno())

from reward_servers.sandbox.health import Sandbox
from reward_servers.sandbox.judge import Case
from volley.errors import HostError
from volley.scoring import SandboxSpec
try:
    sandbox = Sandbox(SandboxSpec(min_tier="B"))
except HostError as error:
    sys.exit(str(error))
print(sandbox.report.tier, sandbox.report.probes_passed == sandbox.report.probes_total)
sandbox.close()
"""


def under(denied: list[str]) -> subprocess.CompletedProcess[str]:
    script = UNDER.format(denied=denied)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)


def test_the_sandbox_passes_its_probes_under_the_profile() -> None:
    run = under(RULE["names"])
    assert run.returncode == 0, run.stderr
    tier, proved = run.stdout.split()
    assert tier in ("A", "B")
    assert proved == "True"


@pytest.mark.parametrize("name", ["mount", "pivot_root"])
def test_the_sandbox_does_not_start_under_a_narrower_profile(name: str) -> None:
    run = under([*RULE["names"], name])
    assert run.returncode != 0
    assert "cannot isolate" in run.stderr


def test_the_profile_denies_only_what_the_sandbox_also_denies() -> None:
    assert (PROFILE["defaultAction"], RULE["action"]) == ("SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO")
    assert set(RULE["names"]) < set(policy.DENIED_SYSCALLS)
    assert {"bpf", "perf_event_open", "io_uring_setup", "keyctl", "userfaultfd", "kexec_load", "init_module"} <= set(
        RULE["names"]
    )
