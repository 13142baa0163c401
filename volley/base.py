"""The base of every configuration model: unknown keys refused, values frozen."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _custom(name: str) -> str:
    if name in ("CPU", "GPU", "memory", "object_store_memory"):
        raise ValueError(f"{name} is not a custom resource; write the keys for processors beside resources")
    return name


# Names that nodes of a Ray cluster were given, and how much of each one process takes: where it may be placed.
Resources = dict[Annotated[str, Field(min_length=1), AfterValidator(_custom)], Annotated[float, Field(gt=0)]]


class Spec(BaseModel):
    """A frozen piece of the configuration tree that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
