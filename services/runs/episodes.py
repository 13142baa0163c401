"""What a job with a program adds to a run: its check, its processes, and reward workers only if there is a scorer."""

import contextlib

from actors.parser_names import check_parsers
from actors.pool import ActorPool
from environments.outside.interpreter import check_outside, outside_of
from environments.pool import EnvironmentPool
from environments.programs import load_rollout
from reward_servers.pool import RewardPool
from services.coordinator.episodes import Episodes
from services.coordinator.turns import SampleRoom, room_for
from services.data.chat import check_template
from services.data.tokens import EncodedPrompt, load_tokenizer, needed_length
from services.jobs.runtime_env import code_is_here
from services.runs.role_configs import environment_config, reward_config
from services.store.folder import RunFolder
from volley.errors import JobError, VolleyError
from volley.job import EvalJob, RFTJob, RLJob
from volley.records import Group, Prompt, Scores, WorkerInfo
from volley.refs import Ref
from volley.rollout import Rollout, ToolsRollout


class NoRewardWorkers:
    """Stands in for the reward workers of a job without a scorer, whose programs return all rewards."""

    count, waiting, sandbox = 0, 0, ""
    deaths: tuple[VolleyError, ...] = ()

    def workers(self) -> tuple[WorkerInfo, ...]:
        """None."""
        return ()

    async def score(self, group: Ref[Group], prompt: Prompt) -> Scores:
        """Raises `RuntimeError`: nothing asks for a score without a scorer."""
        raise RuntimeError(f"prompt {prompt.id}: the job has no scorer")

    async def scale(self, count: int) -> None:
        """Raises `JobError`: there is nothing to scale."""
        raise JobError(f"the job has no scorer, so it has no reward workers; {count} cannot be started")

    async def stop(self) -> None:
        """Nothing to stop."""


async def start_rewards(job: RLJob | RFTJob | EvalJob, folder: RunFolder) -> RewardPool | NoRewardWorkers:
    """Start the reward workers, if the job has a scorer; raises as `RewardPool.start`."""
    return NoRewardWorkers() if job.scorer is None else await RewardPool.start(reward_config(job, job.scorer, folder))


def roles_started(job: RLJob | RFTJob | EvalJob) -> str:
    """The processes that make and score the job's samples, in words: only those that it needs."""
    counts = [f"{job.actors.count} actor(s)"]
    if job.rollout is not None:
        counts.append(f"{job.environment_workers.count} environment worker(s)")
    if job.scorer is not None:
        counts.append(f"{job.reward_workers.count} reward worker(s)")
    return ", ".join(counts)


class NoEnvironments:
    """Stands in for the environment workers of a job without a program."""

    count, waiting = 0, 0
    deaths: tuple[VolleyError, ...] = ()

    def workers(self) -> tuple[WorkerInfo, ...]:
        """None."""
        return ()

    async def scale(self, count: int) -> None:
        """Raises `JobError`: there is nothing to scale."""
        raise JobError(f"the job has no program, so it has no environment workers; {count} cannot be started")

    async def stop(self) -> None:
        """Nothing to stop."""


async def start_environments(job: RLJob | RFTJob | EvalJob, folder: RunFolder) -> EnvironmentPool | NoEnvironments:
    """Start the environment workers, if the job has a program; raises as `EnvironmentPool.start`."""
    if job.rollout is None:
        return NoEnvironments()
    return await EnvironmentPool.start(environment_config(job, job.rollout, folder))


def episodes_of(
    job: RLJob | RFTJob | EvalJob, actors: ActorPool, environments: EnvironmentPool | NoEnvironments, length: int
) -> Episodes | None:
    """How the job's programs make samples; None without programs.

    Args:
        length: longest prompt plus answer of a call, in tokens.
    """
    if job.rollout is None or isinstance(environments, NoEnvironments):
        return None
    return Episodes(job.rollout, actors, environments, length, scored=job.scorer is not None)


def check_program(job: RLJob | RFTJob | EvalJob) -> None:
    """Raise `JobError` if the job's program cannot be called, or its tools, parsers or model do not fit."""
    rollout = job.rollout
    if rollout is not None:
        check_parsers(job.gateway)
    if isinstance(rollout, ToolsRollout):
        check_template(load_tokenizer(job.model.folder), "rollout kind: tools")
    if rollout is None or not code_is_here(job.runtime_env):
        return
    if (outside := outside_of(rollout)) is not None:
        check_outside(outside, job.environment_workers.start_deadline_s)
    else:
        _load(rollout)


def import_program(job: RLJob | RFTJob | EvalJob) -> None:
    """Import the job's program or tools, ignoring failures, which `check_program` reports."""
    if job.rollout is not None and outside_of(job.rollout) is None:
        with contextlib.suppress(JobError):
            _load(job.rollout)


def _load(rollout: Rollout) -> None:
    if isinstance(rollout, ToolsRollout):
        from environments.tools.loop import load_functions  # only jobs with tools need the sandbox

        load_functions(rollout)
    else:
        load_rollout(rollout)


def length_of(job: RLJob | RFTJob | EvalJob, encoded: list[EncodedPrompt], room: int, length: int) -> int:
    """Longest prompt plus answer that the actors must take, in tokens.

    Args:
        encoded: the job's prompts; programs make their own.
        room: tokens that may follow a prompt.
        length: the model's.

    Raises:
        JobError: ``rollout.max_context`` exceeds the model's length.
    """
    if job.rollout is None:
        return needed_length(encoded, room)
    context = job.rollout.max_context or length
    if context > length:
        raise JobError(f"rollout.max_context {context} exceeds the model's length {length}: lower it")
    return context


def room_of(job: RLJob | RFTJob | EvalJob, max_tokens: int, key: str = "sampling.max_tokens") -> SampleRoom:
    """The room that samples need behind their prompts. Programs make their own prompts, so they need none."""
    if job.rollout is not None:
        return {"room": 1, "key": key}
    return room_for(max_tokens, None if isinstance(job, RFTJob) else job.turns, key)
