"""What each role is told of a job: the one place where the job tree meets the roles' own configurations."""

from actors.config import ActorConfig
from reward_servers.pool import RewardConfig
from services.run_folder import RunFolder
from volley.job import EvalJob, RLJob


def actor_config(job: RLJob | EvalJob, length: int, folder: RunFolder) -> ActorConfig:
    """The actors of ``job``; ``length`` is the model's."""
    return ActorConfig(
        model=job.model,
        actors=job.actors,
        max_model_len=length,
        seed=job.seed,
        log_dir=folder.logs,
        verify=isinstance(job, RLJob) and job.learner.verify_weights,
    )


def reward_config(job: RLJob | EvalJob, folder: RunFolder) -> RewardConfig:
    """The reward workers of ``job``."""
    return RewardConfig(job.scorer, job.reward_workers, folder.logs, prefix=f"{folder.run_id}-")
