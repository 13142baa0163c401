"""Samples per second of a whole asynchronous run, compared with each of its stages alone.

    python -m benchmarks.end_to_end [--rounds 3] [--seconds 8] [--set learner.threads_per_rank=2] [--model FOLDER]

The job is the workload ``short`` of the comparison with TRL, with ``--model`` its workload ``sums``. Generation alone
keeps as many groups in flight in the actor pool as the run has slots, and trains nothing. Learning alone repeats
learner steps and publishing on batches generated beforehand. The two stages and the run take turns, with the same
prompts, samples and model. A run cannot be faster than its slower stage; the last figure says how close it comes.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from actors.config import GenerateRequest
from actors.pool import ActorPool
from benchmarks.versus_trl.volley_side import job_of
from benchmarks.versus_trl.workloads import WORKLOADS, write_inputs
from learner.pool import LearnerPool
from learner.records import ScoredGroup
from services.jobs.job_file import assign, parse_overrides
from services.jobs.needs import needs_of
from services.recording.display import Display
from services.runs.rl import RLRun
from services.runs.role_configs import actor_config, rl_learner_config
from services.runs.run import prepare, run_on
from services.signals import run_in_foreground
from services.stack.ephemeral import Stack, local_stack
from services.store.folder import RunFolder
from volley.job import JOB, RLJob

BATCHES = 4  # number of generated batches kept for measuring learning alone
WARM = 3  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each stage's measurement in each round")
    parser.add_argument("--set", dest="set_", action="append", default=[], metavar="KEY=VALUE", help="change the job")
    parser.add_argument("--steps", type=int, default=60, help="of the run")
    parser.add_argument("--model", type=Path, help="folder of a pretrained model")
    args = parser.parse_args()
    workload = WORKLOADS["sums" if args.model else "short"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(workload, folder, model=args.model)
        tree = {**job_of(workload, folder, ""), "steps": args.steps}
        for key, value in parse_overrides(args.set_).items():
            assign(tree, key.split("."), value)
        job = JOB.validate_python(tree)
        if not isinstance(job, RLJob):
            raise TypeError(f"only rl jobs have stages that overlap; this job is of kind {job.kind}")
        report(run_in_foreground(measure(job, folder, args.rounds, args.seconds)))


async def measure(job: RLJob, folder: Path, rounds: int, seconds: float) -> list[dict[str, float]]:
    """Samples per second of each stage alone and of the run, round by round."""
    results = []
    async with local_stack(needs_of(job), folder / "stack") as stack:
        for number in range(rounds):
            alone = RunFolder.at(folder / f"alone-{number}", job)
            generating, learning = await measure_stages(RLRun.prepare(job), alone, seconds)
            whole = await whole_run(stack, job, folder / f"run-{number}")
            results.append({"generation alone": generating, "learning alone": learning, "the run": whole})
    return results


async def measure_stages(run: RLRun, folder: RunFolder, seconds: float) -> tuple[float, float]:
    """Samples per second of generation, then of learning."""
    actors = await ActorPool.start(actor_config(run.job, run.length, folder))
    try:
        await generate_groups(actors, run, 1.0)  # warm-up, not counted
        groups, generating = await generate_groups(actors, run, seconds)
    finally:
        await actors.stop()
    learner = await LearnerPool.start(rl_learner_config(run.job, folder))
    try:
        return generating, await learn_and_publish(learner, run.job, groups, seconds)
    finally:
        await learner.stop()


async def generate_groups(actors: ActorPool, run: RLRun, seconds: float) -> tuple[list[ScoredGroup], float]:
    """Generate for ``seconds`` with all slots full: the first groups, with random rewards, and samples per second."""
    numbers, groups = itertools.count(), list[ScoredGroup]()
    job, rng = run.job, np.random.default_rng(0)
    n = job.sampling.n
    begun = time.perf_counter()

    async def fill_slot() -> None:
        while time.perf_counter() < begun + seconds:
            number = next(numbers)
            prompt = run.prompts[number % len(run.prompts)]
            request = GenerateRequest(
                number, prompt.prompt.id, prompt.tokens_p, n, job.sampling.temperature, 1.0, job.sampling.max_tokens
            )
            group, meta = await actors.generate(request)
            ends.append(time.perf_counter())
            if len(groups) < BATCHES * job.prompts_per_step:
                groups.append(ScoredGroup(group, meta, rng.random(n), np.ones(n, np.bool_), np.full(n, -1, np.int32)))

    ends: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        for _ in range(job.slots):
            tasks.create_task(fill_slot())
    counted = [end for end in ends if end < begun + seconds] or ends[:1]  # one at least, however large the model
    return groups, len(counted) * n / (counted[-1] - begun)


async def learn_and_publish(learner: LearnerPool, job: RLJob, groups: list[ScoredGroup], seconds: float) -> float:
    """Samples per second of learner steps, each followed by publishing."""
    batches = [groups[at : at + job.prompts_per_step] for at in range(0, len(groups), job.prompts_per_step)]
    steps, begun = 0, time.perf_counter()
    for number in itertools.count():
        if number == WARM:
            steps, begun = 0, time.perf_counter()
        await learner.step(batches[number % len(batches)], version=0)
        await learner.publish(0)
        steps += 1
        if number > WARM and time.perf_counter() > begun + seconds:
            break
    return steps * job.prompts_per_step * job.sampling.n / (time.perf_counter() - begun)


async def whole_run(stack: Stack, job: RLJob, folder: Path) -> float:
    """Samples per second of the whole run."""
    run = RunFolder.at(folder, job)
    await run_on(stack, prepare(job), run, Display(quiet=True))
    rows: list[dict[str, Any]] = run.read("metrics")[WARM:]
    seconds = float(sum(row["seconds_step"] for row in rows))
    return len(rows) * job.prompts_per_step * job.sampling.n / seconds


def report(rounds: list[dict[str, float]]) -> None:
    """Print the median speeds, and the run's speed relative to the slower stage of the same round."""
    for name in rounds[0]:
        print(f"{name:20}{statistics.median(each[name] for each in rounds):8.1f} samples/s")
    shares = [each["the run"] / min(each["generation alone"], each["learning alone"]) for each in rounds]
    shown = f"{statistics.median(shares):.2f}   ({min(shares):.2f} to {max(shares):.2f})"
    print(f"{'run / slower stage':20}{shown:>8}")


if __name__ == "__main__":
    main()
