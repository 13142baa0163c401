"""Programs under an interpreter of their own: what reaches them, what comes back, and how they end."""

import ast
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from environments.outside import child
from environments.outside.interpreter import Outside, check_outside
from environments.outside.programs import OutsidePrograms
from environments.records import Outcome
from services.jobs.job_file import load_job
from services.runs.episodes import check_program, import_program
from tests.integration.processes import wait_until_gone
from tests.unit.environments.conftest import URL
from volley.errors import JobError
from volley.job import EvalJob
from volley.rollout import ProgramRollout

Make = Callable[..., Any]


@pytest.fixture
async def started(python: str, code: None) -> AsyncIterator[Make]:
    made: list[OutsidePrograms] = []

    async def start(name: str = "agent", *, timeout: float = 20.0, replacements: int = 20) -> OutsidePrograms:
        outside = Outside(python, f"outside_programs:{name}")
        made.append(OutsidePrograms(outside, timeout, 60.0, replacements))
        await made[-1].start()
        return made[-1]

    yield start
    for each in made:
        await each.close()


async def run(programs: OutsidePrograms, does: str, **row: Any) -> Outcome:
    return (await programs.run({"does": does, **row}, URL, "key")).outcome


async def pid_of(programs: OutsidePrograms) -> int:
    return int((await run(programs, "pid")).reward or 0)


async def test_what_programs_return_with_packages_of_their_own(started: Make) -> None:
    programs = await started()
    assert await run(programs, "return") == Outcome(1.0)
    assert await run(programs, "return", returns=None) == Outcome()
    full = {"reward": 0.5, "answer": 4, "detail": "fi\nne"}
    assert await run(programs, "return", returns=full) == Outcome(0.5, "4", "fi\\nne")
    assert (await run(programs, "raise")).failure == r"the program raised ValueError: no\nluck"


@pytest.mark.parametrize("name", ["agent", "plain"])
async def test_what_is_no_exception_fails_its_episode_alone(started: Make, name: str) -> None:
    programs = await started(name)
    before = await pid_of(programs)
    raised = {"exit": "SystemExit: 3", "interrupt": "KeyboardInterrupt", "cancelled": "CancelledError", "mute": "Mute"}
    for does, named in raised.items():
        assert (await run(programs, does)).failure == f"the program raised {named}"
    assert await pid_of(programs) == before


@pytest.mark.parametrize(
    ("returns", "problem"),
    [
        ("float('nan')", "the reward nan; return a finite number"),
        ("10 ** 400", "the reward inf; return a finite number"),
        ("'1'", "'1'"),
        ("object()", "<object object"),
        ("agent(row, '', '')", "something to await as the reward; await it in an async def"),
    ],
)
async def test_rewards_that_are_no_numbers(started: Make, returns: str, problem: str) -> None:
    outcome = await run(await started("plain"), "return", returns=returns)
    assert outcome.failure.startswith("the program returned ")
    assert problem in outcome.failure
    assert outcome.reward is None


async def test_a_plain_function_that_returns_a_coroutine(started: Make) -> None:
    outcome = await run(await started("forgets"), "return")
    assert outcome.failure == "the program returned something to await: declare it with async def"


async def test_unknown_fields_and_rows_that_are_not_json(started: Make) -> None:
    programs = await started()
    assert "score" in (await run(programs, "return", returns={"score": 1})).failure
    assert "as JSON" in (await run(programs, "return", returns=object())).failure
    assert "as JSON" in (await run(programs, "return", returns=float("nan"))).failure


