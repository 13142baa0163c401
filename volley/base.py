"""The base of every configuration model: it rejects unknown keys and freezes values."""

import warnings
from typing import Annotated, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

MOST_PROCESSES = 10_000  # of one role
MOST_AMOUNT = 1e9  # of a resource, for one process


def _custom(name: str) -> str:
    if name in ("CPU", "GPU", "memory", "object_store_memory"):
        raise ValueError(f"{name} is not a custom resource: use the keys for CPUs and GPUs beside resources")
    return name


_Amount = Annotated[float, Field(gt=0, le=MOST_AMOUNT)]
# Custom resources of a Ray cluster's nodes by name, and how much of each a process reserves: decides where it may run.
Resources = dict[Annotated[str, Field(min_length=1), AfterValidator(_custom)], _Amount]


class Spec(BaseModel):
    """A frozen part of the configuration that rejects unknown keys.

    Attributes:
        renamed_keys: keys of earlier releases that are rejected, each with its new name.
        deprecated_keys: keys of earlier releases that are still read, with a `FutureWarning`, each with its new name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    renamed_keys: ClassVar[dict[str, str]] = {}
    deprecated_keys: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _read_old_keys(cls, data: object) -> object:
        """Reject or translate keys of earlier releases."""
        if not isinstance(data, dict):
            return data
        for old, new in cls.renamed_keys.items():
            if old in data:
                raise ValueError(f"{old} was renamed: write {new}")
        for old, new in cls.deprecated_keys.items():
            if old in data and new in data:
                raise ValueError(f"{old} is the old name of {new}: remove {old}")
            if old in data:
                warnings.warn(f"{old} was renamed: write {new}", FutureWarning, stacklevel=2)
                data = {new if key == old else key: value for key, value in data.items()}
        return data


SpecT = TypeVar("SpecT", bound=Spec)


def replaced(spec: SpecT, **changes: object) -> SpecT:
    """A copy of ``spec`` with some fields changed and everything validated, which `model_copy` does not do.

    Raises:
        ValidationError: there is no such field, or the copy would not be valid.
    """
    fields = {name: getattr(spec, name) for name in spec.model_fields_set}
    return type(spec).model_validate({**fields, **changes})
