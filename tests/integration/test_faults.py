"""``volley run`` as a user starts it, with killed workers, Ctrl-C, or a Redis that rejects it; no process is left."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.hangup import hangup_counts
from tests.integration.jobs import unhurried_job, write_inputs
from tests.integration.processes import descendants
from volley.forking import VARIABLE

pytestmark = pytest.mark.integration

VOLLEY = str(Path(sys.executable).parent / "volley")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that takes minutes."""
    folder = tmp_path_factory.mktemp("faults")
    write_inputs(folder)
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(unhurried_job(folder, steps=2000, checkpoint={"every": None})))
    return file


_started: list["Running"] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """End what a failed test leaves behind, which would slow down all that follow."""
    yield
    while _started:
        run = _started.pop()
        for pid in descendants(run.process.pid) | {run.process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # Ray's own helpers notice a killed head only after minutes


class Running:
    """A ``volley run`` in the background, whose engines are forked by a server of its own if it starts a Ray head."""

    def __init__(
        self, job: Path, out: Path, *arguments: str, in_terminal: bool = False, own_server: bool = True
    ) -> None:
        self.out = out
        self.terminal, inner = pty.openpty() if in_terminal else (-1, subprocess.DEVNULL)
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}  # the job uses a scorer in this repository
        if own_server:
            environment.pop(VARIABLE, None)
        out.mkdir(exist_ok=True)
        self.errors = out / "stderr.txt"
        with self.errors.open("w") as errors:  # a file, because processes left by a killed run would keep a pipe open
            self.process = subprocess.Popen(
                [VOLLEY, "run", str(job), "--out", str(out), *arguments],
                stdin=inner,
                stdout=inner,
                stderr=inner if in_terminal else errors,
                env=environment,
                start_new_session=True,
                preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if in_terminal else None,
            )
        if in_terminal:
            os.close(inner)
            threading.Thread(target=read_all, args=(self.terminal,), daemon=True).start()
        self.seen: set[int] = set()
        _started.append(self)

    def wait_for_steps(self, more: int = 3, seconds: float = 180) -> None:
        """Wait until the run has trained a few more steps."""
        deadline = time.monotonic() + seconds
        wanted = self.steps() + more
        while time.monotonic() < deadline:
            if self.steps() >= wanted:
                self.seen |= descendants(self.process.pid)
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        self.process.kill()
        self.process.wait()
        pytest.fail(f"no steps: {self.errors.read_text()}")

    def steps(self) -> int:
        """Steps trained so far."""
        metrics = list(self.out.glob("*/metrics.jsonl"))
        return len(metrics[0].read_text().splitlines()) if metrics else 0

    def end(self, seconds: float = 60) -> tuple[int, str]:
        """Wait for the exit code and the error text; fails if the run does not end."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail("volley run did not end")
        return code, self.errors.read_text()

    def leftovers(self, seconds: float = 15) -> list[str]:
        """Processes of the run that are still alive."""
        deadline = time.monotonic() + seconds
        while (names := [name for pid in self.seen if (name := command(pid)) and not name.startswith(RAYS_OWN)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.2)
        return names

    def summary(self) -> dict[str, object]:
        (file,) = self.out.glob("*/summary.json")
        return dict(json.loads(file.read_text()))


def read_all(terminal: int) -> None:
    """Read what is printed, as a terminal does, until it is closed."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 4096):
            pass


