"""Requests and responses of the reward server, shared by its OpenAPI schema and the client."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from reward_servers.scorers.cases import AnyTest, parse_tests
from volley.base import Spec
from volley.records import Verdict, VerdictStatus
from volley.scoring import ArcScorer, CodeScorer, CountdownScorer, ExactScorer, MathScorer, SandboxLimits, ScorerSpec

MAX_ITEMS = 256
MAX_RESPONSES = 256
MAX_RESPONSE_CHARS = 1_000_000


class Limits(Spec):
    """Limits of one test; a null field keeps the server's default."""

    cpu_s: float | None = Field(None, gt=0, le=30)
    program_s: float | None = Field(None, gt=0, le=120)
    memory_mb: int | None = Field(None, ge=16, le=2048)
    processes: int | None = Field(None, ge=1, le=64)
    stdout_kb: int | None = Field(None, ge=1, le=8192)
    stderr_kb: int | None = Field(None, ge=1, le=1024)

    def over(self, default: SandboxLimits) -> SandboxLimits:
        """Return ``default`` with the fields set here replaced."""
        return default.model_copy(update=self.model_dump(exclude_none=True))


class CodeItem(Spec):
    """Runs the program in each response against ``tests``."""

    kind: Literal["code"]
    tests: list[AnyTest] = Field(min_length=1, max_length=1000)
    extract: Literal["raw", "last_fence"] = "last_fence"
    mode: Literal["all", "fraction"] = "all"
    tolerance: float | None = Field(None, gt=0)
    values: tuple[float, float] = Field((1.0, -1.0), description="rewards for a pass and for a failure")
    limits: Limits = Limits()


class MathItem(Spec):
    """Compares the final answer of each response with ``answer``."""

    kind: Literal["math"]
    answer: str = Field(min_length=1, max_length=1000)
    extract: Literal["boxed", "final_answer", "either"] = "either"


class ExactItem(Spec):
    """Compares each response with ``answer``, ignoring leading and trailing white space."""

    kind: Literal["exact"]
    answer: str = Field(max_length=MAX_RESPONSE_CHARS)


class CountdownItem(Spec):
    """Checks that each response is an expression that uses every number once and equals ``target``."""

    kind: Literal["countdown"]
    numbers: list[int] = Field(min_length=1, max_length=16)
    target: int


class ArcItem(Spec):
    """Compares the last grid in each response with ``grid``."""

    kind: Literal["arc"]
    grid: list[list[int]] = Field(min_length=1, max_length=30)
    partial: bool = False


ItemScorer = Annotated[CodeItem | MathItem | ExactItem | CountdownItem | ArcItem, Field(discriminator="kind")]
Response = Annotated[str, Field(max_length=MAX_RESPONSE_CHARS)]


class Item(Spec):
    """One group: the responses to one prompt and how to score them."""

    id: str = Field(max_length=200)
    scorer: ItemScorer
    responses: list[Response] = Field(min_length=1, max_length=MAX_RESPONSES)


class ScoreRequest(Spec):
    """A batch of groups to score."""

    items: list[Item] = Field(min_length=1, max_length=MAX_ITEMS)


class VerdictOut(Spec):
    """The verdict on one response. ``reward`` is null if and only if the status is ``infra_error`` or ``refused``."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    status: VerdictStatus
    reward: float | None
    answer: str | None = None
    detail: str = ""
    failing_test: int | None = None
    cpu_ms: float | None = None
    wall_ms: float | None = None
    peak_mb: float | None = None
    stdout: str = ""
    stderr: str = ""
    unsafe: bool = False
    weak_oracle: bool = False
    rank: float | None = None

    @classmethod
    def of(cls, verdict: Verdict) -> "VerdictOut":
        """Return ``verdict`` as the server sends it."""
        return cls(**{name: getattr(verdict, name) for name in cls.model_fields})


class ItemOut(Spec):
    """The verdicts of one group, in the order of its responses."""

    id: str
    verdicts: list[VerdictOut]


class SandboxOut(Spec):
    """The isolation that programs run in."""

    tier: Literal["A", "B", "C", "none"]
    layers: list[str]
    probes_passed: int
    probes_total: int


class ScoreAnswer(Spec):
    """The verdicts of a batch, in the order of its groups."""

    items: list[ItemOut]
    sandbox: SandboxOut


def job_of(item: ItemScorer, limits: SandboxLimits) -> tuple[ScorerSpec, dict[str, Any]]:
    """Return the scorer spec and dataset row for an item's ``scorer``. Raises ValueError if its tests are invalid."""
    row = item.model_dump(mode="json")
    match item:
        case CodeItem():
            parse_tests(row["tests"])
            passed, failed = item.values
            spec: ScorerSpec = CodeScorer.model_validate(
                {
                    "values": {"passed": passed, "failed": failed},
                    "mode": item.mode,
                    "extract": item.extract,
                    "tolerance": item.tolerance,
                    "sandbox": {"limits": item.limits.over(limits).model_dump()},
                }
            )
        case MathItem():
            spec = MathScorer(extract=item.extract)
        case ExactItem():
            spec = ExactScorer()
        case CountdownItem():
            spec = CountdownScorer()
        case ArcItem():
            spec = ArcScorer(partial=item.partial)
    return spec, row
