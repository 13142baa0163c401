"""Episodes: a program that calls the model as often as it likes makes one sample."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from volley.base import MOST_AMOUNT, MOST_PROCESSES, Resources, Spec
from volley.patterns import SERVER_URL, TARGET
from volley.scoring import RewardValues, SandboxSpec

PROGRAM_GRACE_S = 30.0  # for an environment worker to report after the last of a group's episodes has timed out
# A worker gets a group, which fits its room, while one more episode can start: the rest start when those running end.
EPISODES_IN_A_ROW = 2


class EpisodeRollout(Spec):
    """What all kinds of episodes have in common.

    ``sampling.n`` counts episodes, and ``sampling.max_tokens`` limits the sampled tokens of one, over all its calls.
    """

    values: RewardValues = Field(
        RewardValues(), description="passed: the reward from which a sample passed; failed: that of one that ran out"
    )
    max_calls: int = Field(16, ge=1, le=10_000, description="calls of the model per episode")
    max_context: int | None = Field(
        None, ge=2, description="longest prompt plus answer of a call in tokens; null: the model's length"
    )
    timeout_s: float = Field(600, gt=0, description="seconds per episode")
    on_rewrite: Literal["drop", "keep_longest"] = Field(
        "drop",
        description="episodes whose history was rewritten leave their group, or keep the longest part as sampled",
    )


class ProgramRollout(EpisodeRollout):
    """Your program makes the calls, through any client of OpenAI's API, and returns the reward."""

    kind: Literal["program"] = "program"
    target: str = Field(
        pattern=TARGET,
        description="package.module:function(row, base_url, api_key), `async def` or plain, or a class with a method "
        "run like it; returns a reward, a mapping with reward, answer and detail, or None to have the scorer judge the "
        "last answer",
    )
    python: str | None = Field(
        None,
        min_length=1,
        description="interpreter to run the program with, such as a virtual environment's, 3.10 or later; null: "
        "Volley's own",
    )

    @property
    def program(self) -> str:
        """What makes the calls, for messages."""
        return self.target


class VerifiersRollout(EpisodeRollout):
    """An environment for verifiers 0.4 makes the calls and returns the reward of its rubric."""

    kind: Literal["verifiers"] = "verifiers"
    python: str = Field(min_length=1, description="interpreter with verifiers, as `volley env create` prints it")
    taskset: dict[str, Any] = Field(description="id of the taskset, and fields of its configuration")
    agent: dict[str, Any] = Field(
        default_factory=dict,
        description="fields of the agent's configuration, such as harness or max_turns; without a harness or a runtime "
        "a chat with the taskset's tools, as a subprocess",
    )

    @property
    def program(self) -> str:
        """What makes the calls, for messages."""
        return f"verifiers taskset {self.taskset['id']}"

    @model_validator(mode="after")
    def _names_a_taskset(self) -> Self:
        if not isinstance(self.taskset.get("id"), str) or not self.taskset["id"]:
            raise ValueError("taskset.id: required, but missing: write taskset: {id: PACKAGE}")
        return self


class OpenEnvRollout(EpisodeRollout):
    """A server of OpenEnv 0.10 is the environment: it answers what the model does, and gives the rewards."""

    kind: Literal["openenv"] = "openenv"
    python: str = Field(min_length=1, description="interpreter with openenv, as `volley env create` prints it")
    app: str | None = Field(
        None,
        pattern=TARGET,
        description="package.module:app, the environment's server; each environment worker starts one on its loopback "
        "interface",
    )
    url: str | None = Field(None, pattern=SERVER_URL, description="a server that runs already, in place of app")
    reset: dict[str, Any] = Field(
        default_factory=dict, description="arguments of every reset; those in a row's `reset` are added"
    )
    action: str | None = Field(
        None,
        min_length=1,
        description="field of an action that takes the model's answer; null: the model calls the environment's tools, "
        "or, where it has none, a tool `step` with the fields of an action",
    )
    observation: str | None = Field(
        None, min_length=1, description="field of observations that the model sees; null: all of them, as JSON"
    )
    system: str | None = Field(None, description="system message before the row's prompt")
    reward: Literal["sum", "last", "none"] = Field(
        "sum",
        description="of an episode: sum of its steps' rewards, the last one, or none: the scorer judges",
    )

    @property
    def program(self) -> str:
        """What makes the calls, for messages."""
        return f"OpenEnv server {self.app or self.url}"

    @model_validator(mode="after")
    def _has_one_server(self) -> Self:
        if (self.app is None) == (self.url is None):
            raise ValueError(
                "app and url exclude each other, and one is required: write app: package.module:app to have the server "
                "started, or url: http://HOST:PORT of one that runs"
            )
        return self


