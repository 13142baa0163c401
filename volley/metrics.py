"""Every metric of a step: its name, unit and definition. ``python -m volley.metrics`` prints the page in docs/.

A name with ``<...>`` stands for a family, such as ``pass_at_<k>``. Means over tokens in a reinforcement step are over
the tokens of measured groups, a share of each rank's groups set by ``update.measured_share``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Metric:
    """What a number in ``metrics.jsonl`` means.

    Attributes:
        unit: of the value; "1" for pure numbers; empty for a table of others.
        definition: one sentence.
        when: which steps carry it; empty for all steps of a reinforcement job.
    """

    unit: str
    definition: str
    when: str = ""


TAGGED = "prompts have tags; of tags with at most 16 values, such as `level/5`"
ANSWERS = "the scorer extracts answers"
SUPERVISED = "also supervised steps"
REFERENCE = "the starting policy is consulted: `update.kl.coefficient` above 0, or `update.kl.logged`"
VALUE = "there is a value model"

_METRICS: dict[str, dict[str, Metric]] = {
    "Which step": {
        "step": Metric("1", "Number of the step, from 0.", SUPERVISED),
        "version": Metric("1", "Version of the weights the step made: step + 1."),
        "time": Metric("s", "When the row was written, seconds since 1970.", SUPERVISED),
    },
    "Rewards": {
        "reward_mean": Metric("reward", "Mean reward of the samples that could be scored."),
        "pass_at_<k>": Metric(
            "reward",
            "Unbiased estimate of the expected best reward of k samples, a mean over groups with at least k scored "
            "samples; pass@k where rewards are 0 or 1.",
        ),
        "live_group_fraction": Metric("1", "Share of the groups trained on with an advantage other than 0."),
        "verdict_<status>": Metric("1", "Share of the batch's samples with this verdict; absent where there is none."),
        "truncated_fraction": Metric("1", "Share of the batch's samples cut at their length limit."),
        "length_mean": Metric("tokens", "Mean length of the batch's samples, all turns together."),
        "turns_mean": Metric("turns", "Turns of a sample.", "the job has turns, and some sample more than one"),
        "distinct_answers": Metric("answers", "Different answers to a prompt, a mean over groups.", ANSWERS),
        "prompts_met": Metric("prompts", "Different prompts trained on since the start."),
        "prompts_solved": Metric("prompts", "Those of them of which some sample has passed, at any step so far."),
        "cumulative_solve_rate": Metric("1", "`prompts_solved` by `prompts_met`."),
    },
    "By tag": {
        "reward_mean_by_tag": Metric("reward", "Mean reward of the batch's prompts with a value of a tag.", TAGGED),
        "length_mean_by_tag": Metric("tokens", "Mean length of their samples.", TAGGED),
        "entropy_by_tag": Metric(
            "nats/token",
            "Mean of -log-prob of their sample tokens as they were drawn: an estimate of the policy's entropy.",
            TAGGED,
        ),
        "distinct_answers_by_tag": Metric("answers", "`distinct_answers` of them.", f"{ANSWERS}; {TAGGED}"),
        "cumulative_solve_rate_by_tag": Metric("1", "`cumulative_solve_rate` of all such prompts met.", TAGGED),
    },
    "The update": {
        "loss": Metric(
            "1",
            "The loss descended, over all ranks; of several updates of a batch, the last. Supervised: nats per token.",
            SUPERVISED,
        ),
        "entropy": Metric("nats/token", "Mean entropy of the policy's distribution at the sample tokens.", SUPERVISED),
        "ratio_mean": Metric("1", "Mean PPO ratio over tokens, in the batch's last update."),
        "ratio_max": Metric("1", "Largest PPO ratio."),
        "clip_fraction": Metric("1", "Share of tokens whose gain is clipped: they give no policy gradient."),
        "correction_mean": Metric("1", "Mean behaviour correction over tokens, after its cap."),
        "truncated_share": Metric("1", "Share of tokens whose behaviour correction is over its cap."),
        "companion_truncated_share": Metric(
            "1",
            "Share of the companions' importance weights that were over `weight_cap`, a mean over groups.",
            "the objective has companion weights",
        ),
        "grad_norm": Metric("1", "Global norm of the gradient before clipping; the last update's.", SUPERVISED),
        "learning_rate": Metric("1", "Learning rate of the step.", SUPERVISED),
        "tokens": Metric("tokens", "Sample tokens trained on; supervised: answer tokens.", SUPERVISED),
        "computed_tokens": Metric(
            "tokens", "Those that went through the model: all of measured groups, of others those with a gradient."
        ),
    },
    "Distance": {
        "kl_k1": Metric("nats/token", "Mean of `log pi - log ref` against the starting policy.", REFERENCE),
        "kl_k3": Metric("nats/token", "Mean of `ref/pi - 1 - log(ref/pi)` against the starting policy.", REFERENCE),
        "logprob_mismatch_mean": Metric(
            "nats/token",
            "Mean distance between generator's and learner's log-prob of a token sampled under the version trained.",
            "some tokens were",
        ),
        "logprob_mismatch_max": Metric("nats/token", "Largest such distance.", "some tokens were"),
        "lag_histogram": Metric("tokens", "Tokens trained on by lag: learner's version less the token's."),
    },
    "Value model": {
        "value_loss": Metric("reward²", "Clipped value loss, a mean over scored samples; the last update's.", VALUE),
        "value_mean": Metric("reward", "Mean V(x) over scored samples, before the value model's last update.", VALUE),
        "value_grad_norm": Metric("1", "Global norm of the value model's gradient before clipping.", VALUE),
    },
    "Time": {
        "seconds_step": Metric("s", "From the end of the step before to the end of this one.", SUPERVISED),
        "seconds_wait": Metric("s", "The learner waited for groups."),
        "seconds_learn": Metric("s", "The learner's step, as the coordinator sees it."),
        "seconds_prepare": Metric(
            "s", "Of that: layout, the passes before the update (starting policy, anchor, value model), advantages."
        ),
        "seconds_update": Metric("s", "Of that: forward, backward and optimiser."),
        "seconds_publish": Metric("s", "Weights gathered; the learner can not step meanwhile."),
        "seconds_broadcast": Metric("s", "Gathered weights stored and sent, until the last actor serves them."),
        "seconds_stalled_max": Metric("s", "Longest any actor stood still for it."),
        "seconds_generate_mean": Metric("s", "Generation of a group, a mean over the batch."),
        "seconds_score_mean": Metric("s", "Scoring of a group, a mean over the batch."),
        "tokens_per_second": Metric("tokens/s", "`tokens` by the time the ranks took.", SUPERVISED),
        "samples_per_second": Metric("samples/s", "Samples of the batch by `seconds_step`."),
        "weight_group_share": Metric(
            "1", "Share of the actors that took them from the weight group, not from the object store."
        ),
        "weight_bytes": Metric("bytes", "Size of the weights published."),
    },
    "Accounting": {
        "groups_admitted": Metric("groups", "Admitted since the start: the three below together."),
        "groups_trained": Metric("groups", "Trained on since the start."),
        "groups_dropped": Metric("groups", "Dropped, each with a reason, since the start."),
        "groups_in_flight": Metric("groups", "Neither trained on nor dropped so far."),
    },
}

EVALUATION: Mapping[str, Metric] = MappingProxyType(
    {
        "version": Metric("1", "Version of the weights that was asked; 0 is the model of the job."),
        "prompts": Metric("prompts", "Prompts asked."),
        "n": Metric("samples", "Samples of each prompt."),
        "estimates": Metric(
            "reward",
            "For each k: mean over prompts of the unbiased estimate of max@k, which on 0/1 rewards is pass@k, and the "
            "ends `low` and `high` of its 95% bootstrap interval over prompts. Sinks: `pass_at_<k>`.",
        ),
        "majority": Metric(
            "reward", "The same for maj@k. Sinks: `maj_at_<k>`.", f"{ANSWERS}, and pays equal ones alike"
        ),
        "distinct_answers": Metric("answers", "Different answers to a prompt, a mean over prompts.", ANSWERS),
        "length_mean": Metric("tokens", "Mean length of a sample."),
        "entropy": Metric("nats/token", "Mean of -log-prob of the sample tokens as they were drawn."),
        "by_tag": Metric(
            "", "All of these but `version` and `n` for the prompts of each value of each tag of at most 64 values."
        ),
    }
)

METRICS: Mapping[str, Metric] = MappingProxyType(
    {name: metric for section in _METRICS.values() for name, metric in section.items()}
)


def family(name: str) -> str | None:
    """The name in `METRICS` that defines ``name``; None for a name nobody defined."""
    for known in METRICS:
        pattern = re.sub(r"<\w+>", r"\\w+", known)
        if re.fullmatch(pattern, name):
            return known
    return None


def name_part(text: str) -> str:
    """A tag, or its value, as a part of a metric's name that every sink takes: MLflow's rules are the strictest."""
    return re.sub(r"[^\w .:-]|^\W+$", "_", text)[:64].strip(" .") or "_"


def page() -> str:
    """The tables as Markdown."""
    lines = [
        "# Metrics",
        "",
        "Each row of `metrics.jsonl`, and of `/v1/runs/{id}/metrics`, is one step; each row of `evaluations.jsonl` one",
        "evaluation. This page is made by `python -m volley.metrics`; a test holds the names against what a run emits.",
    ]
    for title, section in (*_METRICS.items(), ("Evaluations", EVALUATION)):
        lines += ["", f"## {title}", "", "| name | unit | definition |", "|---|---|---|"]
        for name, metric in section.items():
            when = f" *({metric.when})*" if metric.when else ""
            lines.append(f"| `{name}` | {metric.unit or 'table'} | {metric.definition}{when} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the page."""
    print(page(), end="")  # noqa: T201 - this is its output


if __name__ == "__main__":
    main()
