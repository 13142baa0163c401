"""What the job plans: evaluations and checkpoints, and how each group is sampled."""

import numpy as np

from actors.config import GenerateRequest
from services.coordinator.turns import ATTEMPTS
from services.data.tokens import EncodedPrompt
from volley.job import RLJob
from volley.rollout import EPISODES_IN_A_ROW, PROGRAM_GRACE_S


def evaluates_at(job: RLJob, version: int) -> bool:
    """Whether an evaluation of this version is due."""
    plan = job.evaluation
    if plan is None:
        return False
    if version == 0:
        return plan.at_start
    return version == job.steps or (plan.every is not None and version % plan.every == 0)


def starts_with_evaluation(job: RLJob, version: int, *, evaluated: bool) -> bool:
    """Whether a run that starts at ``version`` first evaluates it.

    Args:
        evaluated: the evaluation of this version was made, or none was due when the run stopped.
    """
    return not evaluated and (version > 0 or evaluates_at(job, 0))


def saves_at(job: RLJob, version: int) -> bool:
    """Whether a periodic checkpoint of this version is due. The end of a run has one in any case."""
    every = job.checkpoint.every
    return every is not None and version % every == 0


def longest_wait(job: RLJob) -> float:
    """Seconds within which a group becomes ready, even if an actor and a worker must start first."""
    roles, turns = (job.actors, job.reward_workers), job.turns.max_count if job.turns else 1
    programs = 0.0
    if job.rollout is not None:
        attempt = EPISODES_IN_A_ROW * (job.rollout.timeout_s + PROGRAM_GRACE_S)
        programs = job.environment_workers.start_deadline_s + ATTEMPTS * attempt
    return round(programs + sum(turns * role.group_deadline_s + role.start_deadline_s for role in roles), 3)


def request_of(job: RLJob, group_id: int, encoded: EncodedPrompt) -> GenerateRequest:
    """The request for a group to train on."""
    sampling = job.sampling
    return GenerateRequest(
        group_id=group_id,
        prompt_id=encoded.prompt.id,
        prompt_p=encoded.tokens_p,
        n=sampling.n,
        temperature=sampling.temperature,
        top_p=1.0,
        max_tokens=sampling.max_tokens,
        seed=group_seed(job.seed, group_id) if sampling.seeded else None,
    )


def group_seed(seed: int, *place: int) -> int:
    """The seed of the first sample of the group at ``place``; others have the next ones, so neighbours must be far."""
    return int(np.random.SeedSequence([seed, *place]).generate_state(1)[0])
