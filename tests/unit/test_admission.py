"""Which group may start next: slots, the plan, pauses, and the groups of a resumed run."""

import pytest

from services.coordinator.admission import Admission
from services.coordinator.buffer import SlotBuffer
from services.coordinator.ledger import Ledger
from services.coordinator.records import ReadyGroup, ResumePoint
from tests.refs import NOT_STORED
from volley.errors import JobError, NoSignal
from volley.job import RLJob
from volley.records import GroupMeta, Prompt, Scores, Verdict, VerdictStatus
from volley.state import Desired

SCORED = Scores.pack([Verdict(VerdictStatus.PASSED, 1.0)] * 2)
UNSCORED = Scores.pack([Verdict(VerdictStatus.INFRA_ERROR, None, detail="boom")] * 2)
RUNNING = Desired()


def job(**changes: object) -> RLJob:
    return RLJob.model_validate(
        {
            "name": "fake",
            "steps": 3,
            "prompts_per_step": 2,
            "max_lag": 1,
            "sampling": {"n": 2},
            "model": {"path": "m"},
            "data": {"path": "d"},
            "scorer": {"kind": "countdown"},
            "objective": {"kind": "mean"},
            **changes,
        }
    )


def admission(resume: ResumePoint | None = None, **changes: object) -> tuple[Admission, Ledger, SlotBuffer[ReadyGroup]]:
    spec, resume = job(**changes), resume or ResumePoint.start()
    buffer: SlotBuffer[ReadyGroup] = SlotBuffer(spec.prompts_per_step, spec.max_lag)
    return Admission(spec, resume.ledger, buffer, resume), resume.ledger, buffer


def ready(group_id: int, *, max_lag: int = 1, version: int = 0) -> ReadyGroup:
    meta = GroupMeta(group_id, f"p{group_id}", "actor-0", 2, 3, 6, -3.0, version, version, 0, 0.1, 2)
    return ReadyGroup(NOT_STORED, meta, Prompt(meta.prompt_id, ""), SCORED, max_lag, (0.0, 1.0), 2.0)


def admit_all(made: Admission, *, served: int = 0, version: int = 0) -> list[int]:
    admitted = []
    while made.may_admit(RUNNING, served=served, version=version):
        admitted.append(made.admit(served=served))
    return admitted


def finish(made: Admission, *groups: int, version: int = 0) -> None:
    for group_id in groups:
        made.scored(group_id, SCORED)
        made.ready(ready(group_id, version=version))


def test_groups_are_admitted_up_to_the_slots_and_the_planned_number() -> None:
    made, ledger, buffer = admission()
    assert admit_all(made) == [0, 1, 2, 3], "(L + 1) * P slots"
    finish(made, 0, 1, 2, 3)
    assert buffer.take(0) is not None
    assert admit_all(made, version=1) == [], "the actors do not serve version 1 yet"
    buffer.release(2)
    assert admit_all(made, served=1, version=1) == [4, 5]
    finish(made, 4, 5, version=1)
    assert buffer.take(1) is not None
    buffer.release(2)
    assert admit_all(made, served=2, version=2) == [], "3 steps of 2 groups are planned"
    assert ledger.admitted == 6


@pytest.mark.parametrize(
    ("desired", "reason"),
    [(Desired(paused=True), "paused by its user"), (Desired(actors=0), "no actors are desired")],
    ids=["paused", "no actors"],
)
def test_nothing_is_admitted_while_the_run_is_paused(desired: Desired, reason: str) -> None:
    made, _, _ = admission()
    assert made.pause_reason(desired) == reason
    assert not made.may_admit(desired, served=0, version=0)
    assert made.pause_reason(RUNNING) == ""
    assert made.may_admit(RUNNING, served=0, version=0)


