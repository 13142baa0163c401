"""The model of a job."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from volley.base import Spec
from volley.hub import hub_model
from volley.lora import LoraSpec


class ModelSpec(Spec):
    """A causal language model in Hugging Face format."""

    path: Path | None = Field(None, description="folder with config.json, safetensors weights and a tokenizer")
    hub: str | None = Field(None, description="name on the Hugging Face hub in place of a folder: Qwen/Qwen3-0.6B")
    revision: str | None = Field(
        None, description="commit, tag or branch of the hub model; a run resumes exactly if it is a commit"
    )
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: LoraSpec | None = Field(None, description="train adapters; null trains the whole model")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.hub is None):
            raise ValueError("set either path, to a folder, or hub, to a name such as Qwen/Qwen3-0.6B")
        if self.hub is None and self.revision is not None:
            raise ValueError("revision needs hub: a local folder has no revisions")
        return self

    @property
    def folder(self) -> Path:
        """Where the model is on this host; a hub model that is not there yet is downloaded.

        Raises:
            JobError: the hub has no such model, or cannot be reached.
        """
        return self.path if self.path is not None else hub_model(str(self.hub), self.revision)

    @property
    def name(self) -> str:
        """Its name on the hub, or that of its folder."""
        return self.hub or self.folder.name
