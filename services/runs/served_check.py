"""Holds what the actors serve against what the learner trained: log-probs of a few tokens, from both."""

import json
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from ray.exceptions import ObjectLostError

from actors.config import GenerateRequest
from services.data.tokens import EncodedPrompt
from services.evaluation.fetch import fetched
from volley.errors import ServedWeightsDiffer
from volley.job import RLJob
from volley.model import ModelSpec
from volley.records import Group
from volley.refs import Ref

PROBE_GROUP = -1  # not a group of the run: no ledger counts it
PROBE_SAMPLES, PROBE_TOKENS = 4, 16
# Mean difference of a log-prob in nats. Correct engines stay a tenth of it or more below; wrong weights are nats off.
TOLERANCE = {"float32": 0.01, "bfloat16": 0.15}


class Probed(Protocol):
    """`actors.pool.ActorPool`."""

    async def probe(self, request: GenerateRequest) -> Mapping[str, Ref[Group]]: ...


class Scoring(Protocol):
    """`learner.pool.LearnerPool`."""

    async def score(self, group: Ref[Group]) -> NDArray[np.float32]: ...


async def check_served(actors: Probed, learner: Scoring, job: RLJob, prompt: EncodedPrompt) -> float | None:
    """Let every actor generate a few tokens after ``prompt``, and compare its log-probs with the learner's.

    Actors and learner must hold the same version, and keep it meanwhile.

    Returns:
        The largest difference of a log-prob, in nats; None if no actor could be checked, as while none serves.

    Raises:
        ServedWeightsDiffer: an actor's log-probs are not the learner's.
    """
    request = GenerateRequest(
        group_id=PROBE_GROUP,
        prompt_id=prompt.prompt.id,
        prompt_p=prompt.tokens_p,
        n=min(PROBE_SAMPLES, job.sampling.n),
        temperature=job.sampling.temperature,
        top_p=1.0,
        max_tokens=min(PROBE_TOKENS, job.sampling.max_tokens),
        seed=0,  # so that the run's own samples stay what they would have been
    )
    largest: float | None = None
    for actor, ref in (await actors.probe(request)).items():
        try:
            group: Group = await fetched(ref)
        except ObjectLostError:  # the actor's node has just died
            continue
        difference_T = np.abs(group.logprobs_T - await learner.score(ref))
        difference = float(difference_T.mean())
        if not difference <= TOLERANCE[job.model.dtype]:  # NaN is a difference too
            raise ServedWeightsDiffer(_explain(actor, difference, job.model))
        largest = max(largest or 0.0, float(difference_T.max()))
    return largest


def _explain(actor: str, difference: float, model: ModelSpec) -> str:
    kind = json.loads((model.folder / "config.json").read_text()).get("model_type", "unknown")
    return (
        f"{actor} does not serve what the learner trained: after an update its log-probs differ by {difference:.3g} on "
        f"average, and {model.dtype} allows {TOLERANCE[model.dtype]:g}, so training would go wrong silently. Either "
        f"this vLLM loads weights of models of type {kind} wrongly into a running engine, or actors.engine changes "
        "what it computes (quantisation, for example): drop such options, or take another type of model"
    )
