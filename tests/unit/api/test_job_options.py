"""DeepSpeed options that a job may set, over the API or locally; bounds of a job's numbers."""

from typing import Any

import pytest
from pydantic import ValidationError

from services.api.jobs import refusals
from services.api.problems import Problem
from services.api.routes.runs import check_changeable
from services.api.settings import ApiSettings
from tests.unit.api.job_tree import job_tree
from volley.job import RLJob
from volley.sampling import Sampling
from volley.state import Observed
from volley.update import LearnerSpec


def errors_for(options: dict[str, Any], **settings: Any) -> dict[str, str]:
    server = ApiSettings.model_validate({"redis_url": "x", **settings})
    return {each.pointer: each.detail for each in refusals({"learner": {"deepspeed": options}}, server)}


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"torch_autocast": {"lower_precision_safe_modules": ["os.system"]}}, "torch_autocast"),
        ({"csv_monitor": {"enabled": True, "output_path": "/etc"}}, "csv_monitor"),
        ({"flops_profiler": {"output_file": "/etc/x"}}, "flops_profiler"),
        ({"checkpoint": {"writer": {}}}, "checkpoint"),
        ({"zero_optimization": {"offload_param": {"device": "cpu", "nvme_path": "/x"}}}, "offload_param/nvme_path"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer/device"),
        ({"zero_optimization": {"leaf_module": {"classes": ["os.X"]}}}, "zero_optimization/leaf_module"),
        ({"zero_optimization": {"overlap_comm": ["a"]}}, "zero_optimization/overlap_comm"),
        ({"bf16": "os.system"}, "bf16"),
    ],
)
def test_deepspeed_options_that_name_code_or_files_need_all_code_allowed(options: dict[str, Any], where: str) -> None:
    (pointer,) = errors_for(options)
    assert pointer.startswith("/job/learner/deepspeed/")
    assert pointer.endswith(where)
    assert errors_for(options, allow_code=["*"]) == {}


@pytest.mark.parametrize(
    ("rollout", "where", "allowed"),
    [
        ({"kind": "program", "target": "agents.maze:play"}, "target", "agents"),
        ({"kind": "tools", "tools": [{"kind": "function", "target": "agents.tools:look"}]}, "tools/0/target", "agents"),
        ({"kind": "verifiers", "python": "/srv/env/bin/python"}, "python", "*"),
        ({"kind": "openenv", "python": "/srv/env/bin/python", "app": "echo:app"}, "python", "*"),
        ({"kind": "program", "target": "agents.maze:play", "python": "/bin/sh"}, "python", "*"),
    ],
)
def test_an_interpreter_a_program_and_a_function_need_code_allowed(
    rollout: dict[str, Any], where: str, allowed: str
) -> None:
    def pointers(*allow_code: str) -> set[str]:
        server = ApiSettings.model_validate({"redis_url": "x", "allow_code": allow_code})
        return {each.pointer for each in refusals({"rollout": rollout}, server)}

    assert f"/job/rollout/{where}" in pointers()
    assert f"/job/rollout/{where}" in pointers("agent", "agents_of_others")
    assert pointers(allowed) == set()


def tracking_errors(uri: object, **settings: Any) -> list[str]:
    server = ApiSettings.model_validate({"redis_url": "x", **settings})
    job = {"sinks": [{"kind": "mlflow", "tracking_uri": uri}]}
    found = list(refusals(job, server))
    assert all(each.pointer == "/job/sinks/0/tracking_uri" for each in found)
    return [each.detail for each in found]


@pytest.mark.parametrize(
    "uri", ["http://evil.example", "https://evil.example:5000/x", "postgresql://evil.example/db", "http://127.0.0.1.evil.example",
            "http://[2001:db8::1]:5000", "HTTP://EVIL.example", "http:\\\\evil.example@mlflow.example"],
)  # fmt: skip
def test_mlflow_credentials_go_only_to_hosts_the_server_names(uri: str) -> None:
    assert tracking_errors(uri, tracking_hosts=["mlflow.example"])


def test_a_server_may_allow_any_tracking_host() -> None:
    assert tracking_errors("http://any.example", tracking_hosts=["*"]) == []


@pytest.mark.parametrize(
    "uri", [None, "file:///mnt/mlruns", "sqlite:////mnt/mlflow.db", "databricks", "http://localhost:5000", "http://[::1]:5000",
            "https://mlflow.example", "https://MLflow.example:5000/path"],
)  # fmt: skip
def test_named_and_local_tracking_servers_are_accepted(uri: str | None) -> None:
    assert tracking_errors(uri, tracking_hosts=["mlflow.example"]) == []


