"""The data of the example with a tool."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from environments.tools.python import schema_of
from examples.tool_use.make_data import TEMPLATE, conversations, give_template, program, write_conversations
from services.data.chat import check_template
from services.jobs.job_file import load_job
from tests.chat_models import chat_tokenizer
from tests.models import tiny_llama
from volley.job import RLJob
from volley.rollout import PythonTool, ToolsRollout

JOB = TEMPLATE.with_name("rl.yaml")


def printed(code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})  # noqa: S102 - digits and operators
    return out.getvalue().strip()


def test_every_task_has_a_program_that_prints_its_answer(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    job = load_job(JOB)
    assert isinstance(job, RLJob)
    source = job.data.model_copy(update={"size": 200, "seed": 7})
    write_conversations(tmp_path / "rows.jsonl", source, 1.0)
    rows = list(map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines()))
    assert len(rows) == 400
    for call, answer in zip(rows[::2], rows[1::2], strict=True):
        written = json.loads(call["answer"].removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert written["name"] == "python"
        asked, called, shown = answer["prompt"]
        assert asked == call["prompt"][0]
        assert called["tool_calls"][0]["function"] == written
        assert printed(written["arguments"]["code"]) == shown["content"] == answer["answer"]


def test_the_share_of_conversations_that_call_the_tool() -> None:
    tasks = [(f"Solve {number} * 7.", str(7 * number)) for number in range(10, 60)]
    rows = list(conversations(tasks, 0.4, seed=3))
    assert len(rows) == 30 + 2 * 20
    asked = [row["prompt"][0]["content"] for row in rows if len(row["prompt"]) == 1]
    assert asked == [question for question, _ in tasks]
    assert rows == list(conversations(tasks, 0.4, seed=3))
    assert rows != list(conversations(tasks, 0.4, seed=4))


def test_the_warm_up_describes_the_tool_as_the_rl_job_does() -> None:
    warm_up, job = load_job(TEMPLATE.with_name("warm_up.yaml")), load_job(JOB)
    assert warm_up.data.chat is not None
    assert isinstance(job, RLJob)
    assert isinstance(job.rollout, ToolsRollout)
    (tool,) = job.rollout.tools
    assert isinstance(tool, PythonTool)
    assert warm_up.data.chat.options == {"tools": [schema_of(tool)]}


def test_a_question_without_an_expression_is_an_error() -> None:
    assert program("State it: 12 - 3 * 450 =") == "print(12 - 3 * 450)"
    with pytest.raises(ValueError, match="unpack"):
        program("What colour is it?")


def test_the_model_gets_a_template_that_writes_calls_as_the_warm_up_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = tiny_llama(tmp_path / "model", tokenizer=chat_tokenizer("{{ messages[0].content }}"))
    give_template(model, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    check_template(tokenizer, "here")
    assert (model / TEMPLATE.name).read_text() != TEMPLATE.read_text()  # the given folder is as it was
    _, answer = rows = list(conversations([("Solve 3 * 14.", "42")], 1.0, seed=0))
    turns = answer["prompt"]
    before = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text.startswith(before + rows[0]["answer"] + "<|im_end|>\n<|im_start|>tool\n42<|im_end|>")
