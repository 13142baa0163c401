"""Code and settings that Ray ships to a run's processes."""

import re
from typing import Self

from pydantic import Field, model_validator

from volley.base import Spec

_SECRET = re.compile(r"(^|_)(key|token|secret|passw(or)?d|pwd|auth|credentials?)(_|$)", re.IGNORECASE)


class RuntimeEnvSpec(Spec):
    """Ray's runtime environment for actors, reward workers and learner ranks.

    Ray ships folders from the driver's machine; each node fetches URIs such as ``https://host/code.zip`` or
    ``s3://bucket/code.zip``.
    """

    working_dir: str | None = Field(None, description="folder or zip URI; the processes' working directory")
    py_modules: tuple[str, ...] = Field((), description="package folders or zip URIs, importable by name")
    pip: tuple[str, ...] = Field((), description="requirements to install on each node")
    env_vars: dict[str, str] = Field(default_factory=dict, description="no secrets: run records are not private")

    @model_validator(mode="after")
    def _holds_no_secret(self) -> Self:
        for name in self.env_vars:
            if _SECRET.search(name):
                raise ValueError(
                    f"env_vars.{name} looks like a secret, but run records are not private: set it in the environment "
                    "of the cluster's nodes"
                )
        for text in (*self.places, *self.pip):
            if re.search(r"://[^/\s]*@", text):
                raise ValueError("a URI contains a user name or password: use one without, or install the code instead")
        return self

    @property
    def places(self) -> tuple[str, ...]:
        """Folders and URIs of code."""
        return (*((self.working_dir,) if self.working_dir else ()), *self.py_modules)

    @property
    def comes_later(self) -> bool:
        """True if some code only reaches the run's processes, so that it cannot be checked beforehand."""
        return bool(self.pip) or any("://" in place for place in self.places)
