"""Configuration of metric sinks: one union, discriminated on ``kind``.

``metrics.jsonl`` is always written, and the service serves ``/metrics`` to Prometheus; neither is a sink.
"""

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from volley.base import Spec


class TensorBoardSink(Spec):
    """Event files for TensorBoard."""

    kind: Literal["tensorboard"] = "tensorboard"
    path: Path | None = Field(
        None, description="folder with one subfolder per run; null: tensorboard/ in the run folder"
    )


class WandbSink(Spec):
    """A Weights & Biases run. ``mode: online`` reads WANDB_API_KEY from the driver's environment."""

    kind: Literal["wandb"] = "wandb"
    project: str = Field("volley", min_length=1, max_length=128)
    entity: str | None = Field(None, description="user or team; null: the key's owner")
    mode: Literal["offline", "online"] = Field(
        "offline", description="offline: files in the run folder, for `wandb sync`"
    )
    group: str | None = Field(None, description="runs with equal groups are shown together")
    tags: tuple[str, ...] = ()


class MLflowSink(Spec):
    """An MLflow run. Reads MLFLOW_TRACKING_USERNAME and _PASSWORD from the driver's environment."""

    kind: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = Field(
        None, description="http(s)://host or file:///folder; null: mlruns/ in the run folder"
    )
    experiment: str = Field("volley", min_length=1)

    @field_validator("tracking_uri")
    @classmethod
    def _uri_fits(cls, uri: str | None) -> str | None:
        if uri is None:
            return None
        if urlsplit(uri).scheme not in ("http", "https", "file", "databricks", "sqlite", "postgresql", "mysql"):
            raise ValueError("write http://host:port, https://host, or file:///absolute/path of a folder")
        if "@" in urlsplit(uri).netloc:
            raise ValueError(
                "contains a secret, but run records are not private: set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD in the driver's environment"
            )
        return uri


SinkSpec = Annotated[TensorBoardSink | WandbSink | MLflowSink, Field(discriminator="kind")]
