"""Low-rank adapters (arXiv 2106.09685): ``W + alpha / rank * B A`` replaces a matrix W, and only A and B are trained.

The learner trains and publishes A and B, and the actors add them to their W. Both use the names and the sum defined
here.
"""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from volley.base import Spec

if TYPE_CHECKING:
    from torch import Tensor

DOWN, UP = ".lora_A.weight", ".lora_B.weight"  # A [rank, in] and B [out, rank]: suffixes to the matrix's name


class LoraSpec(Spec):
    """Low-rank adapters on a frozen model. Checkpoints and broadcasts contain only the adapters."""

    rank: int = Field(16, ge=1, le=4096)
    alpha: float = Field(32.0, gt=0, description="the adapters' product is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="must be 0, so that training and sampling use the same policy")
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description="matrices with an adapter, by the end of their name: [q_proj, v_proj]; all-linear: all but the "
        "output embedding",
    )

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, dropout: float) -> float:
        if dropout:
            raise ValueError(f"dropout {dropout:g} would train another policy than the one sampled from: write 0")
        return dropout

    @field_validator("target_modules")
    @classmethod
    def _some(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not targets:
            raise ValueError("empty: write target_modules: all-linear, or name matrices: [q_proj, v_proj]")
        return targets

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def merged(base: "Tensor", down: "Tensor", up: "Tensor", scale: float) -> "Tensor":
    """``base + scale * up down``, summed in float32 and returned in the type of ``base``.

    Args:
        base: [out, in].
        down: A, [rank, in].
        up: B, [out, rank].
    """
    return base.float().addmm(up.float(), down.float(), alpha=scale).to(base.dtype)