@pytest.mark.parametrize(
    "uri", ["http://user:pass@localhost", "http://localhost?token=x", "postgresql://localhost/db?password=x"]
)
def test_a_tracking_uri_holds_no_secret(uri: str) -> None:
    (detail,) = tracking_errors(uri)
    assert "contains a secret" in detail


def test_numbers_and_known_names_are_accepted() -> None:
    options = {
        "zero_optimization": {
            "overlap_comm": False,
            "stage3_max_live_parameters": 1e8,
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": None},
    }
    assert errors_for(options) == {}
    assert LearnerSpec(deepspeed=options).deepspeed == options


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"zero_optimization": {"stage": 2}}, "always uses stage 3"),
        ({"zero_optimization": True}, "must be a mapping"),
        ({"train_batch_size": 8}, "write prompts_per_step"),
        ({"train_micro_batch_size_per_gpu": 8}, "tokens_per_micro_batch"),
        ({"gradient_accumulation_steps": 8}, "tokens_per_micro_batch"),
        ({"optimizer": {"type": "Adam"}}, "write the job's optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "optimizer.schedule"),
        ({"sequence_parallel_size": 2}, r"learner\.sequence_parallel"),
    ],
)
def test_options_that_the_learner_sets_itself_are_rejected(options: dict[str, Any], instead: str) -> None:
    with pytest.raises(ValidationError, match=instead):
        LearnerSpec(deepspeed=options)
    assert LearnerSpec(deepspeed={"zero_optimization": {"stage": 3}})


@pytest.mark.parametrize(
    ("name", "most"), [("seed", 2**63 - 1), ("steps", 10**9), ("prompts_per_step", 10**6), ("max_lag", 10_000)]
)
def test_numbers_of_a_job_are_bounded(name: str, most: int) -> None:
    assert getattr(RLJob.model_validate(job_tree(**{name: most})), name) == most
    with pytest.raises(ValidationError, match=f"(?s){name}.*less than or equal to {most}"):
        RLJob.model_validate(job_tree(**{name: most + 1}))
    with pytest.raises(ValidationError):
        Sampling(n=10**5 + 1)


def test_a_done_run_cannot_be_changed() -> None:
    with pytest.raises(Problem, match="the run is done: it cannot be changed any more"):
        check_changeable(Observed(updated=1.0, state="done"))
    with pytest.raises(Problem, match="resume it first"):
        check_changeable(Observed(updated=1.0, state="failed"))
    check_changeable(Observed(updated=1.0, state="running"))


def webhook_errors(webhook: dict[str, Any], **settings: Any) -> dict[str, str]:
    server = ApiSettings.model_validate({"redis_url": "x", **settings})
    return {each.pointer: each.detail for each in refusals({"notify": [webhook]}, server)}


def test_the_server_calls_only_hosts_that_its_operator_names(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = ("http://localhost/x", "http://127.0.0.1:6379/", "http://169.254.169.254/latest", "http://other.example")
    for url in inside:
        (detail,) = webhook_errors({"url": url}, webhook_hosts=["hooks.example"]).values()
        assert "volley up --webhook-host" in detail
    for url in ("https://hooks.example/x", "https://HOOKS.example:8443/x"):
        assert webhook_errors({"url": url}, webhook_hosts=["Hooks.example"]) == {}
    assert webhook_errors({"url": "https://any.example"}, webhook_hosts=["*"]) == {}
    secret = webhook_errors({"url": "https://any.example?token=abc"}, webhook_hosts=["*"])
    assert "contains a secret" in secret["/job/notify/0/url"]


def test_a_signing_key_must_be_in_the_servers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    webhook = {"url": "https://hooks.example", "secret_env": "VOLLEY_WEBHOOK_A"}
    monkeypatch.delenv("VOLLEY_WEBHOOK_A", raising=False)
    missing = webhook_errors(webhook, webhook_hosts=["*"])
    assert "VOLLEY_WEBHOOK_A is not set" in missing["/job/notify/0/secret_env"]
    monkeypatch.setenv("VOLLEY_WEBHOOK_A", "whsec_" + "A" * 44)
    assert webhook_errors(webhook, webhook_hosts=["*"]) == {}
