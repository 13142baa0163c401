"""The gateway: the OpenAI-compatible server in every actor, which the programs of a job call."""

from typing import Literal

from pydantic import Field

from volley.base import Spec


class GatewaySpec(Spec):
    """How the gateway answers. Sampling is always the job's, since its log-probs are trained on."""

    tool_parser: str | None = Field(
        None, min_length=1, description="vLLM's tool parser that fits the model: hermes ..."
    )
    reasoning_parser: str | None = Field(
        None, min_length=1, description="vLLM's reasoning parser: qwen3, deepseek_r1 ..."
    )
    sampling: Literal["strict", "override"] = Field(
        "strict",
        description="requests that ask for another temperature, seed ...: strict answers 400; override ignores it",
    )
