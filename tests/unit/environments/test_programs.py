"""Programs of every kind: what they return, raise, hang on and hold up."""

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from environments.programs import Programs, WrongReturn, _OnLoop, load_program, outcome_of
from environments.records import Outcome
from volley.errors import JobError, WorkerDied

URL = "http://127.0.0.1:1/v1"
RELEASE = threading.Event()  # what blocks waits for it


class Mute(Exception):
    """Does not say what it is."""

    def __str__(self) -> str:
        raise ValueError


BASE = {"cancelled": asyncio.CancelledError(), "interrupt": KeyboardInterrupt(), "base": BaseException("no luck")}
BASE |= {"mute": Mute()}


async def agent(row: dict[str, Any], base_url: str, api_key: str) -> Any:
    match row["does"]:
        case "raise":
            raise ValueError("no\nluck")
        case "exit":
            sys.exit(3)
        case "sleep":
            await asyncio.sleep(60)
        case "block":
            RELEASE.wait(60)
        case "cancel":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(60)
        case "exit in a task":
            await asyncio.create_task(agent({"does": "exit"}, base_url, api_key))
        case "cancelled" | "interrupt" | "base" | "mute" as how:
            raise BASE[how]
        case "tidy":
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.3)
        case "stubborn":
            for _ in range(2):
                try:
                    await asyncio.sleep(30)
                except asyncio.CancelledError:
                    continue
    return row.get("returns", (base_url, api_key) == (URL, "key"))


def plain(row: dict[str, Any], base_url: str, api_key: str) -> Any:
    match row["does"]:
        case "raise":
            raise ValueError("no\nluck")
        case "exit":
            sys.exit(3)
        case "sleep":
            RELEASE.wait(60)
        case "cancelled":
            asyncio.run(agent(row, base_url, api_key))
        case "interrupt" | "base" | "mute" as how:
            raise BASE[how]
    return row.get("returns", (base_url, api_key) == (URL, "key"))


class Unreadable(dict[str, Any]):
    """A result that ends in KeyboardInterrupt as it is read."""

    def get(self, *_: object) -> Any:
        raise KeyboardInterrupt


async def run(program: Any, does: str, *, timeout: float = 5.0, **row: Any) -> Any:
    return await Programs(program, timeout).run({"does": does, **row}, URL, "key")


@pytest.mark.parametrize("program", [agent, plain])
async def test_what_programs_return(program: Any) -> None:
    assert (await run(program, "return")).outcome == Outcome(1.0)
    assert (await run(program, "return", returns=None)).outcome == Outcome()
    full = {"reward": 0.5, "answer": 4, "detail": "fi\nne"}
    assert (await run(program, "return", returns=full)).outcome == Outcome(0.5, "4", "fi\\nne")


@pytest.mark.parametrize("program", [agent, plain])
@pytest.mark.parametrize(
    ("does", "named"),
    [
        ("raise", r"ValueError: no\nluck"),
        ("exit", "SystemExit: 3"),
        ("cancelled", "CancelledError"),
        ("interrupt", "KeyboardInterrupt"),
        ("base", "BaseException: no luck"),
        ("mute", "Mute"),
    ],
)
async def test_a_program_that_raises_fails_alone(program: Any, does: str, named: str) -> None:
    programs = Programs(program, 5.0)
    ended = await asyncio.gather(*(programs.run({"does": each}, URL, "key") for each in (does, "return")))
    assert ended[0].outcome.failure == f"the program raised {named}"
    assert (ended[0].stuck, ended[1].outcome) == ("", Outcome(1.0))


async def test_a_task_that_a_program_starts_does_not_end_the_loop_of_all() -> None:
    programs = Programs(agent, 5.0)
    for _ in range(2):
        outcome = (await programs.run({"does": "exit in a task"}, URL, "key")).outcome
        assert outcome.failure == "the program raised SystemExit: 3"


@pytest.mark.parametrize("program", [agent, plain])
async def test_a_result_that_cannot_be_read_fails_its_episode(program: Any) -> None:
    outcome = (await run(program, "return", returns=Unreadable(reward=1.0))).outcome
    assert outcome.failure == "the program raised KeyboardInterrupt"


