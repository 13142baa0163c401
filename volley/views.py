"""Bodies of the API's requests and responses, besides the models of `volley.state`."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from volley.base import Spec
from volley.patterns import ENTRY_ID, LONG_NAME, NAME
from volley.state import AuditRecord, Desired, Limits, Observed, Place, Priority, RunRecord, RunState

SeenState = Literal[RunState, "lost"]
Tag = Annotated[str, StringConstraints(max_length=200)]
TagName = Annotated[str, StringConstraints(pattern=NAME)]
TokenName = Annotated[str, StringConstraints(pattern=NAME)]
Scope = Literal["read", "operate", "admin"]
RunId = Annotated[str, StringConstraints(pattern=LONG_NAME)]
EntryId = Annotated[str, StringConstraints(pattern=ENTRY_ID)]

LIVE_STREAMS = ("metrics", "events", "evaluations")
BEGINNING = "0-0"  # the entry id before the first entry of a stream
LIVE_START = ".".join(BEGINNING for _ in LIVE_STREAMS)  # `Last-Event-ID` of a live view that begins with the run


class NewRun(Spec):
    """A run to create."""

    job: dict[str, Any] = Field(description="see /v1/schema/job; paths are absolute paths on the cluster's machines")
    tags: dict[TagName, Tag] = Field(default_factory=dict, max_length=32)
    priority: Priority = Field(0, description="in the queue; at most what the token allows")


class JobToCheck(Spec):
    job: dict[str, Any]


class Changes(Spec):
    """Fields of the desired state to replace. Null reverts a field to the job's value; omitted fields stay."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    actors: int | None = Field(None, ge=0, le=10_000)
    reward_workers: int | None = Field(None, ge=1, le=10_000)
    environment_workers: int | None = Field(None, ge=1, le=10_000)
    paused: bool | None = None
    objective: dict[str, Any] | None = Field(
        None,
        description='fields that override the objective\'s, such as {"k": 4} or {"weights": {"1": 0.5, "8": 0.5}}; '
        "they accumulate; null drops all",
    )
    learning_rate: float | None = Field(None, gt=0)
    max_lag: int | None = Field(None, ge=0, le=10_000)
    priority: Priority | None = Field(None, description="in the queue; at most what the token allows")


class ExportRequest(Spec):
    checkpoint: int | None = Field(
        None, ge=0, le=1_000_000_000, description="step of a checkpoint; null exports the newest"
    )


class NewToken(Spec):
    name: TokenName
    scope: Scope
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _limits_bind(self) -> Self:
        if problem := useless_limits(self.scope, self.limits):
            raise ValueError(problem)
        return self


def useless_limits(scope: Scope, limits: Limits) -> str:
    """Say why a token of this scope cannot have these limits; "" if it can."""
    given = [name for name, value in limits if value != Limits.model_fields[name].default]
    if scope != "read" or not given:
        return ""
    return f"a token of scope read submits no runs to limit: give it scope operate, or no {' and no '.join(given)}"


class View(BaseModel):
    """Base of the response models."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunView(View):
    record: RunRecord
    desired: Desired
    observed: Observed
    state: SeenState = Field(description="observed.state, or lost if the driver has been silent for too long")


class RunSummary(View):
    id: str
    name: str
    kind: str
    state: SeenState
    step: int
    steps: int
    created: float
    updated: float
    problem: str
    actors: int
    reward_workers: int
    environment_workers: int
    objective: str = Field(description="kind, and k or weights; empty if this kind of job has no objective")
    tags: dict[str, str]
    spark: list[float] = Field(description="the newest values of reward_mean, at most 40")


class RunPage(View):
    items: list[RunSummary]
    next: str | None = Field(description="cursor of the next page; null on the last one")


class Series(View):
    steps: list[int] = Field(description="the last step of each bucket")
    series: dict[str, list[float | None]] = Field(description="the mean over each bucket; null if nothing was measured")
    total: int = Field(description="rows in the range, before bucketing")
    names: list[str] = Field(description="all metrics of the run; a histogram has one name per bin")


class Event(View):
    model_config = ConfigDict(extra="allow")

    id: str
    kind: str
    time: float


class EventPage(View):
    items: list[Event]
    next: str | None = Field(description="the value of `after` for the next page; null on the last one")


class LedgerView(View):
    counts: dict[str, int]


class SampleView(View):
    model_config = ConfigDict(extra="allow")

    id: str
    step: int
    group: int
    status: str
    reward: float | None
    advantage: float | None = None
    prompt_id: str = ""
    prompt: str = Field("", description="its text, as the model gets it")
    sample: str = Field("", description="the sample's text")
    detail: str = Field("", description="what the scorer says of it, in one line")


class SamplePage(View):
    items: list[SampleView]
    next: str | None = Field(description="cursor of the next page; null on the last one")


class Rows(View):
    items: list[dict[str, Any]]


class LogFile(View):
    process: str
    bytes: int | None = Field(description="size; null if Ray keeps the log")


class LogList(View):
    items: list[LogFile]


class ExportView(View):
    run: str
    checkpoint: int | None = Field(description="steps done; null for the finished model")
    path: str = Field(description="the model folder in Hugging Face format, or a checkpoint for `volley export`")
    ready: bool = Field(description="whether the folder exists, as far as this server can see")


class NodeView(View):
    id: str
    address: str
    alive: bool
    resources: dict[str, float]
    available: dict[str, float]


class Holder(View):
    run: str
    role: Literal["actor", "reward_worker", "environment_worker", "learner_rank"]
    count: int
    cpus: float = Field(description="total of all these processes")
    gpus: float


class ClusterView(View):
    nodes: list[NodeView]
    holders: list[Holder]


class OwnerView(View):
    """What the runs of one owner hold."""

    name: str = Field(description="of the token; empty for runs that needed none")
    runs: int
    cpus: float
    gpus: float
    limits: Limits


class QueueView(View):
    items: list[Place] = Field(description="first the runs that hold resources, then those that wait, in their order")
    owners: list[OwnerView]


class AuditView(AuditRecord):
    id: str


class AuditPage(View):
    items: list[AuditView] = Field(description="newest first")
    next: str | None = Field(description="the value of `before` for the next page; null on the last one")


class Checked(View):
    ok: Literal[True] = True


class TokenView(View):
    name: str
    scope: Scope
    created: float
    limits: Limits = Limits()


class TokenList(View):
    items: list[TokenView]


class MadeToken(TokenView):
    token: str = Field(description="shown only here; the server stores its SHA-256")


class Health(View):
    status: Literal["ok"] = "ok"


class Readiness(View):
    ready: Literal[True] = True
    redis: Literal["ok"] = "ok"
    ray: Literal["ok"] = "ok"
