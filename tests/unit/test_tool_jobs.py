"""Jobs with tools: what they need, what a service accepts, and which chat templates show tools to the model."""

import copy
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.api.jobs import refusals
from services.api.settings import ApiSettings
from services.data.chat import check_template
from services.runs.trial import chat_notice
from services.store.desired import change as changed
from tests.chat_models import CHATML, chat_tokenizer
from volley.errors import JobError
from volley.job import JOB, EvalJob, RLJob
from volley.rollout import PythonTool, ToolsRollout
from volley.state import Desired

TREE: dict[str, Any] = {
    "kind": "rl",
    "name": "tools",
    "steps": 1,
    "model": {"path": "/m"},
    "data": {"path": "/d.jsonl"},
    "objective": {"kind": "mean"},
    "scorer": {"kind": "exact"},
    "rollout": {"kind": "tools", "tools": [{"kind": "python"}]},
    "gateway": {"tool_parser": "hermes"},
}
ALLOWED = ApiSettings(redis_url="redis://x", allow_code=("other",))


def job(**changes: Any) -> RLJob | EvalJob:
    tree = {key: value for key, value in {**copy.deepcopy(TREE), **changes}.items() if value is not None}
    made = JOB.validate_python(tree)
    assert isinstance(made, RLJob | EvalJob)
    return made


def test_a_job_with_tools() -> None:
    rollout = job().rollout
    assert isinstance(rollout, ToolsRollout)
    assert rollout.tools == (PythonTool(),)
    assert JOB.validate_json(job().model_dump_json()) == job()
    assert job(kind="eval", steps=None, objective=None).rollout == rollout


OPENENV = {"kind": "openenv", "python": "/srv/env/bin/python", "app": "echo_env.server.app:app"}


def test_openenv_needs_a_parser_only_if_the_model_calls_tools() -> None:
    assert job(rollout=OPENENV).gateway.tool_parser == "hermes"
    assert job(rollout={**OPENENV, "action": "message"}, gateway={}, scorer=None).gateway.tool_parser is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"scorer": None}, "scorer: required with rollout kind: tools"),
        ({"gateway": {}}, r"write gateway: \{tool_parser: hermes\}"),
        ({"data": {"path": "/d.jsonl", "chat": {}}}, "remove data.chat"),
        ({"evaluation": {"data": {"path": "/d.jsonl", "chat": {}}}}, "remove data.chat"),
        ({"rollout": {"kind": "tools", "tools": []}}, "at least 1 item"),
        (
            {"rollout": {"kind": "tools", "tools": [{"kind": "python", "state": "episode"}]}},
            r"write slots: 64, or environment_workers: \{episodes: 2\}",
        ),
        ({"rollout": {"kind": "tools", "tools": [{"kind": "shell"}]}}, "'python', 'function'"),
        ({"rollout": {"kind": "tools", "tools": [{"kind": "function", "target": "search"}]}}, "target"),
        ({"rollout": {"kind": "magic"}}, "'program', 'verifiers', 'openenv', 'tools'"),
        ({"rollout": OPENENV, "gateway": {}}, r"write gateway: \{tool_parser: hermes\}, or action: FIELD"),
        ({"rollout": {**OPENENV, "reward": "none"}, "scorer": None}, "scorer: required with rollout reward: none"),
        ({"rollout": {**OPENENV, "url": "http://127.0.0.1:8000"}}, "app and url exclude each other"),
        ({"rollout": {**OPENENV, "app": None}}, "write app: package.module:app"),
        ({"rollout": {**OPENENV, "app": None, "url": "127.0.0.1:8000"}}, "url"),
    ],
)
def test_what_cannot_be_is_said_with_what_to_write(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        job(**changes)


def test_a_service_imports_only_functions_that_it_allows() -> None:
    tree = {**TREE, "rollout": {"kind": "tools", "tools": [{"kind": "python"}, {"kind": "function", "target": "a:f"}]}}
    (problem,) = refusals(tree, ALLOWED)
    assert problem.pointer == "/job/rollout/tools/1/target"
    assert list(refusals(TREE, ALLOWED)) == []


WITHOUT_TOOLS = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
WITHOUT_ANSWERS = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")


def test_templates_that_show_tools() -> None:
    check_template(chat_tokenizer(), "rollout kind: tools")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (WITHOUT_TOOLS, "leaves out the tools and the names of called tools and the arguments of calls"),
        (WITHOUT_ANSWERS, "leaves out the answers of tools"),
        ("{{ raise_exception('no tools') }}", "does not take tools: no tools"),
        (None, "does not take tools"),
    ],
)
def test_templates_that_do_not_fit(template: str | None, problem: str) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(JobError, match=problem):
        check_template(tokenizer, "rollout kind: tools")


def test_only_a_job_whose_prompts_reach_the_model_as_text_is_told_of_its_template(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    model = {"path": str(tmp_path)}
    assert "data: {chat: {}}" in chat_notice(job(model=model, rollout=None, gateway=None))
    assert chat_notice(job(model=model)) == ""


@pytest.mark.parametrize("change", [{"actors": 2}, {"reward_workers": 2}, {"paused": True}, {"max_lag": 1}])
def test_an_evaluation_can_be_stopped_but_not_steered(change: dict[str, Any]) -> None:
    evaluation = job(kind="eval", steps=None, objective=None, rollout=None, gateway=None)
    assert changed(Desired(), evaluation, {"stopped": True}).stopped
    with pytest.raises(JobError, match="does not apply to a job of kind eval, which can only be stopped and resumed"):
        changed(Desired(), evaluation, change)
