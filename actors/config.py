"""What an actor is told and what it reports. Light: importable without Ray, torch or vLLM."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from volley.job import ActorsSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class ActorConfig:
    """Everything the actors of one run share.

    Attributes:
        model: the model every engine loads before the first weight update; it is version 0.
        actors: counts, resources, engine options and deadlines.
        max_model_len: longest prompt plus sample in tokens; None takes it from the model's configuration.
        seed: actor i samples from ``seed + i``.
        log_dir: actor i and its engine write ``actor-<i>.log`` here.
        max_replacements: actors that may die within an hour and be replaced; one more fails the pool.
        hang_deadline_s: an actor that gives no sign of life for so long is killed; longer than any step of its engine
            and than loading weights.
        verify: recompute the checksum of each set of weights that carries one before serving it.
    """

    model: ModelSpec
    actors: ActorsSpec
    max_model_len: int | None
    seed: int
    log_dir: Path
    verify: bool = False
    max_replacements: int = 0
    hang_deadline_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Shown:
    """What the samples of a group are shown, to go on after it.

    Attributes:
        group: refers to the group as it is.
        tokens: int32 arrays, one a sample; None for samples that have ended.
        texts: the same as texts.
    """

    group: Any
    tokens: tuple[NDArray[np.int32] | None, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One group to generate.

    Attributes:
        group_id: admission number within the run.
        prompt_id: the prompt's id.
        prompt_p: int32 [p], prompt token ids, special tokens included.
        n: samples to draw.
        temperature: divides the logits; the recorded log-probs are those after the division.
        top_p: nucleus; 1 keeps the whole distribution.
        max_tokens: length limit of one sample.
        seed: makes the group's samples a function of weights and seed; None is faster.
        after: the turns there are already; None for the first one.
    """

    group_id: int
    prompt_id: str
    prompt_p: NDArray[np.int32]
    n: int
    temperature: float
    top_p: float
    max_tokens: int
    seed: int | None = None
    after: "Shown | None" = None


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """What a started actor is.

    Attributes:
        name: ``actor-<i>``.
        pid: its process.
        engine_pids: the processes of its vLLM engine.
        max_model_len: longest prompt plus sample in tokens.
        vocab_size: token ids are below it.
        start_seconds: from process start to the first sample drawn.
        model_processes: those of its engine that hold a part of the model.
    """

    name: str
    pid: int
    engine_pids: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    start_seconds: float
    model_processes: int = 1


@dataclass(frozen=True, slots=True)
class ActorUpdate:
    """One actor's receipt of one set of weights.

    Attributes:
        actor: its name.
        version: what it serves from here on.
        nbytes: bytes received.
        fetch_seconds: bringing the weights next to the engine, while it generates.
        load_seconds: loading them, part of the stall.
        stall_seconds: how long generation stood still.
        grouped: they came over the weight group, not from the object store.
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
    """One set of weights received by every actor."""

    version: int
    actors: tuple[ActorUpdate, ...]
    seconds: float

    @property
    def nbytes(self) -> int:
        return sum(update.nbytes for update in self.actors)

    @property
    def stall_seconds(self) -> float:
        """The longest time any one actor's generation stood still."""
        return max((update.stall_seconds for update in self.actors), default=0.0)