def test_groups_in_flight_are_counted_by_stage() -> None:
    made, _, _ = admission()
    admit_all(made)
    made.enter(1, "score")
    assert made.stages() == {"generating": 3, "scoring": 1}
    finish(made, 1)
    assert made.stages() == {"generating": 3, "scoring": 0}


def test_a_dropped_group_is_replaced_by_another_one() -> None:
    made, ledger, buffer = admission(steps=1, max_lag=0)
    assert admit_all(made) == [0, 1]
    made.scored(0, UNSCORED)
    made.drop(0, "0 of 2 samples could be scored")
    assert (len(buffer), made.refills) == (1, 1)
    assert admit_all(made) == [2]
    assert ledger.counts() == {"admitted": 3, "trained": 0, "dropped": 1, "in_flight": 2, "dead": 0}


def test_a_resumed_run_keeps_ready_groups_and_first_repeats_interrupted_ones() -> None:
    ledger = Ledger(admitted=5, trained=2, in_flight={2, 3, 4})
    resume = ResumePoint(1, ledger, 0, 0, {}, (ready(3, max_lag=2),))
    made, _, buffer = admission(resume)
    assert [each.meta.group_id for each in buffer.ready_items()] == [3]
    assert buffer.lag_of(3) == 2, "the bound under which it was admitted"
    assert made.stages() == {"generating": 0, "scoring": 0}
    assert admit_all(made, served=1, version=1) == [2, 4, 5]
    assert ledger.admitted == 6


def test_refills_of_a_resumed_run_do_not_count_as_planned_groups() -> None:
    ledger = Ledger(admitted=6, trained=5)
    ledger.dropped["0 of 2 samples could be scored"] = 1
    made, _, _ = admission(ResumePoint(2, ledger, 1, 0, {}))
    assert admit_all(made, served=2, version=2) == [6]


def test_while_scoring_fails_one_group_at_a_time_probes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("services.coordinator.scoring_health.time.monotonic", lambda: now[0])
    made, _, _ = admission(infra_errors={"window": 2}, steps=9)
    assert admit_all(made) == [0, 1, 2, 3]
    assert [_fail(made, group_id) for group_id in (0, 1)] == [["trouble"], ["paused"]], "the second fills the window"
    assert "100% of the samples of the last 2 groups could not be scored" in made.scoring_problem
    assert made.pause_reason(RUNNING) == made.scoring_problem
    assert admit_all(made) == [], "two groups are still under way"
    assert [_fail(made, group_id) for group_id in (2, 3)] == [[], []]
    assert admit_all(made) == [4], "one probe"
    assert not _fail(made, 4)
    assert admit_all(made) == [], "the next probe is due a second later"
    now[0] += 1.0
    assert admit_all(made) == [5]
    assert made.scored(5, SCORED) == [("unpaused", "")]
    assert made.scoring_problem == made.pause_reason(RUNNING) == ""


def test_scoring_that_fails_for_too_long_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("services.coordinator.scoring_health.time.monotonic", lambda: now[0])
    made, _, _ = admission(infra_errors={"window": 1, "give_up_s": 60})
    admit_all(made)
    assert _fail(made, 0) == ["trouble", "paused"]
    now[0] += 61.0
    with pytest.raises(NoSignal, match=r"could not be scored for 61 s .* the last because: boom"):
        _fail(made, 1)


def test_the_first_reasons_of_unscored_samples_are_reported_with_advice() -> None:
    made, _, _ = admission(steps=9, max_lag=9)
    admit_all(made)
    found = []
    for group_id, reason in enumerate(("KeyError: 'a'", "KeyError: 'a'", "b", "c", "d")):
        verdicts = [Verdict(VerdictStatus.PASSED, 1.0), Verdict(VerdictStatus.INFRA_ERROR, None, detail=reason)]
        found += made.scored(group_id, Scores.pack(verdicts))
    assert [kind for kind, _ in found] == ["trouble"] * 3, "few enough to be read"
    assert "leaves its group: KeyError: 'a'. `volley logs RUN reward-0` shows" in found[0][1]


