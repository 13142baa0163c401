"""What `volley check` finds out beyond what makes a job invalid: advice, and what the user's functions do."""

from dataclasses import dataclass

from reward_servers.scorers import try_scorer
from services.data.chat import plain_text_notice
from services.jobs.job_file import Job
from services.jobs.machine import bfloat16_notice, gpu_notice
from services.jobs.needs import GIB, needs_of
from services.jobs.runtime_env import code_is_here
from services.runs.context import Run
from services.runs.episode_trial import EpisodeTrial, try_program
from services.runs.eval import EvalRun
from services.runs.rft import RFTRun
from services.runs.rl import RLRun
from volley.memory import available_memory


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a scorer function, on the first prompt."""

    target: str
    prompt: str
    answer: str
    status: str
    reward: float | None

    def __str__(self) -> str:
        answer = "an empty answer" if not self.answer else f"the answer {self.answer!r}"
        return f"{answer} to prompt {self.prompt} gets reward {self.reward:g}"


def score_once(run: Run, answer: str) -> list[Call]:
    """Call each scorer function of the run once, with ``answer`` to the first prompt, isolated as in the run.

    Functions that can be imported only on the cluster are not called.

    Raises:
        JobError: a function raised, hung or ended its process; the message has the traceback.
    """
    if not isinstance(run, RLRun | RFTRun | EvalRun) or not code_is_here(run.job.runtime_env):
        return []
    if run.job.scorer is None:  # a program returns all rewards
        return []
    prompt = run.prompts[0].prompt
    called = try_scorer(run.job.scorer, prompt, answer)
    return [Call(target, prompt.id, answer, str(verdict.status), verdict.reward) for target, verdict in called]


def run_one_episode(run: Run, says: str) -> EpisodeTrial | None:
    """Run one episode of the run's program, on the first prompt, with a stub that ``says`` the same in every call.

    Returns None without a program, or if it can be imported only on the cluster.

    Raises:
        JobError: the program raised, hung, ended its process, made no call or rewrote the history.
    """
    if not isinstance(run, RLRun | RFTRun | EvalRun) or not code_is_here(run.job.runtime_env):
        return None
    if (rollout := run.job.rollout) is None:
        return None
    return try_program(run.job, rollout, run.prompts[0].prompt, length=run.length, says=says)


def notes_on(job: Job) -> list[str]:
    """Advice on a valid job."""
    memory = _memory_note(needs_of(job).memory_bytes)
    return list(filter(None, [chat_notice(job), gpu_notice(job), bfloat16_notice(job), memory]))


def chat_notice(job: Job) -> str:
    """`plain_text_notice`, except for programs, whose messages the gateway renders."""
    return "" if getattr(job, "rollout", None) is not None else plain_text_notice(job.data, job.model.folder)


def _memory_note(needed: int) -> str:
    free = available_memory()
    if needed <= free:
        return ""
    return (
        f"the run needs about {needed / GIB:.1f} GiB of memory on one host, and this one has {free / GIB:.1f} GiB free"
    )
