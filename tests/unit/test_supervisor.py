"""The supervisor's decisions, one test per row of its table."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.supervisor.decisions import (
    BARREN_LIVES,
    MUTE_SECONDS,
    SETTLE_SECONDS,
    START_SECONDS,
    Action,
    DriverHistory,
    End,
    Kill,
    Submit,
    Wait,
    decide,
    delay,
)
from services.supervisor.ray_jobs import JobStatus, kill_here
from volley.state import Desired, Observed, RunState

NOW = 1_000_000.0
LIVE: tuple[RunState, ...] = ("pending", "starting", "running", "paused", "stopping")
ENDED: tuple[RunState, ...] = ("stopped", "done", "failed")


def observed(state: RunState, *, heard: float = 1.0, step: int = 3, revision: int = 0) -> Observed:
    return Observed(state=state, updated=NOW - heard, step=step, revision=revision)


def lives(count: int = 1, *, ago: float = 1000.0, **more: int) -> DriverHistory:
    return DriverHistory(count=count, submitted=NOW - ago, **more)


def act(
    seen: Observed, job: JobStatus, had: DriverHistory | None = None, *, watched: float = 1e6, **desired: object
) -> Action:
    return decide(Desired.model_validate(desired), seen, job, had or lives(), NOW, watched=watched)


def test_a_queued_run_gets_its_first_driver() -> None:
    assert act(Observed(), "none", DriverHistory()) == Submit()


def test_a_queued_run_that_is_stopped_ends_without_a_driver() -> None:
    assert act(Observed(), "none", DriverHistory(), stopped=True) == End("stopped")


@pytest.mark.parametrize("state", LIVE)
def test_a_run_whose_driver_died_gets_another(state: RunState) -> None:
    assert act(observed(state), "ended") == Submit()


@pytest.mark.parametrize("state", LIVE)
def test_a_driver_unknown_to_ray_is_replaced_only_if_it_is_also_silent(state: RunState) -> None:
    assert act(observed(state, heard=5), "none") == Wait()
    assert act(observed(state, heard=50), "none") == Submit()


@pytest.mark.parametrize("state", LIVE)
def test_a_stop_without_a_driver_ends_the_run_as_stopped(state: RunState) -> None:
    assert act(observed(state), "ended", stopped=True) == End("stopped")


@pytest.mark.parametrize("state", [*LIVE, *ENDED, "queued"])
def test_a_driver_that_reports_is_never_interrupted(state: RunState) -> None:
    for stopped in (False, True):
        assert act(observed(state), "alive", lives(ago=5), stopped=stopped) == Wait()


@pytest.mark.parametrize("state", [*LIVE, *ENDED])
def test_a_silent_driver_is_killed(state: RunState) -> None:
    seen = observed(state, heard=MUTE_SECONDS + 1)
    assert isinstance(act(seen, "alive", lives(ago=5000)), Kill)
    assert act(observed(state, heard=MUTE_SECONDS - 1), "alive", lives(ago=5000)) == Wait()


def test_a_new_driver_has_more_time_for_its_first_report() -> None:
    seen = observed("running", heard=5000)
    assert act(seen, "alive", lives(2, ago=MUTE_SECONDS + 1)) == Wait()
    assert isinstance(act(seen, "alive", lives(2, ago=START_SECONDS + 1)), Kill)


def test_a_driver_is_not_killed_for_silence_while_redis_was_down() -> None:
    seen = observed("running", heard=1000)
    assert act(seen, "alive", lives(ago=5000), watched=SETTLE_SECONDS - 1) == Wait()


def test_done_and_stopped_runs_stay_so() -> None:
    for job in ("none", "ended"):
        assert act(observed("done"), job, revision=9) == Wait(settled=True)
        assert act(observed("stopped"), job, stopped=True) == Wait(settled=True)


def test_a_run_stopped_by_a_signal_is_resumed() -> None:
    assert act(observed("stopped"), "ended") == Submit()


def test_a_failed_run_is_retried_only_after_a_change_by_its_user() -> None:
    failed = observed("failed", revision=2)
    assert act(failed, "ended", lives(revision=2), revision=2) == Wait(settled=True)
    assert act(failed, "ended", lives(revision=0), revision=2) == Wait(settled=True)
    assert act(failed, "ended", lives(revision=2), revision=3) == Submit()
    assert act(failed, "ended", lives(revision=2), revision=3, stopped=True) == Wait(settled=True)


def test_a_failure_reported_by_a_killed_driver_is_retried_a_limited_number_of_times() -> None:
    """Whatever kills a driver also kills its workers, and the driver may report their deaths first."""
    failed = observed("failed", step=3)
    assert act(failed, "killed", lives(step=3)) == Submit()
    assert isinstance(act(failed, "killed", lives(step=3, barren=BARREN_LIVES - 1)), End)
    assert act(failed, "killed", lives(step=3, barren=BARREN_LIVES)) == Wait(settled=True)
    assert act(observed("done"), "killed") == Wait(settled=True)
    assert act(observed("running"), "killed") == Submit()


def test_a_run_that_fails_again_at_its_start_is_not_retried_forever() -> None:
    """Its driver never reported a revision; it is enough that a driver was submitted for the newest one."""
    had = lives(revision=2)
    failed = observed("failed", revision=0)
    assert act(failed, "ended", had, revision=3) == Submit()
    had = had.after_submit(Desired(revision=3), failed, NOW)
    assert act(failed, "ended", had, revision=3) == Wait(settled=True)


def test_drivers_without_progress_are_restarted_at_growing_intervals_and_given_up() -> None:
    now, had, seen = NOW, DriverHistory(), Observed()
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
        "failed", f"{BARREN_LIVES} drivers in a row ended without completing a step"
    )


@pytest.mark.parametrize("state", ["pending", "stopped", "queued"])
def test_a_driver_that_waited_for_resources_or_was_asked_to_end_does_not_count_as_without_progress(
    state: RunState,
) -> None:
    """Only reports since its submission count: neither an earlier driver's report nor silence is an excuse."""
    seen, last = observed(state), BARREN_LIVES - 1
    assert act(seen, "ended", lives(4, step=3, barren=last)) == Submit()
    assert lives(4, step=3, barren=2).after_submit(Desired(), seen, NOW).barren == 2
    for blamed in (lives(4, ago=0.5, step=3, barren=last), lives(4, step=3, barren=last, killed=True)):
        assert isinstance(act(seen, "ended", blamed), End)
        after = blamed.after_submit(Desired(), seen, NOW)
        assert (after.barren, after.killed) == (BARREN_LIVES, False)


