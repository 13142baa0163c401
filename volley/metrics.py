"""The name, unit and definition of every metric. ``python -m volley.metrics`` prints docs/metrics.md.

A name with ``<...>`` stands for a family, such as ``pass_at_<k>``. In reinforcement steps, means over tokens cover the
measured groups, which are the share ``update.kl_sample_fraction`` of each rank's groups.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Metric:
    """The meaning of a number in ``metrics.jsonl``.

    Attributes:
        unit: the value's unit; "1" for pure numbers; "" for a table of metrics.
        definition: one sentence.
        when: the condition under which steps have it; "" for all steps of a reinforcement job.
    """

    unit: str
    definition: str
    when: str = ""


TAGGED = "tags with at most 16 values, such as `level/5`"
ANSWERS = "scorers that extract answers"
WEIGHTS = "evaluations with weights, or of an objective with weights"
REFILL = "jobs with `sampling.refill`"
SUPERVISED = "also supervised steps"
REFERENCE = "`update.kl.coefficient` above 0, or `update.kl.logged`"
VALUE = "jobs with a value model"
COLOCATED = "jobs with `placement: colocated`"
EPISODES = "jobs with `rollout`, of all groups made since the step before, dropped ones included"

_METRICS: dict[str, dict[str, Metric]] = {
    "Which step": {
        "step": Metric("1", "Number of the step, from 0.", SUPERVISED),
        "version": Metric("1", "Version of the weights after the step: step + 1."),
        "time": Metric("s", "When the row was written, in seconds since 1970.", SUPERVISED),
    },
    "Rewards": {
        "reward_mean": Metric("reward", "Mean reward of scored samples."),
        "pass_at_<k>": Metric(
            "reward",
            "Unbiased estimate of the best reward of k samples (pass@k for 0/1 rewards), mean over groups with at "
            "least k scored samples.",
        ),
        "live_group_fraction": Metric("1", "Share of trained groups with a non-zero advantage."),
        "live_sample_fraction": Metric("1", "Share of trained samples with a non-zero advantage: with a gradient."),
        "live_sample_fraction_made": Metric(
            "1", "The same of all samples made for the batch, those of `replaced_groups` included.", REFILL
        ),
        "replaced_groups": Metric(
            "groups", "Groups without a gradient that were dropped for this batch, each for another one.", REFILL
        ),
        "verdict_<status>": Metric("1", "Share of the batch's samples with this verdict; absent if 0."),
        "truncated_fraction": Metric("1", "Share of the batch's samples cut at the length limit."),
        "length_mean": Metric("tokens", "Mean length of the batch's samples, over all turns."),
        "turns_mean": Metric("turns", "Mean number of turns per sample.", "jobs with turns, if a sample has several"),
        "distinct_answers": Metric("answers", "Distinct answers per prompt, mean over groups.", ANSWERS),
        "prompts_met": Metric("prompts", "Distinct prompts in batches so far, replaced groups included."),
        "prompts_solved": Metric("prompts", "Prompts with a sample that passed at any step."),
        "cumulative_solve_rate": Metric("1", "`prompts_solved` / `prompts_met`."),
    },
    "By tag": {
        "reward_mean_by_tag": Metric("reward", "Mean reward of the batch's prompts with this tag value.", TAGGED),
        "length_mean_by_tag": Metric("tokens", "Mean length of their samples.", TAGGED),
        "entropy_by_tag": Metric(
            "nats/token", "Mean -log-prob of their sample tokens when drawn: estimates the policy's entropy.", TAGGED
        ),
        "distinct_answers_by_tag": Metric("answers", "Their `distinct_answers`.", f"{ANSWERS}; {TAGGED}"),
        "cumulative_solve_rate_by_tag": Metric("1", "`cumulative_solve_rate` of all such prompts so far.", TAGGED),
    },
    "The update": {
        "loss": Metric(
            "1", "Loss of the batch's last update, over all ranks. Supervised: in nats per token.", SUPERVISED
        ),
        "entropy": Metric("nats/token", "Mean entropy of the policy at the sample tokens.", SUPERVISED),
        "ratio_mean": Metric("1", "Mean PPO ratio over tokens in the batch's last update."),
        "ratio_max": Metric("1", "Largest PPO ratio."),
        "clip_fraction": Metric(
            "1",
            "Share of tokens whose gain is clipped, so that they have no policy gradient; with `surrogate: cispo`, "
            "whose ratio is clipped.",
        ),
        "correction_mean": Metric("1", "Mean behaviour correction over tokens, after capping."),
        "truncated_share": Metric(
            "1", "Share of tokens whose behaviour correction is above its cap or below its floor."
        ),
        "off_policy_masked_share": Metric(
            "1", "Share of tokens in samples that `off_policy_mask` drops.", "jobs with `update.off_policy_mask`"
        ),
        "companion_truncated_share": Metric(
            "1",
            "Share of companion importance weights above `weight_cap`, mean over groups.",
            "objectives with companion weights",
        ),
        "focal_weight_mean": Metric(
            "1", "Mean focal weight of groups with a non-zero advantage.", "objectives with `focal`"
        ),
        "grad_norm": Metric("1", "Global gradient norm of the last update, before clipping.", SUPERVISED),
        "clipped_share": Metric(
            "1", "Share of the batch's updates whose gradient was clipped to `optimizer.clip_norm`.", SUPERVISED
        ),
        "learning_rate": Metric("1", "Learning rate of the step.", SUPERVISED),
        "tokens": Metric("tokens", "Sample tokens trained on. Supervised: answer tokens.", SUPERVISED),
        "computed_tokens": Metric(
            "tokens", "Tokens sent through the model: all of measured groups, only those with a gradient of others."
        ),
    },
    "Distance": {
        "kl_k1": Metric("nats/token", "Mean `log pi - log ref`; ref is the starting policy.", REFERENCE),
        "kl_k3": Metric("nats/token", "Mean `ref/pi - 1 - log(ref/pi)`; ref is the starting policy.", REFERENCE),
        "kl_coefficient": Metric(
            "1", "Coefficient of the divergence penalty in the step.", "jobs with `update.kl.target`"
        ),
        "logprob_mismatch_mean": Metric(
            "nats/token",
            "Mean distance between the generator's and the learner's log-prob, over samples drawn wholly with the "
            "trained version: those that went on across an update attend to keys and values of older weights.",
            "steps with such samples",
        ),
        "logprob_mismatch_max": Metric("nats/token", "Largest such distance.", "steps with such samples"),
        "served_mismatch_max": Metric(
            "nats/token",
            "Largest distance between an actor's and the learner's log-prob of a few tokens drawn for this check, "
            "under the same weights.",
            "the steps after the first update and after every checkpoint",
        ),
        "lag_histogram": Metric("tokens", "Trained tokens by lag, the learner's version minus the token's."),
    },
    "Value model": {
        "value_loss": Metric("reward²", "Clipped value loss of the last update, mean over scored samples.", VALUE),
        "value_mean": Metric("reward", "Mean V(x) over scored samples, before that update.", VALUE),
        "value_grad_norm": Metric("1", "Global gradient norm of the value model, before clipping.", VALUE),
    },
    "Time": {
        "seconds_step": Metric("s", "From the end of the previous step to the end of this one.", SUPERVISED),
        "seconds_wait": Metric("s", "Time the learner waited for groups."),
        "seconds_learn": Metric("s", "The learner's step, as measured by the coordinator."),
        "seconds_prepare": Metric(
            "s",
            "Part of it: layout, passes before the update (starting policy, anchor, value model), advantages.",
        ),
        "seconds_update": Metric("s", "Part of it: forward, backward and optimiser."),
        "seconds_publish": Metric("s", "Beginning to publish, before the next step: on GPUs, gathering the weights."),
        "seconds_broadcast": Metric("s", "Storing and sending the weights, until the last actor serves them."),
        "seconds_stalled_max": Metric("s", "Longest pause of any actor to load them."),
        "seconds_hand_over": Metric(
            "s",
            "Handing devices back after the step before, and to the learner; loading weights left out.",
            COLOCATED,
        ),
        "seconds_generate_mean": Metric(
            "s",
            "Time to generate a group, mean over the batch. With programs, it includes waiting for room on an "
            "environment worker.",
        ),
        "seconds_score_mean": Metric("s", "Time to score a group, mean over the batch."),
        "tokens_per_second": Metric("tokens/s", "`tokens` / time of the ranks' step.", SUPERVISED),
        "samples_per_second": Metric("samples/s", "The batch's samples / `seconds_step`."),
        "weight_group_share": Metric("1", "Share of actors that received the weights through the weight group."),
        "weight_bytes": Metric("bytes", "Size of the published weights."),
    },
    "Episodes": {
        "calls_mean": Metric("calls", "Calls of the model per episode.", EPISODES),
        "observation_tokens_mean": Metric("tokens", "Tokens per sample that came between its calls.", EPISODES),
        "seconds_episode_mean": Metric("s", "Time a program runs; waiting for room before does not count.", EPISODES),
        "seconds_environment_mean": Metric("s", "Part of it: all but the model's answers.", EPISODES),
        "environment_share": Metric("1", "`seconds_environment_mean` / `seconds_episode_mean`.", EPISODES),
        "environment_busy_share": Metric(
            "1",
            "Episodes running / episodes the environment workers have room for, mean over time. Those waiting for room "
            "do not count; one that ended may count for about 5 s more, until its worker reports.",
            EPISODES,
        ),
        "episodes_per_second": Metric("episodes/s", "Episodes that ended, evaluations included.", EPISODES),
        "episodes_<end>": Metric(
            "1",
            "Share of episodes without a result of their own: `raised`, `timeout`, `no_call` (the program made none), "
            "`rewritten` (the history), `lost` (with their workers); `calls`, `tokens`, `context` ran out.",
            EPISODES,
        ),
        "rewrites": Metric("calls", "Calls that did not continue the history.", EPISODES),
        "parse_failures": Metric("replies", "Replies with a tool call that could not be parsed.", EPISODES),
        "tool_errors_mean": Metric(
            "calls",
            "With `rollout: {kind: tools}`: calls of tools per episode that the model saw as an error: code or a "
            "function that failed, wrong arguments, unknown tools, time-outs, exceeded limits.",
            EPISODES,
        ),
    },
    "Accounting": {
        "groups_admitted": Metric("groups", "Groups admitted so far: the sum of the next three."),
        "groups_trained": Metric("groups", "Groups trained on so far."),
        "groups_dropped": Metric("groups", "Groups dropped so far, each with a reason."),
        "groups_in_flight": Metric("groups", "Groups neither trained on nor dropped yet."),
        "groups_dead": Metric("groups", "Groups without a gradient so far, trained on or replaced."),
    },
}

EVALUATION: Mapping[str, Metric] = MappingProxyType(
    {
        "version": Metric("1", "Version of the evaluated weights; 0 is the job's model."),
        "prompts": Metric("prompts", "Prompts evaluated."),
        "n": Metric("samples", "Samples per prompt."),
        "unscored": Metric(
            "samples", "Samples that could not be scored. They are left out, never counted as reward 0."
        ),
        "estimates": Metric(
            "reward",
            "Per k: mean over prompts of the unbiased estimate of max@k (pass@k for 0/1 rewards), and `low` and `high` "
            "of its 95% bootstrap interval over prompts; `left_out` prompts have fewer than k scored samples. Sinks: "
            "`pass_at_<k>`.",
        ),
        "majority": Metric(
            "reward", "The same for maj@k. Sinks: `maj_at_<k>`.", f"{ANSWERS} and reward equal answers equally"
        ),
        "picked": Metric(
            "reward",
            "The same for best-of-k by rank, ties at random. Sinks: `best_of_<k>`.",
            "scorers that return ranks",
        ),
        "weights": Metric("1", "Per k: its weight in the weighted means.", WEIGHTS),
        "weighted": Metric(
            "reward",
            "`sum_k w_k max@k / sum_k w_k`, with `low` and `high` as above: the reward to expect if tries are spread "
            "as the weights are. Sinks: `weighted_pass_at_k`.",
            WEIGHTS,
        ),
        "weighted_majority": Metric("reward", "The same for maj@k. Sinks: `weighted_maj_at_k`.", WEIGHTS),
        "weighted_picked": Metric("reward", "The same for best-of-k. Sinks: `weighted_best_of_k`.", WEIGHTS),
        "distinct_answers": Metric("answers", "Distinct answers per prompt, mean over prompts.", ANSWERS),
        "length_mean": Metric("tokens", "Mean sample length."),
        "calls_mean": Metric("calls", "Calls of the model per episode.", "jobs with `rollout`"),
        "entropy": Metric("nats/token", "Mean -log-prob of the sample tokens when drawn."),
        "by_tag": Metric("", "All of these except `version` and `n`, per value of each tag with at most 64 values."),
    }
)

METRICS: Mapping[str, Metric] = MappingProxyType(
    {name: metric for section in _METRICS.values() for name, metric in section.items()}
)


# Names of an evaluation's figures in sinks, rules and Prometheus.
EVALUATION_FIGURES = (
    *("pass_at_<k>", "maj_at_<k>", "best_of_<k>"),
    *("weighted_pass_at_k", "weighted_maj_at_k", "weighted_best_of_k"),
    *("prompts", "n", "unscored", "distinct_answers", "length_mean", "calls_mean", "entropy"),
)


def matches(name: str, known: str) -> bool:
    """Whether ``name`` is ``known`` or, if that stands for a family, belongs to it."""
    return re.fullmatch(re.sub(r"<\w+>", lambda part: r"\d+" if part[0] == "<k>" else r"\w+", known), name) is not None


def family(name: str) -> str | None:
    """The name in `METRICS` that defines ``name``; None if none does."""
    return next((known for known in METRICS if matches(name, known)), None)


def name_part(text: str) -> str:
    """Turn a tag or its value into a part of a metric's name that every sink accepts; MLflow's rules are strictest."""
    return re.sub(r"[^\w .:-]|^\W+$", "_", text)[:64].strip(" .") or "_"


def page() -> str:
    """The tables as Markdown."""
    lines = [
        "# Metrics",
        "",
        "Each row of `metrics.jsonl` and of `/v1/runs/{id}/metrics` is one step, each row of `evaluations.jsonl` one",
        "evaluation; † marks what supervised steps have too. `python -m volley.metrics` generates this page, which a",
        "test compares with what a run emits.",
    ]
    for title, section in (*_METRICS.items(), ("Evaluations", EVALUATION)):
        shared = set.intersection(*(set(metric.when.split("; ")) for metric in section.values())) - {""}
        lines += ["", f"## {title}", "", *(f"Only for {each}.\n" for each in sorted(shared))]
        lines += ["| name | unit | definition |", "|---|---|---|"]
        for name, metric in section.items():
            supervised = " †" if metric.when == SUPERVISED else ""
            own = [each for each in metric.when.split("; ") if each not in shared | {"", SUPERVISED}]
            when = f" *({'; '.join(own)})*" if own else ""
            lines.append(f"| `{name}`{supervised} | {metric.unit or 'table'} | {metric.definition}{when} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the page."""
    print(page(), end="")  # noqa: T201 - this is its output


if __name__ == "__main__":
    main()
