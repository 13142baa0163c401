"""What a job asks for: evaluations and checkpoints at which step, and which samples of a group."""

import numpy as np

from actors.config import GenerateRequest
from services.tokens import EncodedPrompt
from volley.job import RLJob


def evaluates_at(job: RLJob, version: int) -> bool:
    """Is an evaluation of this version due?"""
    plan = job.evaluation
    if plan is None:
        return False
    if version == 0:
        return plan.at_start
    return version == job.steps or (plan.every is not None and version % plan.every == 0)


def owes_evaluation(job: RLJob, version: int, *, made: bool) -> bool:
    """Does a run that begins with this version begin with an evaluation? ``made``: not of what was due before."""
    return not made and (version > 0 or evaluates_at(job, 0))


def saves_at(job: RLJob, version: int) -> bool:
    """Is a checkpoint due after so many steps? There is one at the end in any case."""
    every = job.checkpoint.every
    return every is not None and version % every == 0


def longest_silence(job: RLJob, turns: int) -> float:
    """Seconds in which a group of ``turns`` turns becomes ready, even if who works on it dies first and is replaced."""
    roles = (job.actors, job.reward_workers)
    return round(sum(turns * role.group_deadline_s + role.start_deadline_s for role in roles), 3)


def request_of(job: RLJob, group_id: int, encoded: EncodedPrompt) -> GenerateRequest:
    """The group that is to be trained on."""
    sampling = job.sampling
    return GenerateRequest(
        group_id=group_id,
        prompt_id=encoded.prompt.id,
        prompt_p=encoded.tokens_p,
        n=sampling.n,
        temperature=sampling.temperature,
        top_p=1.0,
        max_tokens=sampling.max_tokens,
        seed=_group_seed(job.seed, group_id) if sampling.seeded else None,
    )


def _group_seed(seed: int, group_id: int) -> int:
    return int(np.random.SeedSequence([seed, group_id]).generate_state(1)[0])
