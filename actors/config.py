"""What actors receive and report. Imports neither Ray, torch nor vLLM."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from actors.gateway.session import Limits
from volley.errors import JobError
from volley.gateway import GatewaySpec
from volley.job import ActorsSpec
from volley.model import ModelSpec
from volley.records import Group
from volley.refs import Ref


@dataclass(frozen=True, slots=True)
class ActorConfig:
    """Settings that all actors of a run share.

    Attributes:
        model: the model every engine loads at start, version 0.
        actors: counts, resources, engine options, deadlines.
        max_model_len: longest prompt plus sample, in tokens; None takes it from the model's configuration.
        seed: actor i samples with ``seed + i``.
        log_dir: actor i and its engine log to ``actor-<i>.log`` in this folder.
        verify: before serving weights that carry a checksum, recompute it.
        gateway: how programs call the model; None without programs.
        sleeps: engines must be able to give back the memory of a GPU.
    """

    model: ModelSpec
    actors: ActorsSpec
    max_model_len: int | None
    seed: int
    log_dir: Path
    verify: bool = False
    gateway: GatewaySpec | None = None
    sleeps: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """What the samples of a group observe before their next turn.

    Attributes:
        group: reference to the group with the turns so far.
        tokens: one int32 array per sample; None for samples that have ended.
        texts: the observations as text, one per sample.
    """

    group: Ref[Group]
    tokens: tuple[NDArray[np.int32] | None, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A group to generate, or one more turn of it.

    Attributes:
        group_id: admission number within the run.
        prompt_id: the prompt's id.
        prompt_p: int32 [p], prompt token ids, special tokens included.
        n: number of samples.
        temperature: sampling temperature; the recorded log-probs are those of the tempered distribution.
        top_p: nucleus sampling; 1 keeps the whole distribution.
        max_tokens: length limit of one turn of a sample.
        seed: with a seed, equal weights give equal samples; None is faster.
        after: the turns so far and what the samples observe next; None for the first turn.
    """

    group_id: int
    prompt_id: str
    prompt_p: NDArray[np.int32]
    n: int
    temperature: float
    top_p: float
    max_tokens: int
    seed: int | None = None
    after: Observation | None = None


@dataclass(frozen=True, slots=True)
class EpisodesRequest:
    """The n episodes of a group, which programs are about to run. Fields as in `GenerateRequest`.

    Attributes:
        limits: what each episode may use.
    """

    group_id: int
    prompt_id: str
    n: int
    temperature: float
    top_p: float
    limits: Limits
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class OpenedSessions:
    """Where the episodes of a group find the model.

    Attributes:
        url: the base URL for OpenAI's clients.
        keys: the API key of each episode.
    """

    url: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """A started actor.

    Attributes:
        name: ``actor-<i>``.
        pid: process id of the actor.
        engine_pids: process ids of its vLLM engine.
        max_model_len: longest prompt plus sample, in tokens.
        vocab_size: every token id is below it.
        start_seconds: from the start of the process to its first sample.
        model_processes: number of engine processes that hold a part of the model.
    """

    name: str
    pid: int
    engine_pids: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    start_seconds: float
    model_processes: int = 1

    def check(self, request: GenerateRequest) -> None:
        """Raise `JobError` if the actor's model cannot take the prompt."""
        length = len(request.prompt_p)
        if not 0 < length < self.max_model_len:
            raise JobError(
                f"prompt {request.prompt_id!r} has {length} tokens, but the model takes 1 to "
                f"{self.max_model_len - 1}: change it or remove it from the data"
            )
        if (token := int(request.prompt_p.max())) >= self.vocab_size:
            raise JobError(
                f"prompt {request.prompt_id!r} contains token {token}, but the model has only {self.vocab_size} "
                "tokens: model.path has the tokenizer of another model"
            )


@dataclass(frozen=True, slots=True)
class ActorUpdate:
    """One actor's switch to a new version of the weights.

    Attributes:
        actor: its name.
        version: the version it serves from now on.
        nbytes: bytes received.
        fetch_seconds: time to bring the weights to the engine, while it generates.
        load_seconds: time to load them; part of the stall.
        stall_seconds: time for which generation was paused.
        grouped: True if they came through the weight group, False if from the object store.
    """

    actor: str
    version: int
    nbytes: int
    fetch_seconds: float
    load_seconds: float
    stall_seconds: float
    grouped: bool = False


@dataclass(frozen=True, slots=True)
class BroadcastReport:
    """One version of the weights received by all actors, and the seconds that took."""

    version: int
    actors: tuple[ActorUpdate, ...]
    seconds: float

    @property
    def nbytes(self) -> int:
        return sum(update.nbytes for update in self.actors)

    @property
    def stall_seconds(self) -> float:
        """The longest pause of any actor's generation."""
        return max((update.stall_seconds for update in self.actors), default=0.0)
