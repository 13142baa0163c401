"""Configuration of the scorers: one union, discriminated on ``kind``."""

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from volley.base import Spec
from volley.patterns import HTTP_URL, TARGET
from volley.plugins import SCORERS, OpenUnion


class RewardValues(Spec):
    """The rewards of a scorer that only distinguishes right from wrong."""

    passed: float = 1.0
    failed: float = 0.0


class SandboxLimits(Spec):
    """Resource limits of one test of one program."""

    cpu_s: float = Field(4.0, gt=0, le=300, description="CPU seconds per test")
    wall_limit_s: float | None = Field(None, gt=0, description="wall seconds per test; null: 3 x cpu_s + 1")
    program_s: float = Field(30.0, gt=0, le=3600, description="wall seconds per program, all tests together")
    memory_mb: int = Field(512, ge=16, le=65536)
    processes: int = Field(64, ge=1, le=1024)
    open_files: int = Field(64, ge=8, le=1024)
    file_mb: int = Field(16, ge=1, le=1024, description="largest file; also the size of /tmp and /dev/shm")
    stdout_kb: int = Field(1024, ge=1, le=65536)
    stderr_kb: int = Field(64, ge=1, le=65536)
    code_kb: int = Field(256, ge=1, le=4096)

    @property
    def wall_s(self) -> float:
        """Wall seconds per test: generous, so that load flips no verdict; it only ends programs that sleep."""
        return self.wall_limit_s or 3 * self.cpu_s + 1


class SandboxSpec(Spec):
    """How model-written code is isolated. docs/sandbox.md describes the tiers."""

    min_tier: Literal["auto", "A", "B", "C", "none"] = Field(
        "auto", description="workers refuse to start below this tier; auto: A for root if cgroups are writable, else B"
    )
    mechanism: Literal["pooled", "fresh"] = Field("pooled", description="reuse a sandbox, or use a new one per program")
    packages: tuple[str, ...] = Field((), description="packages that programs may import, such as numpy")
    limits: SandboxLimits = SandboxLimits()


class CountdownScorer(Spec):
    """Passes an expression in ``+ - *`` that uses each of the row's ``numbers`` once and equals ``target``."""

    kind: Literal["countdown"] = "countdown"
    values: RewardValues = RewardValues()


class ExactScorer(Spec):
    """Passes a sample that equals the row's ``answer``, ignoring surrounding white space."""

    kind: Literal["exact"] = "exact"
    values: RewardValues = RewardValues()
    field: str = Field("answer", description="the row's field with the expected text")


class PythonScorer(Spec):
    """Calls your own trusted function ``(sample, row)``, or ``(samples, row)`` once per group; it may be ``async``."""

    kind: Literal["python"] = "python"
    target: str = Field(pattern=TARGET, description="package.module:function")
    takes: Literal["sample", "group"] | None = Field(
        None, description="what one call scores; null: the group if the first parameter is named samples"
    )
    timeout_s: float = Field(10.0, gt=0, description="seconds per call")
    retries: int = Field(0, ge=0, le=20, description="further attempts of a call that raised or timed out")
    retry_wait_s: float = Field(
        1.0, gt=0, le=60, description="seconds before the first retry, doubled for each further one, up to 60"
    )
    max_concurrent: int | None = Field(
        None, ge=1, le=4096, description="calls under way at once, in all reward workers of the run together"
    )
    max_per_s: float | None = Field(
        None, gt=0, description="calls begun per second, in all reward workers of the run together"
    )
    cache: int = Field(
        0, ge=0, le=10_000_000, description="latest results kept and used again, also after a resume; 0: none"
    )


class CodeScorer(Spec):
    """Runs the sample's program on the row's ``tests``. docs/scorers.md shows the three kinds of tests."""

    kind: Literal["code"] = "code"
    values: RewardValues = RewardValues()
    mode: Literal["all", "fraction"] = Field(
        "all", description="reward: all: one of values, stopping at the first failure; fraction: share of tests passed"
    )
    extract: Literal["last_fence", "raw"] = Field("last_fence", description="where the program is in the sample")
    tolerance: float | None = Field(None, gt=0, description="allowed difference of numbers in the output")
    sandbox: SandboxSpec = SandboxSpec()


class MathScorer(Spec):
    """Passes a sample whose final answer is mathematically equal to the row's ``answer``."""

    kind: Literal["math"] = "math"
    values: RewardValues = RewardValues()
    field: str = Field("answer", description="the row's field with the expected answer, LaTeX or plain")
    extract: Literal["boxed", "final_answer", "either"] = "either"
    timeout_s: float = Field(1.0, gt=0, description="seconds per symbolic comparison")
    sandbox: SandboxSpec = SandboxSpec(limits=SandboxLimits(memory_mb=1024))