async def test_episodes_run_at_once_and_plain_functions_too(started: Make) -> None:
    for name in ("agent", "plain"):
        programs = await started(name)
        began = time.monotonic()
        rows = [run(programs, "return", seconds=2, returns="1.5") for _ in range(8)]
        outcomes = await asyncio.gather(*rows)
        assert time.monotonic() - began < 8
        assert len(outcomes) == 8


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ({"does": "die"}, "it died (exit code 7): last words"),
        ({"does": "crash"}, "it died (SIGSEGV)"),
        ({"does": "fork"}, "it died (exit code 7)"),
        ({"does": "flood"}, "it printed more than 64 MiB within a minute"),
        ({"does": "write", "text": "hello\n"}, "it sent something else than an answer: b'hello"),
        ({"does": "write", "text": "[]\n"}, "it sent something else than an answer"),
        ({"does": "write", "text": '{"ended": 77, "returned": 1}\n'}, "it sent something else than an answer"),
        ({"does": "write", "text": '{"ended": true}\n'}, "it sent something else than an answer"),
        ({"does": "write", "text": "[" * 100_000 + "\n"}, "it sent something else than an answer"),
        ({"does": "write", "text": "x" * 1000, "times": 2000}, "it sent a line of more than"),
    ],
)
async def test_a_process_that_dies_or_sends_garbage_is_replaced(
    started: Make, does: dict[str, Any], reason: str
) -> None:
    programs = await started()
    before = await pid_of(programs)
    outcome = (await programs.run(does, URL, "key")).outcome
    assert reason in outcome.failure
    assert outcome.failure.startswith("the program's process ended: ")
    wait_until_gone({before})
    assert await run(programs, "return") == Outcome(1.0)
    assert await pid_of(programs) != before


async def test_a_program_that_blocks_is_killed_with_what_it_started(started: Make) -> None:
    programs = await started(timeout=3.0)
    grandchild, before = int((await run(programs, "start")).reward or 0), await pid_of(programs)
    other = asyncio.create_task(run(programs, "return", seconds=2.0))
    blocked = await run(programs, "block")
    assert "rollout.timeout_s, 3 s" in blocked.failure
    assert (await other).failure
    wait_until_gone({before, grandchild})
    assert await run(programs, "return") == Outcome(1.0)


async def test_an_async_program_that_waits_too_long_is_cancelled_alone(
    started: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    programs = await started(timeout=1.5)
    before = await pid_of(programs)
    assert "timeout_s" in (await run(programs, "return", seconds=60)).failure
    assert await pid_of(programs) == before
    assert "Traceback" not in capfd.readouterr().err


async def test_a_function_that_hangs_is_ended_when_the_other_episodes_have_ended(started: Make, tmp_path: Path) -> None:
    programs = await started("plain", timeout=6.0)
    before = await pid_of(programs)
    hung = asyncio.create_task(run(programs, "return", seconds=600, returns="1"))
    await asyncio.sleep(4)
    other = asyncio.create_task(run(programs, "return", until=str(tmp_path / "end"), returns="1"))
    assert "timeout_s" in (await hung).failure
    assert await pid_of(programs) != before, "new episodes go to another process"
    (tmp_path / "end").touch()
    assert (await other).reward == 1.0, "it was left to end"
    wait_until_gone({before})


async def test_a_cancelled_group_cancels_its_programs(started: Make) -> None:
    programs = await started()
    before = await pid_of(programs)
    task = asyncio.create_task(run(programs, "return", seconds=15))
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await pid_of(programs) == before


async def test_too_many_deaths_end_the_run(started: Make) -> None:
    programs = await started(replacements=1)
    assert (await run(programs, "die")).failure
    assert (await run(programs, "die")).failure
    with pytest.raises(JobError, match=r"more than 1 times within an hour.*last words"):
        await run(programs, "return")


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("pydantic:BaseModel", "No module named 'pydantic'"),
        ("outside_programs:nobody", "has no function 'nobody'$"),
        ("outside_programs:aget", "has no function 'aget'; did you mean 'agent'"),
        ("outside_programs:two", r"def two\(row, base_url, api_key\)"),
        ("outside_programs:Klass", r"is a class, .* write async def solve\(row, base_url, api_key\)"),
        ("breaks:f", "ZeroDivisionError"),
    ],
)
async def test_a_target_that_the_interpreter_cannot_run(python: str, code: None, target: str, problem: str) -> None:
    with pytest.raises(JobError, match=problem) as checked:
        check_outside(Outside(python, target), 60.0)
    with pytest.raises(JobError) as begun:
        await OutsidePrograms(Outside(python, target), 5.0, 60.0, 1).start()
    assert str(checked.value) == str(begun.value)