def command(pid: int) -> str:
    """The process's command line; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def process_named(seen: set[int], matches: Callable[[str], bool]) -> int:
    """The one process whose title matches."""
    found = []
    for pid in seen:
        command = Path(f"/proc/{pid}/cmdline")
        if command.exists() and matches(command.read_text().replace("\0", " ")):
            found.append(pid)
    assert len(found) == 1, [Path(f"/proc/{pid}/cmdline").read_text() for pid in seen]
    return found[0]


@pytest.mark.parametrize(
    ("title", "name", "arguments"),
    [
        pytest.param("ray::Rank", "learner-0", ("--set", "learner.max_restarts=0"), id="learner rank, none restarted"),
        pytest.param("ray::Actor", "actor-0", ("--set", "actors.max_replacements=0"), id="actor, none replaced"),
    ],
)
def test_a_killed_worker_ends_the_run_with_its_name_and_no_process_is_left(
    job: Path, tmp_path: Path, title: str, name: str, arguments: tuple[str, ...]
) -> None:
    run = Running(job, tmp_path, *arguments)
    run.wait_for_steps()
    os.kill(process_named(run.seen, lambda command: command.startswith(title)), signal.SIGKILL)
    code, errors = run.end()
    assert code == 1
    assert f"{name} died" in errors
    assert "Traceback" not in errors.splitlines()[0]
    assert run.summary()["state"] == "failed"
    assert run.leftovers() == []


def test_a_killed_actor_is_replaced_and_after_ctrl_c_no_process_is_left(job: Path, tmp_path: Path) -> None:
    run = Running(job, tmp_path)
    run.wait_for_steps()
    os.kill(process_named(run.seen, lambda command: command.startswith("ray::Actor")), signal.SIGKILL)
    run.wait_for_steps(more=15)
    (events,) = tmp_path.glob("*/events.jsonl")
    assert [json.loads(line)["kind"] for line in events.read_text().splitlines()] == ["started", "actor_died"]
    os.killpg(run.process.pid, signal.SIGINT)  # to the whole foreground process group, as a terminal does
    code, errors = run.end()
    assert code == 130
    assert errors.strip() == "volley: stopping at a checkpoint, within 30 s; a second signal ends it at once"
    assert run.summary()["state"] == "stopped"
    assert run.leftovers() == []
    assert list(tmp_path.glob(f"*/checkpoints/step-{run.steps()}")), "no step has to be repeated"


def test_a_closed_terminal_ends_the_run_in_order_and_it_can_be_resumed(job: Path, tmp_path: Path) -> None:
    """The kernel sends SIGHUP to the whole process group, and whatever is printed afterwards fails."""
    with hangup_counts():
        run = Running(job, tmp_path, in_terminal=True)
    run.wait_for_steps()
    os.close(run.terminal)
    code, _ = run.end()
    assert code == 130
    assert run.summary()["state"] == "stopped"
    assert run.leftovers() == []
    assert list(tmp_path.glob(f"*/checkpoints/step-{run.steps()}")), "no step has to be repeated"


def test_no_process_is_left_after_the_driver_is_killed(job: Path, tmp_path: Path) -> None:
    run = Running(job, tmp_path)
    run.wait_for_steps()
    run.process.kill()
    run.end()
    assert run.leftovers(30) == []


def test_a_redis_that_rejects_us_is_a_clear_error(job: Path, tmp_path: Path) -> None:
    run = Running(job, tmp_path, "--redis", "redis://127.0.0.1:1/0")
    code, errors = run.end()
    assert code == 1
    (line,) = errors.strip().splitlines()
    assert "Redis at redis://127.0.0.1:1/0 does not answer" in line


def test_an_unreachable_ray_cluster_is_a_clear_error(job: Path, tmp_path: Path) -> None:
    run = Running(job, tmp_path, "--ray", "127.0.0.1:1")
    code, errors = run.end(120)
    assert code == 1
    assert errors.strip().splitlines()[-1].startswith("volley: Ray at 127.0.0.1:1 does not answer")


def test_a_model_that_does_not_load_is_a_clear_error(job: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    source = job.parent / "model"
    for file in source.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"not safetensors")
    run = Running(job, tmp_path / "out", "--set", f"model.path={broken}")
    code, errors = run.end(120)
    assert code == 1
    (line,) = errors.strip().splitlines()
    assert f"model {broken} does not load" in line
