"""What a job asks Ray to bring to the processes of its run, besides what is installed there."""

import re
from typing import Self

from pydantic import Field, model_validator

from volley.base import Spec

_SECRET = re.compile(r"(^|_)(key|token|secret|passw(or)?d|pwd|auth|credentials?)(_|$)", re.IGNORECASE)


class RuntimeEnvSpec(Spec):
    """Code and settings for actors, reward workers and learner ranks, by Ray's runtime environment.

    Folders are read where the run's driver is, and Ray ships them; a URI such as ``https://host/code.zip`` or
    ``s3://bucket/code.zip`` is fetched by each node.
    """

    working_dir: str | None = Field(None, description="folder or zip URI; the processes' current folder")
    py_modules: tuple[str, ...] = Field((), description="package folders or zip URIs, importable by name")
    pip: tuple[str, ...] = Field((), description="requirements installed on each node, beside what is there")
    env_vars: dict[str, str] = Field(default_factory=dict, description="no secrets: run records are read by many")

    @model_validator(mode="after")
    def _holds_no_secret(self) -> Self:
        for name in self.env_vars:
            if _SECRET.search(name):
                raise ValueError(
                    f"env_vars.{name} looks like a secret, and run records are read by many: set it in the environment "
                    "of the cluster's nodes"
                )
        for text in (*self.places, *self.pip):
            if re.search(r"://[^/\s]*@", text):
                raise ValueError("a URI here holds a user's name or password: give one without, or install it instead")
        return self

    @property
    def places(self) -> tuple[str, ...]:
        """Folders and URIs of code."""
        return (*((self.working_dir,) if self.working_dir else ()), *self.py_modules)

    @property
    def comes_later(self) -> bool:
        """Is there code that only the run's processes will have, so that it can not be checked before?"""
        return bool(self.pip) or any("://" in place for place in self.places)