class PythonTool(Spec):
    """The tool `python`: runs the model's code in the sandbox and answers with what it printed."""

    kind: Literal["python"] = "python"
    state: Literal["none", "episode"] = Field(
        "none", description="each call is a program of its own, or an episode's calls share an interpreter"
    )
    slots: int = Field(
        2,
        ge=1,
        le=256,
        description="programs that an environment worker runs at once; with state, one for each of its episodes",
    )
    sandbox: SandboxSpec = SandboxSpec()


class FunctionTool(Spec):
    """Your own trusted function as a tool: its signature becomes the schema, its docstring the description."""

    kind: Literal["function"] = "function"
    target: str = Field(pattern=TARGET, description="package.module:function, `async def` or plain, with types")
    timeout_s: float = Field(30, gt=0, description="seconds per call")


ToolSpec = Annotated[PythonTool | FunctionTool, Field(discriminator="kind")]


class ToolsRollout(EpisodeRollout):
    """The model may call tools until it answers without a call; the job's scorer judges that answer."""

    kind: Literal["tools"] = "tools"
    tools: tuple[ToolSpec, ...] = Field(min_length=1, description="what the model may call")
    system: str | None = Field(None, description="system message before the row's prompt")
    max_tool_calls: int = Field(64, ge=1, le=100_000, description="tool calls per episode; further ones are refused")
    max_output: int = Field(
        4000, ge=100, description="characters of an answer of a tool; longer ones lose their middle"
    )

    @property
    def program(self) -> str:
        """What makes the calls, for messages."""
        return "tools"

    @model_validator(mode="after")
    def _tools_differ(self) -> Self:
        names = [tool.target.partition(":")[2] if isinstance(tool, FunctionTool) else "python" for tool in self.tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tools have the name {twice[0]}: rename the function of one, or remove it")
        return self


Rollout = Annotated[ProgramRollout | VerifiersRollout | OpenEnvRollout | ToolsRollout, Field(discriminator="kind")]


def check_tools(rollout: Rollout, *, scored: bool, parser: str | None, chat: bool, episodes: int) -> None:
    """Reject a job whose episodes lack what tools or rewards need.

    Args:
        scored: the job has a scorer.
        parser: ``gateway.tool_parser``.
        chat: the job's data is rendered with the chat template.
        episodes: ``environment_workers.episodes``.

    Raises:
        ValueError: names the change to make.
    """
    if isinstance(rollout, OpenEnvRollout):
        _check_openenv(rollout, scored=scored, parser=parser)
    if not isinstance(rollout, ToolsRollout):
        return
    if not scored:
        raise ValueError("scorer: required with rollout kind: tools, where it judges the last answer, but missing")
    if parser is None:
        raise ValueError(
            "rollout kind: tools needs a parser for the model's tool calls: write gateway: {tool_parser: hermes}, or "
            "the name that vLLM has for the model's format"
        )
    if chat:
        raise ValueError(
            "data.chat and rollout kind: tools would both render the chat template: remove data.chat; a system message "
            "belongs in rollout.system"
        )
    for tool in rollout.tools:
        if isinstance(tool, PythonTool) and tool.state == "episode" and tool.slots < episodes:
            raise ValueError(
                f"the tool python with state: episode needs a slot for each of a worker's {episodes} episodes: write "
                f"slots: {episodes}, or environment_workers: {{episodes: {tool.slots}}}"
            )


def _check_openenv(rollout: OpenEnvRollout, *, scored: bool, parser: str | None) -> None:
    if rollout.reward == "none" and not scored:
        raise ValueError("scorer: required with rollout reward: none, where it judges the last answer, but missing")
    if rollout.action is None and parser is None:
        raise ValueError(
            "rollout kind: openenv without action needs a parser for the model's tool calls: write "
            "gateway: {tool_parser: hermes}, or action: FIELD if the model's answers are the actions"
        )


class EnvironmentWorkersSpec(Spec):
    """The processes that run programs."""

    count: int = Field(1, ge=1, le=MOST_PROCESSES)
    max_count: int | None = Field(
        None, ge=1, le=MOST_PROCESSES, description="autoscaling limit while groups wait for a worker; null disables it"
    )
    episodes: int = Field(64, ge=1, description="episodes that a worker runs at once")
    cpus: float = Field(0.1, ge=0, le=MOST_AMOUNT)
    resources: Resources = Field(default_factory=dict, description="custom Ray resources per worker")
    max_replacements: int = Field(20, ge=0, description="limit on workers replaced within an hour")
    start_deadline_s: float = Field(60, gt=0)
