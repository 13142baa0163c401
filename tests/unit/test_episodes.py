"""From sessions and outcomes to verdicts; which episodes are made again; and what a job with a program may say."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from actors.config import EpisodesRequest, GenerateRequest, OpenedSessions
from actors.gateway.groups import EpisodeReport
from actors.gateway.session import End
from environments.records import EpisodesDone, Outcome, Usage
from services.api.jobs import refusals
from services.api.settings import ApiSettings
from services.coordinator.episode_figures import EpisodeFigures, EpisodeLog, end_of, troubles_of
from services.coordinator.episodes import Episodes, make_samples
from services.coordinator.records import EpisodesOfStep
from services.coordinator.schedule import longest_wait
from services.coordinator.turns import ATTEMPTS
from services.recording.episodes import episode_metrics
from services.store.desired import change
from tests.refs import NOT_STORED
from volley.errors import GroupGone, JobError, WorkerDied
from volley.job import JOB, EvalJob, RLJob
from volley.records import GroupMeta, Prompt, Scores, Verdict, VerdictStatus
from volley.rollout import ProgramRollout
from volley.state import Desired

REQUEST = GenerateRequest(3, "p", np.zeros(4, np.int32), 2, 1.0, 1.0, 50, seed=9)
META = GroupMeta(3, "p", "actor-0", 2, 4, 8, -8.0, 0, 0, 0, 0.0, 4)
FINE = EpisodeReport(end=None, calls=2, observed=5)
JUDGED = (Verdict(VerdictStatus.PASSED, 1.0, answer="a"), Verdict(VerdictStatus.WRONG_ANSWER, 0.0))
TREE = {
    "kind": "rl",
    "name": "agents",
    "steps": 1,
    "model": {"path": "/m"},
    "data": {"path": "/d.jsonl"},
    "objective": {"kind": "mean"},
    "rollout": {"kind": "program", "target": "agents:solve"},
}


@dataclass
class FakeSessions:
    """Opens sessions, and closes them with ``reports``."""

    reports: tuple[EpisodeReport, ...] = (FINE, FINE)
    asked: list[EpisodesRequest] = field(default_factory=list)

    async def episodes(
        self, request: EpisodesRequest, run: Callable[[OpenedSessions], Awaitable[Any]]
    ) -> tuple[Any, Any, GroupMeta, tuple[EpisodeReport, ...]]:
        self.asked.append(request)
        done = await run(OpenedSessions("http://a/v1", (f"k{len(self.asked)}", "other")))
        return done, NOT_STORED, META, self.reports


@dataclass
class FakeEnvironments:
    """Ends episodes with ``outcomes``, after losing them ``losses`` times."""

    outcomes: tuple[Outcome, ...] = (Outcome(1.0), Outcome(0.25, "b", "so so"))
    losses: int = 0
    failure: Exception | None = None
    keys: list[tuple[str, ...]] = field(default_factory=list)

    def usage(self) -> Usage:
        return Usage(len(self.keys), 1.0, 2.0)

    async def run(self, prompt: Prompt, base_url: str, keys: tuple[str, ...]) -> EpisodesDone:
        self.keys.append(keys)
        if self.failure is not None:
            raise self.failure
        if len(self.keys) <= self.losses:
            raise GroupGone("environment-0 died")
        return EpisodesDone(self.outcomes, 0.1)


class FakeRewards:
    """Judges every group alike, and counts."""

    asked = 0

    async def score(self, group: Any, prompt: Prompt) -> Scores:
        self.asked += 1
        return Scores.pack(JUDGED, seconds=2.0, worker="reward-0")


async def made(
    sessions: FakeSessions, environments: FakeEnvironments, rewards: FakeRewards | None = None, **rollout: Any
) -> tuple[Scores, list[str]]:
    stages: list[str] = []
    episodes = Episodes(
        ProgramRollout(target="agents:solve", **rollout), sessions, environments, 900, scored=rewards is not None
    )
    group = await make_samples(
        REQUEST,
        Prompt("p", "text"),
        actors=None,  # type: ignore[arg-type]
        rewards=rewards,  # type: ignore[arg-type]
        turns=episodes,
        on_stage=stages.append,
    )
    assert group.meta is META
    assert group.episodes is not None
    assert group.episodes.reports == sessions.reports
    return group.scores, stages


async def test_the_programs_rewards_become_verdicts() -> None:
    sessions, rewards = FakeSessions(), FakeRewards()
    scores, stages = await made(sessions, FakeEnvironments(), rewards, max_calls=5)
    assert [(each.status, each.reward) for each in scores.verdicts] == [("passed", 1.0), ("wrong_answer", 0.25)]
    assert (scores.verdicts[1].answer, scores.verdicts[1].detail) == ("b", "so so")
    assert (rewards.asked, stages) == (0, ["generate", "score"])
    (asked,) = sessions.asked
    assert (asked.limits.calls, asked.limits.tokens, asked.limits.context, asked.seed) == (5, 50, 900, 9)


async def test_values_say_what_passed_and_what_failing_costs() -> None:
    values = {"passed": 0.25, "failed": -1.0}
    sessions = FakeSessions((EpisodeReport(End.CALLS, 2, 5), FINE))
    scores, _ = await made(sessions, FakeEnvironments(), values=values)
    assert [(each.status, each.reward) for each in scores.verdicts] == [("no_answer", -1.0), ("passed", 0.25)]


@pytest.mark.parametrize(("end", "named"), [(End.CALLS, "max_calls"), (End.TOKENS, "tokens"), (End.CONTEXT, "context")])
async def test_a_model_that_ran_out_failed_whatever_its_program_says(end: End, named: str) -> None:
    sessions = FakeSessions((EpisodeReport(end, 2, 5), EpisodeReport(end, 0, 0)))
    outcomes = (Outcome(1.0), Outcome(failure="the program raised AuthenticationError"))
    scores, _ = await made(sessions, FakeEnvironments(outcomes))
    assert [each.reward for each in scores.verdicts] == [0.0, 0.0]
    assert all(named in each.detail for each in scores.verdicts)


@pytest.mark.parametrize(
    ("outcome", "report", "named"),
    [
        (Outcome(failure="the program raised X"), FINE, "raised X"),
        (Outcome(1.0), EpisodeReport(None, 0, 0), "without a call"),
        (Outcome(1.0), EpisodeReport(End.REWRITTEN, 1, 0, rewrites=1, rewrite="message 1 was"), "message 1 was"),
        (Outcome(), FINE, "has no scorer"),
    ],
)
async def test_what_is_not_the_models_fault_is_no_reward(outcome: Outcome, report: EpisodeReport, named: str) -> None:
    scores, _ = await made(FakeSessions((report, FINE)), FakeEnvironments((outcome, Outcome(1.0))))
    assert scores.verdicts[0].status is VerdictStatus.INFRA_ERROR
    assert named in scores.verdicts[0].detail
    assert scores.valid_n.tolist() == [False, True]


async def test_the_scorer_judges_what_programs_leave_to_it() -> None:
    rewards = FakeRewards()
    scores, _ = await made(FakeSessions(), FakeEnvironments((Outcome(), Outcome(0.75))), rewards)
    assert [each.reward for each in scores.verdicts] == [1.0, 0.75]
    assert (rewards.asked, scores.seconds, scores.worker) == (1, 2.0, "reward-0")


async def test_lost_episodes_are_made_again_with_new_sessions() -> None:
    environments = FakeEnvironments(losses=ATTEMPTS - 1)
    scores, _ = await made(FakeSessions(), environments)
    assert scores.valid_n.all()
    assert [keys[0] for keys in environments.keys] == [f"k{number + 1}" for number in range(ATTEMPTS)]


async def test_episodes_that_are_lost_again_and_again_leave_their_group() -> None:
    environments = FakeEnvironments(losses=ATTEMPTS)
    scores, _ = await made(FakeSessions((EpisodeReport(None, 0, 0),) * 2), environments)
    assert not scores.valid_n.any()
    assert "environment-0 died" in scores.verdicts[0].detail
    assert len(environments.keys) == ATTEMPTS


async def test_workers_that_cannot_be_replaced_end_the_run() -> None:
    with pytest.raises(WorkerDied, match="environment-0"):
        await made(FakeSessions(), FakeEnvironments(failure=WorkerDied("environment-0", "again")))


def test_troubles_are_summed_up() -> None:
    assert troubles_of((FINE, FINE)) == {}
    reports = (FINE, EpisodeReport(None, 1, 0, rewrites=2, rewrite="first", parse_failures=1), FINE)
    assert troubles_of(reports) == {"rewrites": 2, "parse_failures": 1, "first_rewrite": "first"}


def job(**changes: Any) -> RLJob | EvalJob:
    made = JOB.validate_python({**TREE, **changes})
    assert isinstance(made, RLJob | EvalJob)
    return made


def test_a_program_needs_no_scorer_and_anything_else_does() -> None:
    assert job().scorer is None
    shared = {key: TREE[key] for key in ("name", "model", "data")}
    for kind, more in (("rl", ("steps", "objective")), ("eval", ()), ("rft", ("steps",))):
        without_program = {**shared, **{key: TREE[key] for key in more}}
        with pytest.raises(ValidationError, match="scorer: required, but missing"):
            JOB.validate_python({**without_program, "kind": kind})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"turns": {"observation": "x"}}, "turns and rollout exclude each other"),
        ({"sampling": {"n": 65}}, r"write environment_workers: \{episodes: 65\}"),
        (
            {"evaluation": {"data": {"path": "/d"}, "sampling": {"n": 100}}},
            r"write environment_workers: \{episodes: 100\}",
        ),
        ({"rollout": {"kind": "program", "target": "solve"}}, "target"),
    ],
)
def test_what_cannot_be_is_said_with_what_to_write(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        job(**changes)


def test_the_learner_waits_for_the_slowest_episodes() -> None:
    slow = job(rollout={**TREE["rollout"], "timeout_s": 5000})  # type: ignore[dict-item]
    assert isinstance(slow, RLJob)
    assert longest_wait(slow) > ATTEMPTS * 2 * 5000, "some may wait for others of their worker"


def test_a_service_imports_only_programs_that_it_allows() -> None:
    (problem,) = refusals(TREE, ApiSettings(redis_url="redis://x", allow_code=("other",)))
    assert problem.pointer == "/job/rollout/target"
    assert list(refusals(TREE, ApiSettings(redis_url="redis://x", allow_code=("agents",)))) == []


def test_environment_workers_of_a_live_run_can_be_changed_if_it_has_a_program() -> None:
    job = JOB.validate_python(TREE)
    assert change(Desired(), job, {"environment_workers": 3}).environment_workers == 3
    with pytest.raises(JobError, match="environment_workers"):
        change(Desired(), job, {"environment_workers": 0})
    plain = {key: value for key, value in TREE.items() if key != "rollout"} | {"scorer": {"kind": "exact"}}
    with pytest.raises(JobError, match="without rollout"):
        change(Desired(), JOB.validate_python(plain), {"environment_workers": 3})


def figures(*, seconds: tuple[float, ...], calling: tuple[tuple[tuple[float, float], ...], ...]) -> EpisodeFigures:
    """Episodes that began half a second after their sessions were opened, at 100 s."""
    reports = tuple(
        EpisodeReport(None, len(spans), 5, rewrites=1, calling=spans, calling_seconds=sum(b - a for a, b in spans))
        for spans in calling
    )
    return EpisodeFigures("actor-0", "environment-0", 100.0, 100.5, seconds, ("",) * len(seconds), reports)


def test_the_time_of_episodes_is_the_models_or_the_environments() -> None:
    made = figures(seconds=(4.5, 1.5), calling=(((1.0, 2.0), (4.0, 5.0)), ((1.5, 2.0),)))
    assert made.model_spans() == [(101.0, 102.0), (104.0, 105.0)]
    # The first leaves 100.5-101 and 102-104 to its environment, the second 100.5-101.5.
    assert made.environment_spans() == [(100.5, 101.5), (102.0, 104.0)]
    assert made.environment_seconds == pytest.approx(4.5 + 1.5 - 2.5)
    assert figures(seconds=(2.0,), calling=((),)).environment_spans() == [(100.5, 102.5)]
    waited = replace(figures(seconds=(2.0, 1.0), calling=((), ())), waited_n=(0.0, 3.0))
    assert waited.environment_spans() == [(100.5, 102.5), (103.5, 104.5)]


async def test_episodes_are_counted_between_two_steps() -> None:
    environments = FakeEnvironments()
    log = EpisodeLog(environments)
    made = figures(seconds=(4.0, 4.0), calling=(((0.5, 2.5),), ((0.5, 4.5),)))
    assert log.note(made) == {"rewrites": 2}
    assert log.note(None) == {}
    await environments.run(Prompt("p", "t"), "", ("k",))
    taken = log.take()
    assert taken is not None
    assert (taken.figures, taken.usage) == ((made,), Usage(1, 0.0, 0.0))
    row = episode_metrics(replace(taken, usage=Usage(1, 3.0, 6.0)), seconds=2.0)
    assert (row["episodes_per_second"], row["environment_busy_share"], row["calls_mean"]) == (0.5, 0.5, 1.0)
    assert (row["seconds_episode_mean"], row["seconds_environment_mean"], row["environment_share"]) == (4.0, 1.0, 0.25)
    again = log.take()
    assert again is not None
    assert again.figures == ()
    assert EpisodeLog(None).take() is None
    assert episode_metrics(None, seconds=1.0) == {}


async def test_errors_of_tools_are_a_mean_over_the_episodes_in_which_they_are_known() -> None:
    made = figures(seconds=(1.0, 1.0, 1.0), calling=((), (), ()))
    with_tools = EpisodesOfStep((replace(made, tool_errors_n=(3, None, 0)),), Usage())
    assert episode_metrics(with_tools, seconds=1.0)["tool_errors_mean"] == 1.5
    without = EpisodesOfStep((replace(made, tool_errors_n=(None,) * 3),), Usage())
    assert "tool_errors_mean" not in episode_metrics(without, seconds=1.0)


@pytest.mark.parametrize(
    ("outcome", "report", "end"),
    [
        (Outcome(1.0), FINE, ""),
        (Outcome(failure="boom", kind="raised"), FINE, "raised"),
        (Outcome(failure="slow", kind="timeout"), FINE, "timeout"),
        (Outcome(failure="boom", kind="raised"), EpisodeReport(End.TOKENS, 1, 0), "tokens"),
        (Outcome(1.0), EpisodeReport(End.REWRITTEN, 1, 0), "rewritten"),
        (Outcome(1.0), EpisodeReport(None, 0, 0), "no_call"),
    ],
)
def test_how_an_episode_ended(outcome: Outcome, report: EpisodeReport, end: str) -> None:
    assert end_of(outcome, report) == end