class ReasoningGymScorer(Spec):
    """Passes a sample whose answer the generated task's own scorer gives at least ``passed_at``, in the sandbox."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    values: RewardValues = RewardValues()
    passed_at: float = Field(1.0, gt=0, le=1, description="lowest score that passes")
    partial: bool = Field(False, description="reward the score itself instead of values")
    extract: Literal["either", "tag", "number", "whole"] = Field(
        "either",
        description="tag: the last <answer>...</answer>; number: the last number there, or in the sample; whole: the "
        "trimmed sample; either: tag if there is one, else whole",
    )
    timeout_s: float = Field(5.0, gt=0, description="CPU seconds per answer, to generate its task again included")
    sandbox: SandboxSpec = SandboxSpec(limits=SandboxLimits(memory_mb=1024))


class RegexScorer(Spec):
    """Matches a pattern, in a process that is killed after ``timeout_s`` because patterns may backtrack."""

    kind: Literal["regex"] = "regex"
    values: RewardValues = RewardValues()
    pattern: str | None = Field(None, description="one pattern for all rows; null: read it from the row's field")
    field: str = "pattern"
    whole: bool = Field(True, description="match the whole trimmed sample; false: match anywhere")
    timeout_s: float = Field(1.0, gt=0)


class ArcScorer(Spec):
    """Passes a sample whose last grid of digits is the row's grid."""

    kind: Literal["arc"] = "arc"
    values: RewardValues = RewardValues()
    field: str = Field("grid", description="the row's field with the expected grid, rows of integers 0-9")
    partial: bool = Field(False, description="reward the share of correct cells if the shape is right")


class HttpScorer(Spec):
    """Posts prompt, row and samples to your own server, which answers ``{"rewards": [...]}``, perhaps with ranks."""

    kind: Literal["http"] = "http"
    url: str = Field(pattern=HTTP_URL)
    timeout_s: float = Field(30.0, gt=0, description="seconds for all attempts together")
    attempts: int = Field(3, ge=1, le=10)
    token_env: str | None = Field(None, description="environment variable with a bearer token")

    @field_validator("url")
    @classmethod
    def _has_host_and_port(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            named = bool(parts.hostname) and parts.port != 0
        except ValueError:
            named = False
        if not named:
            raise ValueError(f"{url!r} names no host, or no port that exists: write http://HOST:PORT/PATH")
        return url


class LengthTerm(Spec):
    """1 up to ``start`` characters, then falling linearly to 0 at ``end``."""

    kind: Literal["length"] = "length"
    start: int = Field(ge=0)
    end: int = Field(ge=1)

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.end <= self.start:
            raise ValueError(f"end {self.end} is not above start {self.start}: raise it to {self.start + 1} or more")
        return self


class FormatTerm(Spec):
    """1 if the sample contains all of these texts in this order, else 0."""

    kind: Literal["format"] = "format"
    contains: tuple[str, ...] = Field(min_length=1)


Term = Annotated[
    CountdownScorer
    | ExactScorer
    | PythonScorer
    | CodeScorer
    | MathScorer
    | ReasoningGymScorer
    | RegexScorer
    | ArcScorer
    | HttpScorer
    | LengthTerm
    | FormatTerm,
    Field(discriminator="kind"),
    OpenUnion(SCORERS),
]


class WeightedTerm(Spec):
    """One term of a sum of rewards."""

    scorer: Term
    weight: float = 1.0


class SumScorer(Spec):
    """A weighted sum of scorers and terms. The first term sets the verdict's status, answer and rank."""

    kind: Literal["sum"] = "sum"
    terms: tuple[WeightedTerm, ...] = Field(min_length=1)
    minimum: float | None = None
    maximum: float | None = None

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.minimum is not None and self.maximum is not None and self.minimum >= self.maximum:
            raise ValueError(
                f"minimum {self.minimum:g} is not below maximum {self.maximum:g}, so every reward would be the same: "
                "swap them, or remove one"
            )
        return self


ScorerSpec = Annotated[
    CountdownScorer
    | ExactScorer
    | PythonScorer
    | CodeScorer
    | MathScorer
    | ReasoningGymScorer
    | RegexScorer
    | ArcScorer
    | HttpScorer
    | SumScorer,
    Field(discriminator="kind"),
    OpenUnion(SCORERS, beside="; format and length only as terms of kind: sum"),
]
