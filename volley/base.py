"""The base of every configuration model: unknown keys refused, values frozen."""

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """A frozen piece of the configuration tree that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
