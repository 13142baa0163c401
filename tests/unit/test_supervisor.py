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
from services.supervisor.silence import MOST_SECONDS, Silence
from volley.state import Desired, Observed, RunState

NOW = 1_000_000.0
LIVE: tuple[RunState, ...] = ("pending", "starting", "running", "paused", "stopping")
ENDED: tuple[RunState, ...] = ("stopped", "done", "failed")


def observed(state: RunState, *, heard: float = 1.0, step: int = 3, revision: int = 0) -> Observed:
    return Observed(state=state, updated=NOW - heard, step=step, revision=revision)


def lives(count: int = 1, *, ago: float = 1000.0, **more: float) -> DriverHistory:
    return DriverHistory.model_validate({"count": count, "submitted": NOW - ago, **more})


def act(
    seen: Observed, job: JobStatus, had: DriverHistory | None = None, *, silent: float = 0.0, **desired: object
) -> Action:
    return decide(Desired.model_validate(desired), seen, job, had or lives(), NOW, silent=silent)


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
    seen = observed(state)
    assert isinstance(act(seen, "alive", silent=MUTE_SECONDS + 1), Kill)
    assert act(seen, "alive", silent=MUTE_SECONDS - 1) == Wait()


@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_new_driver_has_more_time_for_its_first_report(state: RunState) -> None:
    """Its run is queued, or as the driver before left it."""
    seen = observed(state)
    had = lives(2, seen=seen.updated if state == "running" else 0.0)
    assert act(seen, "alive", had, silent=MUTE_SECONDS + 1) == Wait()
    assert isinstance(act(seen, "alive", had, silent=START_SECONDS + 1), Kill)


@pytest.mark.parametrize("heard", [-3600.0, 3600.0])
def test_the_clock_of_the_drivers_host_does_not_matter(heard: float) -> None:
    seen = observed("running", heard=heard)
    assert act(seen, "alive") == Wait()
    assert isinstance(act(seen, "alive", silent=MUTE_SECONDS + 1), Kill)
    assert lives(4, step=3, barren=2).after_submit(Desired(), observed("pending", heard=heard), NOW).barren == 2


# ---- how long a driver reports nothing -----------------------------------------------------------------------------


def test_silence_is_counted_from_when_a_report_was_first_seen() -> None:
    silence = Silence()
    for now in (0.0, 2.0, 4.0, 6.0, 8.0):
        silence.begin_pass(now, {"r"})
        assert silence.of("r", (1, 5.0)) == now
    silence.begin_pass(10.0, {"r"})
    assert silence.of("r", (1, 7.0)) == 0.0
    silence.begin_pass(20.0, {"r"})  # a settled run is looked at in few passes
    silence.begin_pass(22.0, {"r"})
    assert silence.of("r", (1, 7.0)) == 12.0
    assert silence.of("r", (2, 7.0)) == 0.0, "another driver"


def test_silence_while_nobody_watched_hardly_counts() -> None:
    """The supervisor was suspended, Redis was away, or another supervisor had the lease."""
    silence = Silence()
    for passes, now in enumerate((0.0, 5_000.0, 90_000.0)):
        silence.begin_pass(now, {"r"})
        assert silence.of("r", (1, 5.0)) == passes * MOST_SECONDS


def test_silence_forgets_runs_that_are_gone() -> None:
    silence = Silence()
    silence.begin_pass(0.0, {"r"})
    assert silence.of("r", (1, 5.0)) == 0.0
    silence.begin_pass(2.0, set())
    silence.begin_pass(4.0, {"r"})
    assert silence.of("r", (1, 5.0)) == 0.0


# ---- runs whose driver has ended -----------------------------------------------------------------------------------


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
    for blamed in (lives(4, seen=seen.updated, step=3, barren=last), lives(4, step=3, barren=last, killed=True)):
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
