"""Reward functions: async, of a group, retried, limited and kept; whatever fails is an infra error."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reward_servers.scorers import Scorer, build_scorer, check_scorer, try_scorer
from reward_servers.scorers.base import Place
from volley.errors import JobError
from volley.processes import is_alive
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import ExactScorer, FormatTerm, PythonScorer, SumScorer, WeightedTerm

FUNCTIONS = """
import asyncio, functools, json, os, time
from pathlib import Path

class ServerSays(Exception):
    def __init__(self, headers):
        self.response = type("Response", (), {"headers": headers})()

barrier = None

async def together(sample, row):
    global barrier
    barrier = barrier or asyncio.Barrier(row["parties"])
    await barrier.wait()
    return float(sample)

async def moody(sample, row):
    if sample == "raise": raise RuntimeError("judge is down")
    if sample == "hang": await asyncio.sleep(60)
    if sample == "block": time.sleep(60)
    if sample == "cancel": raise asyncio.CancelledError
    return {"reward": 1.0, "answer": str(os.getpid())}

async def asks(sample, row):
    reply = {"error": "quota"}
    return reply["choices"]

async def typo(sample, row):
    return smaple

def of_group(samples, row):
    return [len(sample) / max(map(len, samples)) for sample in samples]

async def async_of_group(samples, row):
    await asyncio.sleep(0)
    return [{"reward": index, "rank": -index} for index, _ in enumerate(samples)]

def completions(completions, row):
    return [1.0] * len(completions)

def some(samples, row):
    return [None if sample == "odd" else 1.0 for sample in samples]

def too_few(samples, row):
    return [1.0]

def one_number(samples, row):
    return 1.0

def a_list(sample, row):
    return [1.0]

def nothing(sample, row):
    pass

def wrapper(sample, row):
    return moody(sample, row)

def three(a, b, c): ...

def like_trl(completions, **kwargs): ...

def yields(sample, row):
    yield 1.0

def _counted(row):
    calls = Path(row["calls"])
    with calls.open("a") as file:
        file.write(f"{time.time()}\\n")
    return len(calls.read_text().splitlines())

async def flaky(sample, row):
    if _counted(row) <= row["failures"]: raise ServerSays({"retry-after": row.get("wait", "")})
    return 1.0

def counted(sample, row):
    count = _counted(row)
    if sample == "raise": raise OSError("no route")
    return float(count)

def counted_group(samples, row):
    count = _counted(row)
    return [None if sample == "odd" else float(count) for sample in samples]

async def crowded(sample, row):
    mine = Path(row["room"]) / f"{os.getpid()}-{sample}"
    mine.touch()
    try:
        seen = 0
        for _ in range(5):
            seen = max(seen, len(list(mine.parent.iterdir())))
            await asyncio.sleep(0.02)
        return float(seen)
    finally:
        mine.unlink()

def meets(sample, row, name="a", other="b"):
    (Path(row["room"]) / name).touch()
    while not (Path(row["room"]) / other).exists():
        time.sleep(0.01)
    return 1.0

meets_back = functools.partial(meets, name="b", other="a")

def key_error(sample, row):
    return row[sample]

def wraps_server(sample, row):
    try:
        raise ConnectionError("refused")
    except ConnectionError as error:
        raise ValueError("no verdict") from error

def own_error(sample, row):
    raise ServerSays({})
"""
MODULE = "reward_functions_of_a_user"
Build = Callable[..., Scorer]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / f"{MODULE}.py"
    file.write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return file


@pytest.fixture
def build(module: Path) -> Iterator[Build]:
    """Builds a scorer from a function's name and keys of the job; closes it after the test."""
    built: list[Scorer] = []

    def make(function: str, place: Place | None = None, **keys: Any) -> Scorer:
        built.append(build_scorer(_spec(function, **keys), place or Place()))
        return built[-1]

    yield make
    for scorer in built:
        scorer.close()


def _spec(function: str, **keys: Any) -> PythonScorer:
    return PythonScorer.model_validate({"target": f"{MODULE}:{function}", **keys})


def _prompt(**row: Any) -> Prompt:
    return Prompt("p", "question", row)


def _unscored(verdict: Verdict) -> str:
    assert verdict.status is VerdictStatus.INFRA_ERROR
    assert verdict.reward is None
    return verdict.detail


