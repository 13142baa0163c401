"""Looks at runs, and notes what their webhooks are to hear of."""

import logging
import time
from collections.abc import Iterator, Sequence

from pydantic import Field, TypeAdapter, ValidationError

from services.notifications.notices import Notice, notice_of
from services.notifications.rules import Finding, RuleState, take
from services.recording.sinks.base import SinkRow, evaluation_row, step_row
from services.store.redis import Entry, Store
from volley.base import Spec
from volley.state import ENDED, Observed, RunRecord
from volley.webhooks import ChangeRule, MetricRule, NoStepRule, Rule, WebhookSpec, evaluated

log = logging.getLogger(__name__)

PAGE = 1000  # rows per request
WEBHOOKS: TypeAdapter[tuple[WebhookSpec, ...]] = TypeAdapter(tuple[WebhookSpec, ...])


class WatchState(Spec):
    """What is remembered of a run between two looks."""

    positions: dict[str, str] = Field(default_factory=dict, description="last entry read of each stream")
    rules: dict[str, RuleState] = Field(default_factory=dict, description="by '<webhook>.<rule>', numbers from 0")
    reported: str = Field("", description="the end or pause that was reported last; '' if the run went on since")
    step: int = Field(-1, description="steps done; -1 while the run is not meant to do any")
    since: float = Field(0.0, description="since when it was so, in seconds since 1970")
    count: int = Field(0, description="notices so far")


