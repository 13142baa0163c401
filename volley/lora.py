"""Low-rank adapters (arXiv 2106.09685): ``W + alpha / rank * B A`` in place of a matrix W; only A and B are trained.

The learner trains and publishes A and B, the actors add them to the W they have. Both take the names and the sum from
here.
"""

from typing import Any, Literal

from pydantic import Field, field_validator

from volley.base import Spec

DOWN, UP = ".lora_A.weight", ".lora_B.weight"  # [rank, in] and [out, rank], behind the matrix's name


class LoraSpec(Spec):
    """Train low-rank adapters on a frozen model. Only they are kept in checkpoints and sent to the actors."""

    rank: int = Field(16, ge=1, le=4096)
    alpha: float = Field(32.0, gt=0, description="the adapters' product counts alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="only 0: the policy that learns is the one that samples")
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description="matrices that get an adapter, by the ends of their names: [q_proj, v_proj]; all-linear: all but "
        "the output embedding",
    )

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, dropout: float) -> float:
        if dropout:
            raise ValueError(f"dropout {dropout:g} would make the policy another one than samples: write dropout: 0")
        return dropout

    @field_validator("target_modules")
    @classmethod
    def _some(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not targets:
            raise ValueError("no matrix to adapt: write target_modules: all-linear, or name some: [q_proj, v_proj]")
        return targets

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def merged(base: Any, down: Any, up: Any, scale: float) -> Any:
    """``base + scale * up down`` of torch tensors, summed in float32, in the type of ``base``.

    Args:
        base: [out, in].
        down: A, [rank, in].
        up: B, [out, rank].
    """
    return base.float().addmm(up.float(), down.float(), alpha=scale).to(base.dtype)
