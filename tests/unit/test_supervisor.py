"""What the supervisor does about a run, as a table."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.launcher import JobStatus, kill_here
from services.state import Desired, Observed, RunState
from services.supervisor import (
    BARREN_LIVES,
    MUTE_SECONDS,
    SETTLE_SECONDS,
    START_SECONDS,
    Action,
    End,
    Kill,
    Lives,
    Submit,
    Wait,
    decide,
    delay,
)

NOW = 1_000_000.0
LIVE: tuple[RunState, ...] = ("pending", "starting", "running", "paused", "stopping")
ENDED: tuple[RunState, ...] = ("stopped", "done", "failed")


def observed(state: RunState, *, heard: float = 1.0, step: int = 3, revision: int = 0) -> Observed:
    return Observed(state=state, updated=NOW - heard, step=step, revision=revision)


def lives(count: int = 1, *, ago: float = 1000.0, **more: int) -> Lives:
    return Lives(count=count, submitted=NOW - ago, **more)


def act(seen: Observed, job: JobStatus, had: Lives | None = None, *, watched: float = 1e6, **desired: object) -> Action:
    return decide(Desired.model_validate(desired), seen, job, had or lives(), NOW, watched=watched)


def test_a_queued_run_gets_its_first_driver() -> None:
    assert act(Observed(), "none", Lives()) == Submit()


def test_a_queued_run_that_is_not_wanted_any_more_ends_without_one() -> None:
    assert act(Observed(), "none", Lives(), stopped=True) == End("stopped")


@pytest.mark.parametrize("state", LIVE)
def test_a_run_whose_driver_ended_gets_another(state: RunState) -> None:
    assert act(observed(state), "ended") == Submit()


@pytest.mark.parametrize("state", LIVE)
def test_a_driver_that_ray_forgot_is_given_up_only_when_it_is_silent_too(state: RunState) -> None:
    assert act(observed(state, heard=5), "none") == Wait()
    assert act(observed(state, heard=50), "none") == Submit()


@pytest.mark.parametrize("state", LIVE)
def test_a_stop_without_a_driver_is_a_stop(state: RunState) -> None:
    assert act(observed(state), "ended", stopped=True) == End("stopped")


@pytest.mark.parametrize("state", [*LIVE, *ENDED, "queued"])
def test_a_driver_that_reports_is_left_alone_whatever_is_desired(state: RunState) -> None:
    for stopped in (False, True):
        assert act(observed(state), "alive", lives(ago=5), stopped=stopped) == Wait()


@pytest.mark.parametrize("state", [*LIVE, *ENDED])
def test_a_mute_driver_is_killed(state: RunState) -> None:
    seen = observed(state, heard=MUTE_SECONDS + 1)
    assert isinstance(act(seen, "alive", lives(ago=5000)), Kill)
    assert act(observed(state, heard=MUTE_SECONDS - 1), "alive", lives(ago=5000)) == Wait()


def test_a_new_driver_has_longer_to_say_its_first_word() -> None:
    seen = observed("running", heard=5000)
    assert act(seen, "alive", lives(2, ago=MUTE_SECONDS + 1)) == Wait()
    assert isinstance(act(seen, "alive", lives(2, ago=START_SECONDS + 1)), Kill)


def test_a_driver_is_not_blamed_for_the_absence_of_redis() -> None:
    seen = observed("running", heard=1000)
    assert act(seen, "alive", lives(ago=5000), watched=SETTLE_SECONDS - 1) == Wait()


def test_what_is_done_or_was_stopped_stays_so() -> None:
    for job in ("none", "ended"):
        assert act(observed("done"), job, revision=9) == Wait(settled=True)
        assert act(observed("stopped"), job, stopped=True) == Wait(settled=True)


def test_a_run_stopped_by_a_signal_goes_on() -> None:
    assert act(observed("stopped"), "ended") == Submit()


def test_a_failed_run_is_tried_again_only_when_its_user_desires_something() -> None:
    failed = observed("failed", revision=2)
    assert act(failed, "ended", lives(revision=2), revision=2) == Wait(settled=True)
    assert act(failed, "ended", lives(revision=0), revision=2) == Wait(settled=True)
    assert act(failed, "ended", lives(revision=2), revision=3) == Submit()
    assert act(failed, "ended", lives(revision=2), revision=3, stopped=True) == Wait(settled=True)


def test_a_failure_told_by_a_driver_as_it_was_killed_is_not_believed_until_the_lives_are_used_up() -> None:
    """What kills a driver kills its workers too, and it may see them die first."""
    failed = observed("failed", step=3)
    assert act(failed, "killed", lives(step=3)) == Submit()
    assert isinstance(act(failed, "killed", lives(step=3, barren=BARREN_LIVES - 1)), End)
    assert act(failed, "killed", lives(step=3, barren=BARREN_LIVES)) == Wait(settled=True)
    assert act(observed("done"), "killed") == Wait(settled=True)
    assert act(observed("running"), "killed") == Submit()


def test_a_run_that_fails_again_as_it_starts_is_not_tried_for_ever() -> None:
    """Its driver never said which revision holds; that one was submitted for it is enough."""
    had = lives(revision=2)
    failed = observed("failed", revision=0)
    assert act(failed, "ended", had, revision=3) == Submit()
    had = had.after_submit(Desired(revision=3), failed, NOW)
    assert act(failed, "ended", had, revision=3) == Wait(settled=True)


def test_drivers_that_get_nowhere_come_at_growing_intervals_and_end() -> None:
    now, had, seen = NOW, Lives(), Observed()
    pauses = []
    for _ in range(BARREN_LIVES):
        waited = 0
        while decide(Desired(), seen, "ended" if had.count else "none", had, now + waited) != Submit():
            waited += 1
            assert waited < 120
        pauses.append(waited)
        now += waited
        had = had.after_submit(Desired(), seen, now)
        seen = Observed(state="starting", updated=now)
    assert pauses == sorted(pauses)
    assert had.count == BARREN_LIVES
    assert decide(Desired(), seen, "ended", had, now + 1000) == End(
        "failed", f"{BARREN_LIVES} drivers in a row ended without a step done"
    )


@pytest.mark.parametrize("state", ["pending", "stopped"])
def test_a_driver_that_waited_for_room_or_was_told_to_end_is_no_barren_life(state: RunState) -> None:
    """It spoke after it was submitted; what an earlier driver said is no excuse, nor is having been mute."""
    seen, last = observed(state), BARREN_LIVES - 1
    assert act(seen, "ended", lives(4, step=3, barren=last)) == Submit()
    assert lives(4, step=3, barren=2).after_submit(Desired(), seen, NOW).barren == 2
    for blamed in (lives(4, ago=0.5, step=3, barren=last), lives(4, step=3, barren=last, killed=True)):
        assert isinstance(act(seen, "ended", blamed), End)
        after = blamed.after_submit(Desired(), seen, NOW)
        assert (after.barren, after.killed) == (BARREN_LIVES, False)


def test_a_driver_that_did_a_step_begins_the_count_anew() -> None:
    had = lives(4, step=3, barren=BARREN_LIVES - 1)
    assert isinstance(act(observed("running", step=3), "ended", had), End)
    assert act(observed("running", step=4), "ended", had) == Submit()
    after = had.after_submit(Desired(), observed("running", step=4), NOW)
    assert (after.count, after.step, after.barren, delay(after)) == (5, 4, 0, 0.0)


def test_work_done_again_after_a_checkpoint_is_no_progress() -> None:
    had = lives(2, step=30, barren=1)
    after = had.after_submit(Desired(), observed("running", step=25), NOW)
    assert (after.step, after.barren) == (30, 2)


def test_a_run_given_up_and_taken_up_again_has_all_its_lives() -> None:
    had = lives(5, barren=BARREN_LIVES - 1)
    after = had.after_submit(Desired(revision=1), observed("failed"), NOW)
    assert (after.count, after.barren, after.revision) == (6, 0, 1)


def test_only_the_runs_own_driver_on_this_host_is_killed() -> None:
    """Its process id may be another process's by now."""
    command = [sys.executable, "-c", "import time; time.sleep(60)", "services.driver", "r"]
    with subprocess.Popen(command) as driver:
        here = f"{socket.gethostname()}:{driver.pid}"
        while b"services.driver" not in Path(f"/proc/{driver.pid}/cmdline").read_bytes():
            time.sleep(0.01)
        for run_id, place in (("other", here), ("r", f"elsewhere:{driver.pid}"), ("r", ""), ("r", f"{here}0000000")):
            assert not kill_here(run_id, place)
        assert not kill_here("r", f"{socket.gethostname()}:{os.getpid()}")
        driver.send_signal(signal.SIGSTOP)
        assert kill_here("r", here)
        assert driver.wait(10) == -signal.SIGKILL
