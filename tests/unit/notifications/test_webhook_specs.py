"""What a job's notify may say."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from services.evaluation.estimates import Sampled, summarise
from services.recording.sinks.base import evaluation_row
from tests.integration.api.servers import a_job
from volley.job import JOB
from volley.metrics import EVALUATION_FIGURES, matches
from volley.records import Prompt, Scores, Verdict, VerdictStatus
from volley.webhooks import WebhookSpec

URL = "https://hooks.example/volley"
HELD_OUT = {"data": {"path": "/data/heldout.jsonl"}, "ks": [1, 16]}


def job(*rules: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return a_job(notify=[{"url": URL, "rules": list(rules)}], **changes)


@pytest.mark.parametrize(
    "rule",
    [
        {"kind": "fell", "metric": "evaluation/pass_at_16", "by": 0.05},
        {"kind": "rose", "metric": "evaluation/by_tag/level/5/pass_at_1", "by": 0.05, "window": 1},
        {"kind": "above", "metric": "kl_k1", "limit": 0.1, "window": 10},
        {"kind": "below", "metric": "reward_mean_by_tag/level/5", "limit": -1},
        {"kind": "above", "metric": "verdict_infra_error", "limit": 0.1},
        {"kind": "no_step", "seconds": 600},
    ],
)
def test_rules_on_what_a_job_reports_are_accepted(rule: dict[str, Any]) -> None:
    found = JOB.validate_python(job(rule, evaluation=HELD_OUT))
    assert found.notify[0].rules[0].model_dump(exclude_unset=True) == rule
    assert JOB.validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("rule", "changes", "instead"),
    [
        ({"kind": "fell", "metric": "pass@16", "by": 0.05}, {}, "no metric of steps or evaluations"),
        ({"kind": "fell", "metric": "reward_maen", "by": 0.05}, {}, "did you mean reward_mean"),
        ({"kind": "fell", "metric": "evaluation/reward_mean", "by": 0.05}, {}, "no metric"),
        ({"kind": "above", "metric": "lag_histogram", "limit": 1}, {}, "no metric"),
        ({"kind": "above", "metric": "reward_mean_by_tag", "limit": 1}, {}, "no metric"),
        ({"kind": "above", "metric": "reward_mean/level/5", "limit": 1}, {}, "no metric"),
        ({"kind": "fell", "metric": "evaluation/pass_at_16", "by": 0.1}, {}, "evaluates nothing: give it evaluation"),
        (
            {"kind": "fell", "metric": "evaluation/pass_at_8", "by": 0.1},
            {"evaluation": HELD_OUT},
            r"add 8 to ks, which are \[1, 16\]",
        ),
        ({"kind": "fell", "metric": "kl_k1", "by": 0}, {}, "greater than 0"),
        ({"kind": "fell", "metric": "kl_k1", "limit": 1}, {}, "by"),
        ({"kind": "above", "metric": "kl_k1", "limit": 1, "window": 0}, {}, "greater than or equal to 1"),
        ({"kind": "no_step", "seconds": 1}, {}, "greater than or equal to 10"),
        ({"kind": "dropped"}, {}, "'fell', 'rose', 'above', 'below', 'no_step'"),
    ],
)
def test_rules_that_could_never_fire_are_rejected(rule: dict[str, Any], changes: dict[str, Any], instead: str) -> None:
    with pytest.raises(ValidationError, match=instead):
        JOB.validate_python(job(rule, **changes))


def test_other_kinds_of_job_report_less() -> None:
    own = {key: a_job()[key] for key in ("name", "model", "data")}
    on_loss = [{"url": URL, "rules": [{"kind": "above", "metric": "loss", "limit": 3}]}]
    on_kl = [{"url": URL, "rules": [{"kind": "above", "metric": "kl_k1", "limit": 3}]}]
    no_step = [{"url": URL, "rules": [{"kind": "no_step", "seconds": 60}]}]
    of_k = [{"url": URL, "rules": [{"kind": "below", "metric": "evaluation/pass_at_64", "limit": 0.5}]}]
    sft, of_eval = {**own, "kind": "sft", "steps": 2}, {**own, "kind": "eval", "scorer": {"kind": "exact"}}
    for fine in ({**sft, "notify": on_loss}, {**sft, "notify": no_step}, {**of_eval, "notify": of_k}):
        assert JOB.validate_python(fine).notify
    for wrong, instead in (
        ({**sft, "notify": on_kl}, "steps of a job of kind sft have no kl_k1"),
        ({**sft, "notify": of_k}, "evaluates nothing: remove the rule"),
        ({**of_eval, "notify": on_loss}, "an eval job has no steps"),
        ({**of_eval, "notify": no_step}, "an eval job has no steps"),
        ({**of_eval, "notify": of_k, "ks": [1, 2]}, r"add 64 to ks"),
    ):
        with pytest.raises(ValidationError, match=instead):
            JOB.validate_python(wrong)


@pytest.mark.parametrize(
    ("url", "instead"),
    [
        ("hooks.example/volley", "write http"),
        ("ftp://hooks.example/volley", "write http"),
        ("file:///etc/passwd", "write http"),
        ("https:///volley", "write http"),
        ("https://hooks.example/#x", "write http"),
        ("https://user:pass@hooks.example/", "contains a user name or password"),
        ("https://hooks.example/a b", "must encode"),
        ("https://hööks.example/", "must encode"),
        ("https://hooks.example:0/", "port 0"),
        ("https://hooks.example:99999/", "Port out of range"),
    ],
)
def test_only_plain_urls_are_accepted(url: str, instead: str) -> None:
    with pytest.raises(ValidationError, match=instead):
        WebhookSpec(url=url)


def test_a_webhook_names_only_keys_that_are_meant_for_it_and_has_something_to_report() -> None:
    assert WebhookSpec(url="http://HOOKS.example:8080/x", secret_env="VOLLEY_WEBHOOK_A").host == "hooks.example"
    for name in ("PATH", "VOLLEY_WEBHOOK_", "MY_VOLLEY_WEBHOOK_A", "VOLLEY_WEBHOOK_a"):
        with pytest.raises(ValidationError, match="VOLLEY_WEBHOOK_"):
            WebhookSpec(url=URL, secret_env=name)
    with pytest.raises(ValidationError, match="would never be called"):
        WebhookSpec(url=URL, states=())


def test_the_table_of_an_evaluations_figures_is_complete() -> None:
    prompts = [Prompt(id="a", text="x", tags={"level": "5"})]
    verdicts = tuple(Verdict(status=VerdictStatus.PASSED, reward=1.0, answer="7", rank=0.5) for _ in range(4))
    sampled = [Sampled(Scores.pack(verdicts), 8, -2.0, calls=4)]
    row = summarise(prompts, sampled, (1, 2), terms=((1, 0.5), (2, 0.5)), version=3, seed=0).row()
    names = {name for name in evaluation_row(row, 0.0).values if "/" not in name}
    unmatched = {name for name in names if not any(matches(name, known) for known in EVALUATION_FIGURES)}
    assert unmatched == set()
    unseen = {known for known in EVALUATION_FIGURES if not any(matches(name, known) for name in names)}
    assert unseen == set()
    assert np.isfinite(list(evaluation_row(row, 0.0).values.values())).all()