@pytest.mark.parametrize(
    ("worker", "logs", "others"),
    [("", ["RUN environment-0"], ["reward-0"]), ("reward-1", ["RUN environment-0", "RUN reward-0"], [])],
)
def test_what_a_program_failed_at_is_in_its_own_workers_log(worker: str, logs: list[str], others: list[str]) -> None:
    rollout = {"kind": "program", "target": "agent:solve"}
    made, _, _ = admission(rollout=rollout, scorer=None, infra_errors={"window": 1}, steps=9)
    admit_all(made)
    raised = Verdict(VerdictStatus.INFRA_ERROR, None, detail="the program raised KeyError: 'a'")
    ((_, trouble), (_, paused)) = made.scored(0, Scores.pack([raised] * 2, worker=worker))
    for text in (trouble, paused):
        assert all(each in text for each in logs)
        assert not any(each in text for each in others)


def _failing(mistake: str, *, scored: int = 0) -> Scores:
    failed = Verdict(VerdictStatus.INFRA_ERROR, None, detail="m:f raised KeyError: 'a' (line 3)", mistake=mistake)
    return Scores.pack([Verdict(VerdictStatus.PASSED, 1.0)] * scored + [failed] * (2 - scored))


def test_a_function_that_always_raises_the_same_mistake_ends_the_run_at_once() -> None:
    made, _, _ = admission(infra_errors={"window": 2}, steps=9)
    admit_all(made)
    made.scored(0, _failing("KeyError (line 3)"))
    with pytest.raises(JobError, match=r"no sample of the first 2 groups.*m:f raised KeyError: 'a' \(line 3\)"):
        made.scored(1, _failing("KeyError (line 3)"))


@pytest.mark.parametrize(
    "groups",
    [
        [_failing(""), _failing("")],  # a server's failure, or the host's
        [_failing("KeyError (line 3)"), _failing("")],
        [_failing("KeyError (line 3)"), _failing("KeyError (line 4)")],
        [_failing("KeyError (line 3)", scored=1), _failing("KeyError (line 3)")],  # it works for some samples
    ],
)
def test_failures_that_may_not_be_the_functions_pause_the_run(groups: list[Scores]) -> None:
    made, _, _ = admission(infra_errors={"window": 2}, steps=9)
    admit_all(made)
    assert [kind for index, scores in enumerate(groups) for kind, _ in made.scored(index, scores)][-1] == "paused"


def test_a_function_that_worked_before_pauses_the_run_too() -> None:
    made, _, _ = admission(infra_errors={"window": 2}, steps=9)
    admit_all(made)
    groups = [SCORED, *[_failing("KeyError (line 3)")] * 3]
    news = [kind for index, scores in enumerate(groups) for kind, _ in made.scored(index, scores)]
    assert news == ["trouble", "paused"]


def _fail(made: Admission, group_id: int) -> list[str]:
    """The kinds of events that one more unscored group causes."""
    news = made.scored(group_id, UNSCORED)
    made.drop(group_id, "0 of 2 samples could be scored")
    return [kind for kind, _ in news]


def test_a_restored_group_without_tokens_is_as_new_as_the_run() -> None:
    """Its episodes ended before the model's first answer, so it has no version of its own."""
    meta = GroupMeta(0, "p", "actor-0", 2, 3, 0, 0.0, 0, 0, 2, 0.1, 2)
    ready = ReadyGroup(NOT_STORED, meta, Prompt("p", "x"), SCORED, 1, (0.0, 0.0), 0.0)
    ledger = Ledger()
    ledger.admit()
    resume = ResumePoint(10, ledger, 0, 0, {}, (ready,))
    admitted, _, buffer = admission(resume, steps=20)
    assert admitted.may_admit(RUNNING, served=10, version=10)
    admitted.admit(served=10)
    assert buffer.waiting_for(11) == [1]