def test_a_driver_that_does_a_step_resets_the_count() -> None:
    had = lives(4, step=3, barren=BARREN_LIVES - 1)
    assert isinstance(act(observed("running", step=3), "ended", had), End)
    assert act(observed("running", step=4), "ended", had) == Submit()
    after = had.after_submit(Desired(), observed("running", step=4), NOW)
    assert (after.count, after.step, after.barren, delay(after)) == (5, 4, 0, 0.0)


def test_repeating_steps_after_a_checkpoint_is_not_progress() -> None:
    had = lives(2, step=30, barren=1)
    after = had.after_submit(Desired(), observed("running", step=25), NOW)
    assert (after.step, after.barren) == (30, 2)


def test_a_given_up_run_that_is_resumed_has_all_its_retries_again() -> None:
    had = lives(5, barren=BARREN_LIVES - 1)
    after = had.after_submit(Desired(revision=1), observed("failed"), NOW)
    assert (after.count, after.barren, after.revision) == (6, 0, 1)


def test_only_the_runs_own_driver_on_this_host_can_be_killed() -> None:
    """Its process id may belong to another process by now."""
    command = [sys.executable, "-c", "import time; time.sleep(60)", "services.runs.driver", "r"]
    with subprocess.Popen(command) as driver:
        here = f"{socket.gethostname()}:{driver.pid}"
        while b"services.runs.driver" not in Path(f"/proc/{driver.pid}/cmdline").read_bytes():
            time.sleep(0.01)
        for run_id, place in (("other", here), ("r", f"elsewhere:{driver.pid}"), ("r", ""), ("r", f"{here}0000000")):
            assert not kill_here(run_id, place)
        assert not kill_here("r", f"{socket.gethostname()}:{os.getpid()}")
        driver.send_signal(signal.SIGSTOP)
        assert kill_here("r", here)
        assert driver.wait(10) == -signal.SIGKILL
