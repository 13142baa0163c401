"""Records that pass between processes: frozen, columnar and small.

Shape suffixes: ``_n`` samples of a group; ``_T`` tokens of all samples of a group, end to end; ``_p`` prompt tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from volley.refs import Ref

NO_ANSWER = -1


class VerdictStatus(StrEnum):
    """The outcome of scoring one sample."""

    PASSED = "passed"  # entirely correct
    WRONG_ANSWER = "wrong_answer"  # ran and answered, but not entirely correctly
    NO_ANSWER = "no_answer"  # nothing in the sample could be scored
    COMPILE_ERROR = "compile_error"  # the sample's program does not parse
    RUNTIME_ERROR = "runtime_error"  # the sample's program failed
    TIMEOUT = "timeout"  # the sample's program exceeded its time limit
    MEMORY_LIMIT = "memory_limit"  # ... its memory limit
    OUTPUT_LIMIT = "output_limit"  # ... its output limit
    SECURITY_VIOLATION = "security_violation"  # the sample's program tried something the sandbox forbids
    INFRA_ERROR = "infra_error"  # the scorer itself failed; no reward
    REFUSED = "refused"  # nothing ran, because the sandbox no longer passes its own checks; no reward

    @property
    def bears_reward(self) -> bool:
        """False for the two statuses that say nothing about the sample, which is then dropped from its group."""
        return self not in (VerdictStatus.INFRA_ERROR, VerdictStatus.REFUSED)


STATUSES: tuple[VerdictStatus, ...] = tuple(VerdictStatus)
STATUS_CODE: Mapping[VerdictStatus, int] = {status: code for code, status in enumerate(STATUSES)}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a dataset.

    Attributes:
        id: unique within its dataset; ``<file stem>:<line>`` if the row has no id.
        text: the prompt as the model gets it.
        reference: the row's other fields, for the scorer: tests, expected answer, numbers and target ...
        tags: values to break evaluations down by, such as ``{"level": "5"}``.
    """

    id: str
    text: str
    reference: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one sample. ``reward`` is None exactly when the status bears no reward."""

    status: VerdictStatus
    reward: float | None
    answer: str | None = None  # the extracted answer; equal answers vote together in maj@k
    detail: str = ""  # one line of explanation
    failing_test: int | None = None
    cpu_ms: float | None = None
    wall_ms: float | None = None
    peak_mb: float | None = None
    stdout: str = ""  # truncated and escaped
    stderr: str = ""
    unsafe: bool = False  # scored without isolation
    weak_oracle: bool = False  # the sample's own code could have influenced the check
    rank: float | None = None  # the score by which best_of_k picks one of k samples
    mistake: str = ""  # of the user's scorer function: kind and line of a programming error that it raised

    def __post_init__(self) -> None:
        if self.status.bears_reward != (self.reward is not None):
            raise ValueError(f"a verdict {self.status} must {'' if self.status.bears_reward else 'not '}carry a reward")
        if self.rank is not None and not math.isfinite(self.rank):
            raise ValueError(f"a rank is a finite number, got {self.rank}")


def _no_tokens() -> NDArray[np.int32]:
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One call of the model within an episode, as it is shown to users.

    Attributes:
        context: the text that the call put behind what the model had seen and sampled before.
        answer: what the model sampled, without the token that ended it.
        observed: tokens of ``context``.
        tokens: tokens of ``answer``, with the one that ended it.
        seconds: how long sampling took.
    """

    context: str
    answer: str
    observed: int
    tokens: int
    seconds: float


def calls_column(group: "Group", sample: int) -> dict[str, list[dict[str, object]]]:
    """The calls of a sample as a column of its row in ``samples.jsonl``; {} if no program made it."""
    return {"calls": [asdict(call) for call in group.calls[sample]]} if group.calls else {}


@dataclass(frozen=True, slots=True)
class Group:
    """The n samples of one prompt, as an actor generated them.

    Attributes:
        group_id: admission number within the run, from 0.
        prompt_id: the prompt's id.
        prompt_p: int32 [p], prompt token ids.
        tokens_T: int32 [T], token ids of all samples end to end; a sample that stopped ends with its stop token.
        logprobs_T: float32 [T], log-probability of each token under the weights and sampling it was drawn with.
        versions_T: int32 [T], version of the weights each token was sampled with.
        lengths_n: int32 [n], tokens per sample; sums to T.
        stopped_n: bool [n], False for samples cut at the length limit.
        texts: n decoded samples without stop tokens; with several turns the last turn, which is what is scored.
        actor: name of the actor that generated it.
        seconds: wall time from request to last token.
        observation_S: int32 [S], tokens that samples observed between turns, in the order of the samples. They are
            context: without log-prob or version, and not counted in any length.
        observation_at_S: int32 [S], non-decreasing: the index in ``tokens_T`` each of them is placed before.
        earlier: per sample the text of all turns before the last with their observations; () if no sample has more
            than one turn.
        calls: per sample the calls of the model that made it; () unless programs made the samples.
    """

    group_id: int
    prompt_id: str
    prompt_p: NDArray[np.int32]
    tokens_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    versions_T: NDArray[np.int32]
    lengths_n: NDArray[np.int32]
    stopped_n: NDArray[np.bool_]
    texts: tuple[str, ...]
    actor: str
    seconds: float
    observation_S: NDArray[np.int32] = field(default_factory=_no_tokens)
    observation_at_S: NDArray[np.int32] = field(default_factory=_no_tokens)
    earlier: tuple[str, ...] = ()
    calls: tuple[tuple["ModelCall", ...], ...] = ()

    @property
    def n(self) -> int:
        return len(self.lengths_n)

    @property
    def turns(self) -> int:
        """Turns of all samples together; each place with an observation within a sample separates two turns."""
        starts_n = np.cumsum(self.lengths_n) - self.lengths_n
        return self.n + len(np.setdiff1d(self.observation_at_S, starts_n))

    def meta(self) -> "GroupMeta":
        """The part of the group the coordinator sees."""
        return GroupMeta(
            group_id=self.group_id,
            prompt_id=self.prompt_id,
            actor=self.actor,
            n=self.n,
            prompt_tokens=len(self.prompt_p),
            sample_tokens=len(self.tokens_T),
            logprob_sum=float(self.logprobs_T.sum(dtype=np.float64)),
            oldest_version=int(self.versions_T.min()) if len(self.versions_T) else 0,
            newest_version=int(self.versions_T.max()) if len(self.versions_T) else 0,
            truncated=int((~self.stopped_n).sum()),
            seconds=self.seconds,
            turns=self.turns,
            cut=tuple(np.flatnonzero(~self.stopped_n).tolist()),
        )