async def test_an_executable_that_the_system_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("just text\n")
    (tmp_path / "python").chmod(0o755)
    outside = Outside(str(tmp_path / "python"), "agent:solve")
    with pytest.raises(JobError, match=r"cannot run 'agent:solve': it does not start \(Exec format error\)") as checked:
        check_outside(outside, 60.0)
    with pytest.raises(JobError) as begun:
        await OutsidePrograms(outside, 5.0, 60.0, 1).start()
    assert str(checked.value) == str(begun.value)


@pytest.mark.parametrize(
    ("command", "problem"),
    [("no/such/python", "not an executable file"), ("/bin/true", "is it Python?"), ("/bin/cat", "cannot run")],
)
def test_an_interpreter_that_is_none(command: str, problem: str) -> None:
    with pytest.raises(JobError, match=problem.replace("?", r"\?")):
        check_outside(Outside(command, "agent:solve"), 60.0)


def test_a_program_that_hangs_on_import(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(JobError, match="did not answer within 1 s"):
        check_outside(Outside(python, "hangs:f"), 1.0)


def test_a_program_that_can_be_called(python: str, code: None) -> None:
    check_outside(Outside(python, "outside_programs:agent"), 60.0)


async def test_the_process_ends_with_its_parent(python: str, code: None, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, os, sys\n"
        "from environments.outside.interpreter import Outside\n"
        "from environments.outside.programs import OutsidePrograms\n"
        "async def main():\n"
        f"    programs = OutsidePrograms(Outside({python!r}, 'outside_programs:agent'), 20, 60, 1)\n"
        "    await programs.start()\n"
        f"    for does in ('pid', 'start'):\n"
        f"        print((await programs.run({{'does': does}}, {URL!r}, 'key')).outcome.reward, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    parent = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    said, _ = await parent.communicate()
    wait_until_gone({int(float(line)) for line in said.split()})


def test_the_child_needs_nothing_but_python_3_10() -> None:
    tree = ast.parse(Path(child.__file__).read_text(), feature_version=(3, 10))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert imported <= sys.stdlib_module_names


def test_an_interpreter_is_relative_to_its_job_and_stays_a_link(python: str, tmp_path: Path) -> None:
    (tmp_path / "envs").symlink_to(Path(python).parents[2])
    relative = f"envs/{Path(python).parents[1].name}/bin/python"
    job = {"kind": "eval", "name": "a", "model": {"path": "m"}, "data": {"path": "d"}, "sampling": {"n": 2}, "ks": [1]}
    for given, read in ((relative, str(tmp_path / relative)), ("~/envs/bin/python", "~/envs/bin/python")):
        rollout = {"kind": "program", "target": "outside_programs:agent", "python": given}
        (tmp_path / "job.yaml").write_text(json.dumps({**job, "rollout": rollout}))
        loaded = load_job(tmp_path / "job.yaml")
        assert isinstance(loaded, EvalJob)
        assert isinstance(loaded.rollout, ProgramRollout)
        assert loaded.rollout.python == read


def test_check_program_asks_the_interpreter(python: str, code: None) -> None:
    tree = {"kind": "eval", "name": "a", "model": {"path": "m"}, "data": {"path": "d"}, "sampling": {"n": 2}, "ks": [1]}
    rollout = {"kind": "program", "target": "outside_programs:agent", "python": python}
    job = EvalJob.model_validate({**tree, "rollout": rollout})
    check_program(job)
    import_program(job)
    assert "outside_programs" not in sys.modules
    missing = EvalJob.model_validate({**tree, "rollout": {**rollout, "target": "outside_programs:nobody"}})
    with pytest.raises(JobError, match="has no function 'nobody'"):
        check_program(missing)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_child_that_cannot_be_written_to_is_replaced(
    python: str, code: None, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        programs = OutsidePrograms(Outside(python, "outside_programs:agent"), 20.0, 60.0, 5)
        await programs.start()
        child = programs._child
        assert child is not None
        assert child._process.stdin is not None
        os.kill(child._process.pid, signal.SIGSTOP)  # or it would end with its pipe
        child._process.stdin.close()
        await asyncio.sleep(0.1)
        assert (await run(programs, "return")).failure == "the program's process ended: it closed its pipe"
        assert await run(programs, "return") == Outcome(1.0)
        await programs.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
