"""Samples per second of a whole asynchronous run against each of its stages alone.

    python -m benchmarks.end_to_end [--rounds 3] [--seconds 8] [--set learner.threads_per_rank=2]

The job is the first of the comparison with TRL. Alone, generation is the actor pool with as many groups in flight as
the run has slots, and nothing trained; learning is the learner's steps and publishing over and over on batches that
were generated before, and nothing generated. The stages take turns with each other and with the run, on the same
prompts, samples and model. A run can not be faster than the slower of them; how near it comes is the last figure.
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
from learner.group import LearnerGroup
from learner.records import ScoredGroup
from services.display import Display
from services.foreground import run_in_foreground
from services.job_file import assign, parse_overrides
from services.needs import needs_of
from services.rl_run import Prepared, prepare
from services.run import run_on
from services.run_folder import RunFolder
from services.stack import Stack, local_stack
from services.wiring import actor_config, rl_learner_config
from volley.job import JOB, RLJob

BATCHES = 4  # kept for learning alone
WARM, STEPS = 3, 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each stage alone in each round")
    parser.add_argument("--set", dest="set_", action="append", default=[], metavar="KEY=VALUE", help="change the job")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(WORKLOADS["short"], folder)
        tree = {**job_of(WORKLOADS["short"], folder, ""), "steps": STEPS}
        for key, value in parse_overrides(args.set_).items():
            assign(tree, key.split("."), value)
        job = JOB.validate_python(tree)
        if not isinstance(job, RLJob):
            raise TypeError(f"a job of kind {job.kind} has no stages that overlap")
        report(run_in_foreground(measure(job, folder, args.rounds, args.seconds)))


async def measure(job: RLJob, folder: Path, rounds: int, seconds: float) -> list[dict[str, float]]:
    """Samples per second of each stage alone and of the run, round by round."""
    results = []
    async with local_stack(needs_of(job), folder / "stack") as stack:
        for number in range(rounds):
            alone = RunFolder.at(folder / f"alone-{number}", job)
            generating, learning = await stages(job, prepare(job), alone, seconds)
            whole = await the_run(stack, job, folder / f"run-{number}")
            results.append({"generation alone": generating, "learning alone": learning, "the run": whole})
    return results


async def stages(job: RLJob, prepared: Prepared, folder: RunFolder, seconds: float) -> tuple[float, float]:
    """Generation and learning, one after the other."""
    actors = await ActorPool.start(actor_config(job, prepared.length, folder))
    try:
        await generated(actors, job, prepared, 1.0)  # not counted
        groups, generating = await generated(actors, job, prepared, seconds)
    finally:
        await actors.stop()
    learner = await LearnerGroup.start(rl_learner_config(job, folder))
    try:
        return generating, await learned(learner, job, groups, seconds)
    finally:
        await learner.stop()


async def generated(
    actors: ActorPool, job: RLJob, prepared: Prepared, seconds: float
) -> tuple[list[ScoredGroup], float]:
    """The first groups, with rewards drawn at random, and samples per second while all slots were full."""
    numbers, groups = itertools.count(), list[ScoredGroup]()
    rng, n = np.random.default_rng(0), job.sampling.n
    begun = time.perf_counter()

    async def one_after_the_other() -> None:
        while time.perf_counter() < begun + seconds:
            number = next(numbers)
            prompt = prepared.prompts[number % len(prepared.prompts)]
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
            tasks.create_task(one_after_the_other())
    counted = [end for end in ends if end < begun + seconds]
    return groups, len(counted) * n / (counted[-1] - begun)


async def learned(learner: LearnerGroup, job: RLJob, groups: list[ScoredGroup], seconds: float) -> float:
    """Samples per second of steps and publishing."""
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


async def the_run(stack: Stack, job: RLJob, folder: Path) -> float:
    """Samples per second of the whole run."""
    run = RunFolder.at(folder, job)
    await run_on(stack, job, run, Display(quiet=True))
    rows: list[dict[str, Any]] = run.read("metrics")[WARM:]
    seconds = float(sum(row["seconds_step"] for row in rows))
    return len(rows) * job.prompts_per_step * job.sampling.n / seconds


def report(rounds: list[dict[str, float]]) -> None:
    """Medians, and the share of the slower stage's speed that the run reaches, round by round."""
    for name in rounds[0]:
        print(f"{name:20}{statistics.median(each[name] for each in rounds):8.0f} samples/s")
    shares = [each["the run"] / min(each["generation alone"], each["learning alone"]) for each in rounds]
    shown = f"{statistics.median(shares):.2f}   ({min(shares):.2f} to {max(shares):.2f})"
    print(f"{'run / slower stage':20}{shown:>8}")


if __name__ == "__main__":
    main()
