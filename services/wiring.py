"""What each role is told of a job: the one place where the job tree meets the roles' own configurations."""

from actors.config import ActorConfig
from learner.config import LearnerConfig
from reward_servers.pool import RewardConfig
from services.run_folder import RunFolder
from volley.job import EvalJob, RFTJob, RLJob, SFTJob


def actor_config(job: RLJob | RFTJob | EvalJob, length: int, folder: RunFolder) -> ActorConfig:
    """The actors of ``job``; ``length`` is the model's."""
    return ActorConfig(
        model=job.model,
        actors=job.actors,
        max_model_len=length,
        seed=job.seed,
        log_dir=folder.logs,
        verify=isinstance(job, RLJob) and job.learner.verify_weights,
        max_replacements=job.actors.max_replacements,
        hang_deadline_s=job.actors.hang_deadline_s,
    )


def reward_config(job: RLJob | RFTJob | EvalJob, folder: RunFolder) -> RewardConfig:
    """The reward workers of ``job``."""
    workers = job.reward_workers
    return RewardConfig(
        job.scorer,
        workers,
        folder.logs,
        prefix=f"{folder.run_id}-",
        most=workers.most,
        respawns=workers.max_replacements,
    )


def rl_learner_config(job: RLJob, folder: RunFolder) -> LearnerConfig:
    """The learner of a reinforcement learning job."""
    return LearnerConfig(
        model=job.model,
        learner=job.learner,
        optimizer=job.optimizer,
        steps=job.steps,
        seed=job.seed,
        log_dir=folder.logs,
        update=job.update,
        objective=job.objective,
        temperature=job.sampling.temperature,
        max_lag=job.max_lag,
        ks=powers_of_two(job.sampling.n),
        prefix=f"{folder.run_id}-",
    )


def supervised_learner_config(job: SFTJob | RFTJob, steps: int, folder: RunFolder) -> LearnerConfig:
    """The learner of a job's ``steps`` supervised steps."""
    return LearnerConfig(
        model=job.model,
        learner=job.learner,
        optimizer=job.optimizer,
        steps=steps,
        seed=job.seed,
        log_dir=folder.logs,
        prefix=f"{folder.run_id}-",
    )


def powers_of_two(n: int) -> tuple[int, ...]:
    """1, 2, 4 ... and n itself: the k for which a group's pass@k is reported."""
    powers = [1 << power for power in range(n.bit_length()) if 1 << power <= n]
    return tuple(sorted({*powers, n}))