async def test_what_escapes_an_episode_ends_it() -> None:
    async def escapes() -> Outcome:
        raise LookupError("a fault of ours")

    failure = (await asyncio.wrap_future(_OnLoop(asyncio.get_running_loop(), escapes()).ended)).failure
    assert failure == "the program raised LookupError: a fault of ours"


async def test_an_async_program_that_waits_too_long_is_cancelled() -> None:
    ended = await run(agent, "sleep", timeout=0.1)
    assert "rollout.timeout_s, 0.1 s" in ended.outcome.failure
    assert ended.stuck == ""


async def test_what_still_runs_after_its_time_is_reported() -> None:
    try:
        assert (await run(plain, "sleep", timeout=0.1)).stuck == "thread"
        assert (await run(agent, "block", timeout=0.1)).stuck == "loop"
    finally:
        RELEASE.set()


async def test_an_async_program_that_swallows_its_cancellation_is_reported() -> None:
    programs = Programs(agent, 0.5)
    stubborn, other = await asyncio.gather(
        *(programs.run({"does": each}, URL, "key") for each in ("stubborn", "sleep"))
    )
    assert ("rollout.timeout_s" in stubborn.outcome.failure, stubborn.stuck) == (True, "thread")
    assert ("rollout.timeout_s" in other.outcome.failure, other.stuck) == (True, "")
    assert (await programs.run({"does": "return"}, URL, "key")).outcome == Outcome(1.0), "the loop is free"


async def test_an_async_program_may_take_a_moment_to_end() -> None:
    assert (await run(agent, "tidy", timeout=0.1)).stuck == ""


async def test_an_async_program_that_cancels_itself_fails_alone() -> None:
    assert (await run(agent, "cancel")).outcome.failure == "the program cancelled itself"


async def test_plain_functions_run_at_once() -> None:
    together = threading.Barrier(3, timeout=10)

    def meet(row: Any, base_url: str, api_key: str) -> float:
        return float(together.wait() >= 0)

    programs = Programs(meet, 20)
    ended = await asyncio.gather(*(programs.run({}, URL, "key") for _ in range(3)))
    assert [each.outcome.reward for each in ended] == [1.0] * 3


async def test_a_group_that_is_cancelled_ends_its_programs(capfd: pytest.CaptureFixture[str]) -> None:
    began, ended = threading.Event(), threading.Event()

    async def waits(row: Any, base_url: str, api_key: str) -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    task = asyncio.create_task(Programs(waits, 50).run({}, URL, "key"))
    assert await asyncio.to_thread(began.wait, 20)
    task.cancel()
    assert await asyncio.to_thread(ended.wait, 20)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("value", [True, np.float32(1), np.int64(1), 1])
def test_rewards_may_be_any_number(value: Any) -> None:
    assert outcome_of(value).reward == 1.0


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("1", "returned '1'; return a number, a mapping with reward, or None"),
        (b"1", "return a number"),
        ([1.0], "return a number"),
        (object(), "return a number"),
        ({"reward": "x"}, "return a number"),
        (np.ones(2), "return one number"),
        (float("nan"), "the reward nan; return a finite number"),
        ({"reward": float("inf")}, "the reward inf; return a finite number"),
        (10**400, "return a finite number"),
        ({"score": 1}, "returned score; it may return reward, answer and detail"),
        ({1: 2}, "returned 1; it may return reward"),
    ],
)
def test_anything_else_is_an_error_that_says_what_to_return(value: Any, advice: str) -> None:
    with pytest.raises(WrongReturn) as problem:
        outcome_of(value)
    assert advice in str(problem.value)


