"""Runs the real control plane on a simulated cluster: what one group costs the coordinator, from 8 to 2048 actors.

    python -m benchmarks.control_plane.simulate [--actors 8 64 512 2048] [--episodes] [--out docs/figures] [--profile]

Coordinator, slot buffer, ledger, pools, steering, heartbeat, recorder, outbox and an embedded Redis are the real ones;
Ray's handles are replaced by coroutines that take as long as the real calls would (`cluster.py`). P, the prompts per
step, is proportional to the number of actors. Each size runs in its own process. `ray_calls.py` measures what a Ray
call itself costs.
"""

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.control_plane.drive import Measured, Setting, as_json, measure
from benchmarks.objectives.report import BLUE, GREY, ORANGE, panels, print_table, save

TARGET_MS = 1.0
LAG_SHADES = ("#cfe3f2", "#7fb5da", "#0072B2", "#004a75")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, nargs="+", default=[8, 64, 512, 2048])
    parser.add_argument("--groups", type=int, default=4000, help="train on at least this many groups at each size")
    parser.add_argument("--episodes", action="store_true", help="samples are episodes, run by environment workers")
    parser.add_argument("--plain", action="store_true", help="at the largest size, also run with the plain slot buffer")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--out", type=Path, help="folder for control_plane.json and control_plane.png")
    options = parser.parse_args()
    settings = [
        Setting(count, groups=options.groups, profile=options.profile, episodes=options.episodes)
        for count in options.actors
    ]
    results = in_processes(settings)
    report(results)
    if options.plain:
        largest = max(options.actors)
        (plain,) = in_processes([Setting(largest, groups=options.groups, plain=True)])
        ratio = plain.cpu_ms / next(each for each in results if each.actors == largest).cpu_ms
        print(f"plain slot buffer at {largest} actors: {plain.cpu_ms:.3f} ms per group, {ratio:.1f} times as much\n")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps([as_json(each) for each in results], indent=1)
        (options.out / "control_plane.json").write_text(text + "\n")
        draw(results, options.out)


def in_processes(settings: Sequence[Setting]) -> list[Measured]:
    """Measure each setting in a new process, one after the other, so that they share neither memory nor a core."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        return list(processes.map(measure, settings))


def report(results: Sequence[Measured]) -> None:
    """Print one row per size, then whether the target is met."""
    print_table(
        [
            "actors", "P", "groups", "groups/s", "time x", "CPU ms/group", "simulation ms", "busy",
            "Redis calls/group", "memory MB", "Redis MB", "disk B/group", "tokens by lag",
        ],
        [
            [
                each.actors, each.prompts_per_step, each.groups, f"{each.groups_per_second:.0f}",
                f"{each.time_scale:.1f}", f"{each.cpu_ms:.3f}", f"{each.simulation_ms:.3f}", f"{each.busy:.1%}",
                f"{sum(each.redis_calls.values()):.3f}", f"{each.rss_before_mb:.0f} to {each.rss_mb:.0f}",
                f"{each.redis_mb:.1f}", f"{each.folder_bytes:.0f}",
                " ".join(f"{lag}:{share:.1%}" for lag, share in each.lags.items()),
            ]
            for each in results
        ],
    )  # fmt: skip
    worst = max(results, key=lambda each: each.cpu_ms)
    verdict = "met" if worst.cpu_ms < TARGET_MS else "missed"
    print(f"target, under {TARGET_MS:g} ms of coordinator CPU per group: {verdict}, at most {worst.cpu_ms:.3f} ms")
    print(f"one core handles {1000 / worst.cpu_ms:.0f} groups/s\n")


def draw(results: Sequence[Measured], folder: Path) -> None:
    """Plot CPU, Redis calls and lag against the number of actors."""
    figure, (cpu, calls, lag) = panels(3)
    actors = [each.actors for each in results]
    cpu.plot(actors, [each.cpu_ms for each in results], "o-", color=BLUE, label="all")
    cpu.plot(
        actors, [each.cpu_ms - each.simulation_ms for each in results], "s--", color=ORANGE, label="less simulation"
    )
    cpu.axhline(TARGET_MS, color=GREY, linewidth=0.8)
    cpu.set(title="coordinator CPU per group, ms", xscale="log", ylim=(0, 1.1 * TARGET_MS), xlabel="actors")
    cpu.legend(frameon=False)
    calls.plot(actors, [sum(each.redis_calls.values()) for each in results], "o-", color=BLUE)
    calls.set(title="Redis calls per group", xscale="log", yscale="log", xlabel="actors")
    bottoms = [0.0] * len(results)
    names = [str(count) for count in actors]
    for number in sorted({lag for each in results for lag in each.lags}):
        shares = [each.lags.get(number, 0.0) for each in results]
        lag.bar(names, shares, bottom=bottoms, color=LAG_SHADES[number % 4], label=f"lag {number}")
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    lag.set(title="trained tokens by lag", xlabel="actors", ylim=(0, 1))
    lag.legend(frameon=True, loc="lower right")
    save(figure, folder, "control_plane")


if __name__ == "__main__":
    main()
