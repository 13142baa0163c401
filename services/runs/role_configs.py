"""The configuration of each role, made from the job. Nothing else knows both the job's tree and the roles' configs."""

from actors.config import ActorConfig
from environments.records import EnvironmentConfig
from learner.config import LearnerConfig
from reward_servers.pool import RewardConfig
from services.store.folder import RunFolder
from volley.job import EvalJob, RFTJob, RLJob, SFTJob
from volley.rollout import Rollout
from volley.scoring import ScorerSpec


def actor_config(job: RLJob | RFTJob | EvalJob, length: int, folder: RunFolder) -> ActorConfig:
    """The actors of ``job``; ``length`` is that of the longest prompt plus sample in tokens."""
    return ActorConfig(
        model=job.model,
        actors=job.actors,
        max_model_len=length,
        seed=job.seed,
        log_dir=folder.logs,
        verify=isinstance(job, RLJob) and job.learner.verify_weights,
        gateway=None if job.rollout is None else job.gateway,
        sleeps=isinstance(job, RLJob) and job.placement == "colocated",
    )


def reward_config(job: RLJob | RFTJob | EvalJob, scorer: ScorerSpec, folder: RunFolder) -> RewardConfig:
    """The reward workers of ``job``."""
    prefix, kept = f"{folder.run_id}-", folder.rewards
    return RewardConfig(scorer, job.reward_workers, folder.logs, prefix=prefix, keep_dir=kept)


def environment_config(job: RLJob | RFTJob | EvalJob, rollout: Rollout, folder: RunFolder) -> EnvironmentConfig:
    """The environment workers of ``job``."""
    return EnvironmentConfig(rollout, job.environment_workers, folder.logs, prefix=f"{folder.run_id}-")


def rl_learner_config(job: RLJob, folder: RunFolder) -> LearnerConfig:
    """The learner of an rl job."""
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
        ks=tuple(sorted({*powers_of_two(job.sampling.n), getattr(job.objective, "k", None) or 1})),
        prefix=f"{folder.run_id}-",
        lends=job.broadcast.transport == "shared_memory",
    )


def supervised_learner_config(job: SFTJob | RFTJob, steps: int, folder: RunFolder) -> LearnerConfig:
    """The learner of an sft or rft job that trains for ``steps`` steps."""
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