@pytest.mark.parametrize("program", [agent, plain])
async def test_a_wrong_return_is_not_called_an_exception(program: Any, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = (await run(program, "return", returns="yes")).outcome
    assert outcome.failure == "the program returned 'yes'; return a number, a mapping with reward, or None"
    assert "Traceback" not in capfd.readouterr().err


async def test_a_plain_function_that_returns_a_coroutine() -> None:
    async def later() -> float:
        return 1.0

    def forgets(row: Any, base_url: str, api_key: str) -> Any:
        return {"reward": later()} if row["does"] == "judge" else later()

    assert "returned something to await: declare it with async def" in (await run(forgets, "")).outcome.failure
    assert "something to await as the reward; await it" in (await run(forgets, "judge")).outcome.failure


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("no_such_module:f", "does not import"),
        ("json:no_such", "has no function 'no_such'$"),
        ("json:laods", "has no function 'laods'; did you mean json:loads"),
        ("math:sqrt", r"def sqrt\(row, base_url, api_key\)"),
        ("programs_that_break:f", "ZeroDivisionError"),
    ],
)
def test_a_target_that_cannot_be_called(
    target: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "programs_that_break.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(JobError, match=problem):
        load_program(target)


class Environment:
    """Notes where it is made, used and closed."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.loop = asyncio.get_running_loop()
        self.notes = ["made"]

    async def setup(self) -> None:
        await asyncio.sleep(0)
        self.notes.append("set up")

    async def run(self, row: dict[str, Any], base_url: str, api_key: str) -> Any:
        self.notes.append(row["does"])
        return {"reward": float(self.loop is asyncio.get_running_loop()), "detail": " ".join(self.notes)}

    async def close(self) -> None:
        self.notes.append("closed")
        raise RuntimeError("too late to matter")


class PlainEnvironment:
    def __init__(self) -> None:
        self.lock, self.used = threading.Lock(), 0

    def run(self, row: dict[str, Any], base_url: str, api_key: str) -> float:
        with self.lock:
            self.used += 1
            return float(self.used)


class NeedsMore:
    def __init__(self, path: str) -> None:
        """Without a default."""

    async def run(self, row: dict[str, Any], base_url: str, api_key: str) -> float:
        return 0.0


class NoRun:
    """Nothing to call."""


class OtherRun:
    async def run(self, row: dict[str, Any]) -> float:
        return 0.0


class Halfway:
    async def setup(self) -> None:
        """Async, while run is not."""

    def run(self, row: dict[str, Any], base_url: str, api_key: str) -> float:
        return 0.0


class Broken:
    problem: BaseException = OSError("no\nserver")

    def setup(self) -> None:
        raise self.problem

    async def run(self, row: dict[str, Any], base_url: str, api_key: str) -> float:
        return 0.0


async def test_a_class_is_made_once_and_closed(capsys: pytest.CaptureFixture[str]) -> None:
    Environment.made = 0
    programs = Programs(load_program(f"{__name__}:Environment"), 5.0)
    await programs.set_up()
    first = (await programs.run({"does": "one"}, URL, "key")).outcome
    second = (await programs.run({"does": "two"}, URL, "key")).outcome
    assert (first.reward, first.detail) == (1.0, "made set up one")
    assert (second.reward, second.detail) == (1.0, "made set up one two")
    await programs.close()
    assert Environment.made == 1
    assert "too late to matter" in capsys.readouterr().err


async def test_a_class_with_a_plain_run_needs_neither_setup_nor_close() -> None:
    programs = Programs(load_program(f"{__name__}:PlainEnvironment"), 5.0)
    await programs.set_up()
    ended = await asyncio.gather(*(programs.run({}, URL, "key") for _ in range(8)))
    assert sorted(each.outcome.reward or 0.0 for each in ended) == [float(i) for i in range(1, 9)]
    await programs.close()


class PlainBroken(Broken):
    def run(self, row: dict[str, Any], base_url: str, api_key: str) -> float:  # type: ignore[override]
        return 0.0


@pytest.mark.parametrize("name", ["Broken", "PlainBroken"])
@pytest.mark.parametrize(
    ("problem", "named"),
    [
        (OSError("no\nserver"), r"OSError: no\\nserver"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
)
async def test_a_class_that_cannot_be_set_up_is_like_a_worker_that_dies(
    name: str, problem: BaseException, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Broken, "problem", problem)
    programs = Programs(load_program(f"{__name__}:{name}"), 5.0)
    with pytest.raises(WorkerDied, match=f"setting up rollout.target raised {named}"):
        await programs.set_up()
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("NeedsMore", "made without arguments.*path"),
        ("NoRun", "needs a method async def run"),
        ("OtherRun", "OtherRun.run does not take"),
        ("Halfway", "setup is async and run is not"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_with_advice(name: str, advice: str) -> None:
    with pytest.raises(JobError, match=advice):
        load_program(f"{__name__}:{name}")