# ---- async functions -----------------------------------------------------------------------------------------------


def test_all_samples_of_an_async_function_run_at_once(build: Build) -> None:
    verdicts = build("together", timeout_s=30).score(_prompt(parties=16), [f"{i}" for i in range(16)])
    assert [verdict.reward for verdict in verdicts] == [float(i) for i in range(16)], "each waited for all others"


def test_an_async_call_that_fails_leaves_the_others_alone(build: Build) -> None:
    scorer = build("moody", timeout_s=1)
    verdicts = scorer.score(_prompt(), ["a", "raise", "hang", "cancel", "b"])
    assert "raised RuntimeError: judge is down (line" in _unscored(verdicts[1])
    assert "gave no answer within 1 s" in _unscored(verdicts[2])
    assert "CancelledError" in _unscored(verdicts[3])
    (later,) = scorer.score(_prompt(), ["c"])
    assert verdicts[0].answer == verdicts[4].answer == later.answer, "the process was not replaced"


def test_an_async_function_that_blocks_is_killed_and_told_so(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_servers.scorers.python.KILL_AFTER_S", 0.2)
    scorer = build("moody", timeout_s=1)
    assert "use await, or asyncio.to_thread" in _unscored(scorer.score(_prompt(), ["block"])[0])
    assert scorer.score(_prompt(), ["fine"])[0].reward == 1.0


# ---- functions of the whole group ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "keys", "rewards"),
    [
        ("of_group", {}, [0.5, 1.0]),
        ("async_of_group", {}, [0.0, 1.0]),
        ("completions", {"takes": "group"}, [1.0, 1.0]),
    ],
)
def test_a_function_may_take_the_whole_group(build: Build, function: str, keys: Any, rewards: list[float]) -> None:
    assert [verdict.reward for verdict in build(function, **keys).score(_prompt(), ["a", "bb"])] == rewards


def test_a_group_function_may_leave_single_samples_out(build: Build) -> None:
    fine, odd = build("some").score(_prompt(), ["even", "odd"])
    assert fine.reward == 1.0
    assert "returned None for this sample" in _unscored(odd)


@pytest.mark.parametrize(
    ("function", "keys", "told"),
    [
        ("too_few", {}, "returned 1 rewards for a group of 2 samples: return a list with one reward per sample"),
        ("one_number", {}, "returned float for a group of 2 samples"),
        ("a_list", {}, "returned a list for one sample: .* sets takes: group"),
        ("nothing", {}, "returned None: return a number, or a dict with the key reward"),
        ("wrapper", {}, "not declared with async def"),
        ("of_group", {"takes": "sample"}, "returned a list for one sample"),
    ],
)
def test_what_is_no_reward_says_what_to_return(build: Build, function: str, keys: Any, told: str) -> None:
    verdicts = build(function, **keys).score(_prompt(), ["a", "b"])
    for verdict in verdicts:
        assert verdict.mistake == "returned no reward"
        with pytest.raises(AssertionError, match=told):
            raise AssertionError(_unscored(verdict))


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("function", "told"),
    [("three", r"takes \(a, b, c\): write \(sample, row\)"), ("like_trl", "samples, row"), ("yields", "must return")],
)
def test_a_function_that_cannot_be_called_is_rejected_before_the_run(function: str, told: str) -> None:
    with pytest.raises(JobError, match=told):
        check_scorer(_spec(function), [])


@pytest.mark.usefixtures("module")
def test_trying_a_group_function_gives_it_a_group() -> None:
    ((_, verdict),) = try_scorer(_spec("async_of_group"), _prompt(), "x")
    assert verdict.reward == 0.0


# ---- retries, limits, the group's time -----------------------------------------------------------------------------


@pytest.mark.parametrize(("retries", "calls"), [(1, 2), (2, 3), (5, 3)])
def test_a_failed_call_is_repeated(build: Build, tmp_path: Path, retries: int, calls: int) -> None:
    row = {"calls": str(tmp_path / "calls"), "failures": 2}
    (verdict,) = build("flaky", retries=retries, retry_wait_s=0.01).score(_prompt(**row), ["a"])
    assert len((tmp_path / "calls").read_text().splitlines()) == calls
    if retries == 1:
        assert "raised" in _unscored(verdict)
    else:
        assert verdict.reward == 1.0


