"""How a job says which scorer judges its samples: one union, discriminated on ``kind``."""

from typing import Annotated, Literal

from pydantic import Field

from volley.base import Spec


class RewardValues(Spec):
    """The two rewards of a scorer that only tells right from wrong."""

    passed: float = 1.0
    failed: float = 0.0


class SandboxLimits(Spec):
    """What one test of one program may use."""

    cpu_s: float = Field(4.0, gt=0, le=300, description="processor seconds of one test; wall time is 3x that plus 1 s")
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
        return 3 * self.cpu_s + 1


class SandboxSpec(Spec):
    """How model-written code is isolated. docs/sandbox.md says what each tier needs and covers."""

    min_tier: Literal["auto", "A", "B", "C", "none"] = Field(
        "auto", description="auto: A where cgroups exist, else B; a worker that can not reach it refuses to start"
    )
    mechanism: Literal["pooled", "fresh"] = Field("pooled", description="one sandbox for many programs, or one for each")
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


ScorerSpec = Annotated[CountdownScorer | ExactScorer | PythonScorer, Field(discriminator="kind")]