@dataclass(frozen=True, slots=True)
class GroupMeta:
    """A group without its arrays. It is passed by value, while the arrays stay in the object store.

    Attributes:
        oldest_version, newest_version: of the sample tokens; 0 without any.
        cut: which samples were cut at the length limit, by index.
    """

    group_id: int
    prompt_id: str
    actor: str
    n: int
    prompt_tokens: int
    sample_tokens: int
    logprob_sum: float
    oldest_version: int
    newest_version: int
    truncated: int
    seconds: float
    turns: int
    cut: tuple[int, ...] = ()

    def is_stale(self, oldest: int) -> bool:
        """Whether it has a sample token older than version ``oldest``."""
        return self.sample_tokens > 0 and self.oldest_version < oldest


@dataclass(frozen=True, slots=True)
class Scores:
    """The verdicts of one group as columns.

    Attributes:
        rewards_n: float64 [n]; NaN where the verdict bears no reward.
        status_n: uint8 [n], index into ``STATUSES``.
        answers_n: int32 [n], equal for samples with equal extracted answers; ``NO_ANSWER`` without an answer.
        ranks_n: float64 [n]; NaN where the scorer gave no rank.
        verdicts: the n verdicts themselves, for the sample log and the dashboard.
        seconds: wall time of scoring the group.
        worker: name of the reward worker.
    """

    rewards_n: NDArray[np.float64]
    status_n: NDArray[np.uint8]
    answers_n: NDArray[np.int32]
    ranks_n: NDArray[np.float64]
    verdicts: tuple[Verdict, ...]
    seconds: float
    worker: str

    @property
    def valid_n(self) -> NDArray[np.bool_]:
        """bool [n], False for samples to drop from the group."""
        return ~np.isnan(self.rewards_n)

    @classmethod
    def pack(cls, verdicts: Sequence[Verdict], *, seconds: float = 0.0, worker: str = "") -> "Scores":
        """The columns of ``verdicts``, in order."""
        ids: dict[str, int] = {}
        answers = [NO_ANSWER if v.answer is None else ids.setdefault(v.answer, len(ids)) for v in verdicts]
        return cls(
            rewards_n=np.array([np.nan if v.reward is None else v.reward for v in verdicts], dtype=np.float64),
            status_n=np.array([STATUS_CODE[v.status] for v in verdicts], dtype=np.uint8),
            answers_n=np.array(answers, dtype=np.int32),
            ranks_n=np.array([np.nan if v.rank is None else v.rank for v in verdicts], dtype=np.float64),
            verdicts=tuple(verdicts),
            seconds=seconds,
            worker=worker,
        )


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One process of a role, as reported by its pool.

    Attributes:
        name: such as ``actor-0``.
        state: ``starting``, ``serving`` or ``draining``.
        pid: process id; 0 while unknown.
        version: version of the weights an actor serves.
        busy: samples in flight on an actor, or groups on a reward worker.
    """

    name: str
    state: Literal["starting", "serving", "draining"]
    pid: int = 0
    version: int | None = None
    busy: int = 0


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """One piece of a set of weights.

    Attributes:
        ref: uint8 arrays in the object store that form one safetensors file when laid end to end; None while only the
            weight group has carried them, or the learner lends them.
        nbytes: size of that file.
        lent: path of a file in the learner's memory, for an engine that uses the same device: a safetensors file, or
            the header of `volley.gpu_handles`. "" if the learner does not lend it.
    """

    ref: Ref[tuple[NDArray[np.uint8], ...]] | None
    nbytes: int
    lent: str = ""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One version of the weights, as published by the learner.

    Attributes:
        version: the version.
        buckets: the weights, in the order they must be loaded.
        checksum: `volley.checksum.weights_checksum`; None if verification is off.
        gather_seconds: time the learner took to gather and deliver the weights.
        received: actors that already have all of it through the weight group.
        lost_group: the weight group that ended with this version because it lost a member.
        lender: the Ray node on which engines can read what the learner lends.
    """

    version: int
    buckets: tuple[WeightBucket, ...]
    checksum: str | None
    gather_seconds: float
    received: frozenset[str] = frozenset()
    lost_group: str | None = None
    lender: str = ""

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def stored(self) -> bool:
        """Whether all of it is in the object store."""
        return all(bucket.ref is not None for bucket in self.buckets)

    @property
    def lent(self) -> bool:
        """Whether engines on the learner's device are to load it from the learner's memory, before it sleeps."""
        return any(bucket.lent for bucket in self.buckets)

    def taken_back(self) -> "WeightUpdate":
        """The update once the learner no longer lends it."""
        return replace(self, buckets=tuple(replace(bucket, lent="") for bucket in self.buckets))