def test_a_retry_waits_as_long_as_the_server_asks(build: Build, tmp_path: Path) -> None:
    row = {"calls": str(tmp_path / "calls"), "failures": 1, "wait": "0.4"}
    build("flaky", retries=1, retry_wait_s=0.01).score(_prompt(**row), ["a"])
    first, second = map(float, (tmp_path / "calls").read_text().split())
    assert second - first >= 0.4


def test_calls_at_once_are_bounded_in_all_workers_together(build: Build, tmp_path: Path) -> None:
    room, texts = tmp_path / "room", [f"{i}" for i in range(5)]
    room.mkdir()
    place, spec = Place(tmp_path / "rewards"), _spec("crowded", max_concurrent=2)
    terms = (WeightedTerm(scorer=spec, weight=1), WeightedTerm(scorer=spec, weight=100))  # two processes
    both = build_scorer(SumScorer(terms=terms), place)
    rewards = [verdict.reward or 0.0 for verdict in both.score(_prompt(room=str(room)), texts)]
    both.close()
    crowds = [crowd for reward in rewards for crowd in (reward % 100, reward // 100)]
    assert max(crowds) == 2
    alone = build("crowded").score(_prompt(room=str(room)), texts)
    assert max(verdict.reward or 0.0 for verdict in alone) > 2, "without a bound it is exceeded"


def test_a_group_whose_time_is_over_is_given_up_but_not_its_worker(build: Build) -> None:
    scorer = build("moody", Place(group_s=3.0), timeout_s=60)
    scorer.score(_prompt(), ["warm up"])
    fine, late = scorer.score(_prompt(), ["fine", "hang"])
    assert fine.reward == 1.0
    assert "raise reward_workers.group_deadline_s" in _unscored(late)
    assert scorer.score(_prompt(), ["fine"])[0].reward == 1.0


# ---- the cache -----------------------------------------------------------------------------------------------------


def test_results_are_kept_by_content_for_a_resumed_run(build: Build, tmp_path: Path, module: Path) -> None:
    place, calls = Place(tmp_path / "rewards"), str(tmp_path / "calls")

    def rewards(*texts: str, row: str = "", **keys: Any) -> list[float | None]:
        scorer = build("counted", place, **{"cache": 10, **keys})  # a new worker each time
        found = [verdict.reward for verdict in scorer.score(_prompt(calls=calls, row=row), texts)]
        scorer.close()
        return found

    assert rewards("a", "b", "a") == [1.0, 2.0, 1.0], "equal samples of a group are asked for once"
    assert rewards("b", "a", retries=3, timeout_s=5) == [2.0, 1.0], "limits and retries change no result"
    assert rewards("a", row="other") == [3.0]
    assert rewards("raise") == [None]
    assert rewards("raise") == [None]
    assert rewards("c") == [6.0], "both failures were called"
    assert rewards("a", cache=0) == [7.0]
    module.write_text(FUNCTIONS + "\n# changed\n")
    assert rewards("a") == [8.0], "another function"


def test_only_the_latest_results_are_kept(build: Build, tmp_path: Path) -> None:
    scorer = build("counted", Place(tmp_path / "rewards"), cache=2)
    prompt = _prompt(calls=str(tmp_path / "calls"))
    assert [v.reward for text in "abcacb" for v in scorer.score(prompt, [text])] == [1, 2, 3, 4, 3, 5]


def test_a_group_is_kept_as_a_whole_or_not_at_all(build: Build, tmp_path: Path) -> None:
    scorer = build("counted_group", Place(tmp_path / "rewards"), cache=2)
    prompt = _prompt(calls=str(tmp_path / "calls"))
    assert [v.reward for v in scorer.score(prompt, ["a", "b"])] == [1.0, 1.0]
    assert [v.reward for v in scorer.score(prompt, ["b", "a"])] == [2.0, 2.0], "a reward may depend on the others"
    assert [v.reward for v in scorer.score(prompt, ["a", "b"])] == [1.0, 1.0]
    assert [v.reward for v in scorer.score(prompt, ["a", "odd"])] == [3.0, None]
    assert [v.reward for v in scorer.score(prompt, ["a", "odd"])] == [4.0, None]


def test_a_broken_file_of_results_stops_no_scoring(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, prompt = Place(tmp_path / "rewards"), _prompt(calls=str(tmp_path / "calls"))
    build("counted", place, cache=2).score(prompt, ["a"])
    (file,) = (tmp_path / "rewards").glob("*/results.sqlite")
    file.write_bytes(b"no database" * 1000)
    scorer = build("counted", place, cache=2)
    assert [v.reward for v in scorer.score(prompt, ["a", "b"])] == [2.0, 3.0]
    assert "are kept no longer" in caplog.text


# ---- sums, mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("module")
def test_a_sum_mixes_all_kinds_and_a_failing_term_leaves_no_reward(tmp_path: Path) -> None:
    terms = [
        {"scorer": ExactScorer(), "weight": 1000},
        {"scorer": _spec("moody", timeout_s=5), "weight": 100},
        {"scorer": _spec("some"), "weight": 10},
        {"scorer": FormatTerm(contains=("e",)), "weight": 1},
    ]
    scorer = build_scorer(SumScorer.model_validate({"terms": terms}))
    verdicts = scorer.score(_prompt(answer="yes"), ["yes", "raise", "odd", "no"])
    scorer.close()
    assert [verdict.reward for verdict in verdicts] == [1111, None, None, 110]
    assert "judge is down" in _unscored(verdicts[1])


@pytest.mark.usefixtures("module")
def test_the_functions_of_a_sum_run_at_the_same_time(tmp_path: Path) -> None:
    terms = [{"scorer": _spec(name, timeout_s=30)} for name in ("meets", "meets_back")]
    scorer = build_scorer(SumScorer.model_validate({"terms": terms}))
    assert [verdict.reward for verdict in scorer.score(_prompt(room=str(tmp_path)), ["x"])] == [2.0]
    scorer.close()


@pytest.mark.parametrize(
    ("function", "text", "mistake"),
    [
        ("key_error", "gone", "KeyError (line "),
        ("typo", "x", "NameError (line "),
        ("asks", "x", ""),  # the server's reply lacks the key
        ("wraps_server", "x", ""),
        ("own_error", "x", ""),
        ("moody", "raise", ""),
    ],
)
def test_programming_errors_are_told_from_failures_of_servers(
    build: Build, function: str, text: str, mistake: str
) -> None:
    (verdict,) = build(function).score(_prompt(), [text])
    assert "raised" in _unscored(verdict)
    assert verdict.mistake.startswith(mistake) if mistake else not verdict.mistake
    assert "gone" not in verdict.mistake, "equal for all samples that fail at this line"


def test_nothing_is_left_running(build: Build, tmp_path: Path) -> None:
    scorer = build("moody")
    (verdict,) = scorer.score(_prompt(), ["a"])
    scorer.close()
    process = Path(f"/proc/{verdict.answer}")
    deadline = time.monotonic() + 10
    while process.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not process.exists()


# ---- the import before the first sample ----------------------------------------------------------------------------


def test_the_function_is_imported_before_the_first_sample(build: Build, module: Path, tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    module.write_text(f"open({str(imported)!r}, 'a').write('x')\ndef one(sample, row): return 1.0\n")
    scorer = build("one")
    deadline = time.monotonic() + 20
    while not imported.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert imported.exists()
    assert [verdict.reward for verdict in scorer.score(_prompt(), ["a", "b"])] == [1.0, 1.0]
    assert imported.read_text() == "x", "imported once"


def test_a_scorer_may_be_closed_while_it_imports(build: Build, module: Path, tmp_path: Path) -> None:
    began = tmp_path / "began"
    module.write_text(f"import os, time\nopen({str(began)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n")
    scorer = build("one")
    deadline = time.monotonic() + 20
    while not (began.exists() and began.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    started = time.monotonic()
    scorer.close()
    assert time.monotonic() - started < 10
    assert not is_alive(int(began.read_text()))


def test_a_failed_import_is_told_with_the_first_samples(build: Build, module: Path) -> None:
    module.write_text("raise RuntimeError('no licence')\n")
    scorer = build("one")
    for _ in range(2):
        assert "raised RuntimeError: no licence" in _unscored(scorer.score(_prompt(), ["a"])[0])
    module.write_text("def one(sample, row): return 1.0\n")
    assert scorer.score(_prompt(), ["a"])[0].reward == 1.0