class Watch:
    """Stores notices of the runs of one Redis, for `Deliveries` to deliver."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._over: dict[str, str] = {}  # runs whose end was reported, and which end

    async def look(self, record: RunRecord, observed: Observed, *, final: bool) -> None:
        """Store a notice of everything that happened to a run since the last look.

        Args:
            final: a failure is one, because no other driver will take over.

        Raises:
            HostError: Redis does not answer. The next look makes up for this one.
        """
        if not record.job.get("notify") or self._over.get(record.id) == end_of(observed, final):
            return
        try:
            webhooks = WEBHOOKS.validate_python(record.job["notify"])
        except ValidationError:  # written by another release
            log.warning("run %s: its notify cannot be read, and its webhooks hear nothing", record.id)
            self._over[record.id] = end_of(observed, final)
            return
        before = _read_state(record.id, await self._store.watch_state(record.id))
        look = Look(record, observed, webhooks, before, time.time())
        for stream in look.streams:
            while page := await self._store.entries(record.id, stream, after=look.positions.get(stream), count=PAGE):
                look.read(stream, page)
        look.judge(final)
        if look.state != before:
            notices = {notice.id: notice.model_dump_json() for notice in look.notices}
            await self._store.put_watch_state(record.id, look.state.model_dump_json(), notices)
        if observed.state in ENDED and look.reported:
            self._over[record.id] = look.reported


def _read_state(run_id: str, text: str | None) -> WatchState:
    """The state as it was stored; a new one if there is none, or if another release wrote it."""
    try:
        return WatchState.model_validate_json(text) if text else WatchState()
    except ValidationError:
        log.warning("run %s: what its webhooks have heard cannot be read, and starts anew", run_id)
        return WatchState()


class Look:
    """One look at a run.

    Attributes:
        positions: last entry read of each stream.
        reported: see `WatchState`.
        notices: what was found.
    """

    def __init__(
        self, record: RunRecord, observed: Observed, webhooks: Sequence[WebhookSpec], before: WatchState, now: float
    ) -> None:
        self._record, self._observed, self._webhooks, self._now = record, observed, webhooks, now
        self.positions, self._rules = dict(before.positions), dict(before.rules)
        self.reported, self._step, self._since, self._count = before.reported, before.step, before.since, before.count
        self.notices: list[Notice] = []

    @property
    def state(self) -> WatchState:
        """What to remember."""
        return WatchState(
            positions=self.positions,
            rules=self._rules,
            reported=self.reported,
            step=self._step,
            since=self._since,
            count=self._count,
        )

    @property
    def streams(self) -> list[str]:
        """The streams that the rules need."""
        return sorted({stream_of(rule) for _, _, rule in self._all_rules() if not isinstance(rule, NoStepRule)})

    def read(self, stream: str, page: Sequence[Entry]) -> None:
        """Hold the rules against new rows of a stream."""
        self.positions[stream] = page[-1][0]
        watching = [
            (key, webhook, rule)
            for key, webhook, rule in self._all_rules()
            if not isinstance(rule, NoStepRule) and stream_of(rule) == stream
        ]
        for _, row in page:
            figures = evaluation_row(row, self._now) if stream == "evaluations" else step_row(row)
            for key, webhook, rule in watching:
                self._hold(key, webhook, rule, figures)

    def judge(self, final: bool) -> None:
        """Note the run's end or pause, and a step that does not come."""
        end = end_of(self._observed, final)
        if end and end != self.reported:
            for webhook in self._webhooks:
                if (state := self._observed.state) in webhook.states:
                    self._note(webhook, f"run.{state}", state_words(self._record.name, self._observed))
        self.reported = end
        self._await_step()

    def _hold(self, key: str, webhook: WebhookSpec, rule: MetricRule, figures: SinkRow) -> None:
        value = figures.values.get(evaluated(rule.metric) or rule.metric)
        if value is None:
            return
        self._rules[key], finding = take(rule, self._rules.get(key, RuleState()), figures.number, value)
        if finding is not None:
            place = "version" if figures.kind == "evaluation" else "step"
            words = f"{self._record.name}: {finding_words(rule, finding)} at {place} {figures.number}"
            found = {"value": finding.value, "reference": finding.reference, place: figures.number}
            self._note(webhook, f"rule.{rule.kind}", words, rule=rule.model_dump(), **found)

    def _await_step(self) -> None:
        watching = [(key, webhook, rule) for key, webhook, rule in self._all_rules() if isinstance(rule, NoStepRule)]
        step = self._observed.step if self._observed.state in ("starting", "running") else -1
        if watching and step != self._step:
            self._step, self._since = step, self._now
            self._rules |= {key: RuleState() for key, _, _ in watching}
        for key, webhook, rule in watching:
            waited = self._now - self._since
            if step >= 0 and waited >= rule.seconds and not self._rules[key].holds:
                self._rules[key] = RuleState(holds=True)
                words = f"{self._record.name} has done no step for {waited:.0f} s"
                self._note(webhook, "rule.no_step", words, rule=rule.model_dump(), value=waited)

    def _note(self, webhook: WebhookSpec, kind: str, text: str, **about: object) -> None:
        about["text"] = text
        self._count += 1
        self.notices.append(notice_of(self._record, self._observed, webhook, self._count, kind, self._now, **about))

    def _all_rules(self) -> Iterator[tuple[str, WebhookSpec, Rule]]:
        for number, webhook in enumerate(self._webhooks):
            for place, rule in enumerate(webhook.rules):
                yield f"{number}.{place}", webhook, rule


def end_of(observed: Observed, final: bool) -> str:
    """A name for the run's end or pause; '' if it goes on. A resumed run that ends again has another end."""
    if observed.state == "paused":
        return "paused"
    if observed.state == "done" or (observed.state == "failed" and final):
        return f"{observed.state} {observed.ended}"
    return ""


def stream_of(rule: MetricRule) -> str:
    """The stream that has the rule's metric."""
    return "metrics" if evaluated(rule.metric) is None else "evaluations"


def state_words(name: str, observed: Observed) -> str:
    """A sentence about the run's state."""
    verb = "is" if observed.state in ("done", "paused") else "has"
    after = f" after step {observed.step} of {observed.steps}" if observed.steps else ""
    return f"{name} {verb} {observed.state}{after}" + (f": {observed.problem}" if observed.problem else "")


def finding_words(rule: MetricRule, finding: Finding) -> str:
    """What the rule found, without the run's name."""
    if isinstance(rule, ChangeRule):
        return f"{rule.metric} {rule.kind} from {finding.reference:.4g} to {finding.value:.4g}"
    mean = f"mean {rule.metric} of the last {rule.window}" if rule.window > 1 else rule.metric
    return f"{mean} is {finding.value:.4g}, {rule.kind} {rule.limit:.4g},"
