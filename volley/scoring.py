"""How a job says which scorer judges its samples: one union, discriminated on ``kind``."""

from typing import Annotated, Literal

from pydantic import Field

from volley.base import Spec
from volley.plugins import SCORERS, OpenUnion


class RewardValues(Spec):
    """The two rewards of a scorer that only tells right from wrong."""

    passed: float = 1.0
    failed: float = 0.0


class SandboxLimits(Spec):
    """What one test of one program may use."""

    cpu_s: float = Field(4.0, gt=0, le=300, description="processor seconds of one test")
    wall_limit_s: float | None = Field(None, gt=0, description="wall seconds of one test; null: 3x cpu_s plus 1")
    program_s: float = Field(30.0, gt=0, le=3600, description="wall seconds of all tests of one program")
    memory_mb: int = Field(512, ge=16, le=65536)
    processes: int = Field(64, ge=1, le=1024)
    open_files: int = Field(64, ge=8, le=1024)
    file_mb: int = Field(16, ge=1, le=1024, description="largest file; also the size of /tmp and /dev/shm")
    stdout_kb: int = Field(1024, ge=1, le=65536)
    stderr_kb: int = Field(64, ge=1, le=65536)
    code_kb: int = Field(256, ge=1, le=4096)

    @property
    def wall_s(self) -> float:
        """Load must not flip a verdict: processor time decides, wall time only ends what sleeps."""
        return self.wall_limit_s or 3 * self.cpu_s + 1


class SandboxSpec(Spec):
    """How model-written code is isolated. docs/sandbox.md says what each tier needs and covers."""

    min_tier: Literal["auto", "A", "B", "C", "none"] = Field(
        "auto", description="auto: A where cgroups exist, else B; a worker that can not reach it refuses to start"
    )
    mechanism: Literal["pooled", "fresh"] = Field(
        "pooled", description="one sandbox for many programs, or one for each"
    )
    packages: tuple[str, ...] = Field((), description="importable inside beside the standard library, such as numpy")
    limits: SandboxLimits = SandboxLimits()


class CountdownScorer(Spec):
    """Is the sample an expression in ``+ - *`` that uses each of the row's ``numbers`` once and equals ``target``?"""

    kind: Literal["countdown"] = "countdown"
    values: RewardValues = RewardValues()


class ExactScorer(Spec):
    """Does the sample, white space trimmed, equal the row's ``answer``?"""

    kind: Literal["exact"] = "exact"
    values: RewardValues = RewardValues()
    field: str = Field("answer", description="the row's field that holds the expected text")


class PythonScorer(Spec):
    """A trusted function of the user's own: ``package.module:function(sample, row) -> float``."""

    kind: Literal["python"] = "python"
    target: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="package.module:function")
    timeout_s: float = Field(10.0, gt=0, description="seconds one sample may take")


class CodeScorer(Spec):
    """Does the sample's program pass the row's ``tests``? docs/scorers.md shows the three kinds of tests."""

    kind: Literal["code"] = "code"
    values: RewardValues = RewardValues(passed=1.0, failed=-1.0)
    mode: Literal["all", "fraction"] = Field(
        "all", description="all: one of the two values, stops at the first failure; fraction: share of tests passed"
    )
    extract: Literal["last_fence", "raw"] = Field("last_fence", description="where in the sample the program is")
    tolerance: float | None = Field(None, gt=0, description="numbers in the output may differ by this much")
    sandbox: SandboxSpec = SandboxSpec()


class MathScorer(Spec):
    """Does the sample's final answer equal the row's ``answer``, as mathematics?"""

    kind: Literal["math"] = "math"
    values: RewardValues = RewardValues()
    field: str = Field("answer", description="the row's field that holds the expected answer, LaTeX or plain")
    extract: Literal["boxed", "final_answer", "either"] = "either"
    timeout_s: float = Field(1.0, gt=0, description="seconds one symbolic comparison may take")
    sandbox: SandboxSpec = SandboxSpec(limits=SandboxLimits(memory_mb=1024))


class RegexScorer(Spec):
    """Does the pattern match? It runs on a bounded text in a killable process: patterns may backtrack."""

    kind: Literal["regex"] = "regex"
    values: RewardValues = RewardValues()
    pattern: str | None = Field(None, description="one pattern for all rows; null: the row's field holds it")
    field: str = "pattern"
    whole: bool = Field(True, description="the whole trimmed sample must match; false: a match anywhere")
    timeout_s: float = Field(1.0, gt=0)


class ArcScorer(Spec):
    """Is the last grid of digits in the sample the row's grid?"""

    kind: Literal["arc"] = "arc"
    values: RewardValues = RewardValues()
    field: str = Field("grid", description="the row's field with the expected grid, rows of integers 0-9")
    partial: bool = Field(False, description="share of right cells as reward where the shapes agree")


class HttpScorer(Spec):
    """Somebody else's server: POST of prompt, row and samples; ``{"rewards": [...]}`` comes back."""

    kind: Literal["http"] = "http"
    url: str = Field(pattern=r"^https?://")
    timeout_s: float = Field(30.0, gt=0, description="seconds all attempts together may take")
    attempts: int = Field(3, ge=1, le=10)
    token_env: str | None = Field(None, description="environment variable that holds a bearer token")


class LengthTerm(Spec):
    """1 up to ``start`` characters, falling in a line to 0 at ``end``."""

    kind: Literal["length"] = "length"
    start: int = Field(ge=0)
    end: int = Field(ge=1)


class FormatTerm(Spec):
    """1 where the sample holds every one of these texts, in this order, else 0."""

    kind: Literal["format"] = "format"
    contains: tuple[str, ...] = Field(min_length=1)


Term = Annotated[
    CountdownScorer
    | ExactScorer
    | PythonScorer
    | CodeScorer
    | MathScorer
    | RegexScorer
    | ArcScorer
    | HttpScorer
    | LengthTerm
    | FormatTerm,
    Field(discriminator="kind"),
    OpenUnion(SCORERS),
]


class WeightedTerm(Spec):
    """One summand of a composed reward."""

    scorer: Term
    weight: float = 1.0


class SumScorer(Spec):
    """A weighted sum of other scorers and terms. The first one gives the verdict its status and its answer."""

    kind: Literal["sum"] = "sum"
    terms: tuple[WeightedTerm, ...] = Field(min_length=1)
    minimum: float | None = None
    maximum: float | None = None


ScorerSpec = Annotated[
    CountdownScorer
    | ExactScorer
    | PythonScorer
    | CodeScorer
    | MathScorer
    | RegexScorer
    | ArcScorer
    | HttpScorer
    | SumScorer,
    Field(discriminator="kind"),
    OpenUnion(SCORERS, beside="; format and length as terms of a sum"),
]
