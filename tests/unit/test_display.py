"""Progress on a terminal and on a pipe: a run that is silent says what it does."""

import asyncio
import re
from types import SimpleNamespace

import pytest

from services.recording import display as module
from services.recording.display import Display
from services.runs.context import doing, heartbeats
from volley.state import Observed


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def idle(self, display: Display, seconds: int, doing: str = "working") -> None:
        for _ in range(seconds):
            self.now += 1.0
            display.idle(doing)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [re.sub(r"^ ?\d+:\d\d\.\d +", "", line) for line in capsys.readouterr().out.splitlines()]


def test_a_silent_run_speaks_within_seconds_then_rarely(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    display = Display()
    display.say("starting")
    clock.idle(display, 3)
    assert lines(capsys) == ["starting"]
    clock.idle(display, 1, "groups: generating 1")
    assert lines(capsys) == ["groups: generating 1"]
    clock.idle(display, 14, "groups: generating 2")
    assert lines(capsys) == []
    clock.idle(display, 1, "groups: generating 2")
    clock.idle(display, 59, "groups: generating 2")
    assert lines(capsys) == ["groups: generating 2"], "the same words are repeated once a minute"


def test_a_bar_without_notes_shows_how_far_it_is(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    display = Display()
    with display.bar("prompts", 20) as bar:
        bar.advance()
        clock.idle(display, 4)
        bar.advance(by=6)
        clock.idle(display, 15)
        assert lines(capsys) == ["prompts 1/20  working", "prompts 7/20  working"]


def test_a_bar_with_notes_speaks_for_itself(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    display = Display()
    with display.bar("steps", 20) as bar:
        clock.idle(display, 4, "groups: generating 3")
        clock.now += 15
        bar.advance("reward 0.1")
        clock.idle(display, 50, "groups: generating 4")
        assert lines(capsys) == ["steps 0/20  groups: generating 3", "steps 1/20  reward 0.1"]


def test_a_live_bar_shows_what_the_run_does_until_its_first_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    display = Display()
    with display.bar("steps", 20) as bar:
        display.idle("groups: generating 3")
    assert "groups: generating 3" in capsys.readouterr().out
    with display.bar("steps", 20) as bar:
        bar.advance("reward 0.1")
        display.idle("groups: generating 4")
    assert "generating 4" not in capsys.readouterr().out


def test_what_a_run_does_in_words() -> None:
    assert doing(Observed(state="starting")) == "still starting"
    assert doing(Observed(state="starting", step=2, steps=2)) == "writing the model"
    assert doing(Observed(state="running")) == "working"
    busy = Observed(state="running", groups={"generating": 12, "ready": 3}, waiting=("learner has waited 9 s", "b"))
    assert doing(busy) == "groups: generating 12  ready 3  learner has waited 9 s"
    assert doing(Observed(state="pending", problem="waits for 4 CPUs")) == "pending: waits for 4 CPUs"


async def test_a_run_talks_while_its_heart_beats(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Beating:
        observed = Observed(state="starting")

        async def report_forever(self) -> None:
            await asyncio.sleep(60)

    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.05)
    monkeypatch.setattr("services.runs.context.POLL_SECONDS", 0.02)
    async with heartbeats(Beating(), Display()):  # type: ignore[arg-type]
        await asyncio.sleep(0.5)
    assert lines(capsys) == ["still starting"]
