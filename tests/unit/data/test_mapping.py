"""Fields, filters, tags, templates and chat templates; mixtures of files; the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from actors.gateway.rendering import Renderer, Setting
from reward_servers.scorers.countdown import Countdown
from services.cli import app
from services.data.chat import plain_text_notice
from services.data.check import examine, lines, load_spec
from services.data.prompts import read_prompts
from services.data.report import DropReport
from tests.chat_models import chat_tokenizer
from tests.models import character_tokenizer, tiny_llama
from volley.data import DataSpec
from volley.errors import DataError, JobError
from volley.scoring import CountdownScorer

ROWS = [
    {"q": "one", "a": "1", "meta": {"level": 1, "tags": ["x", "y"]}, "tests": '[{"stdin": "1"}]'},
    {"q": "two", "a": "22", "meta": {"level": 5, "tags": []}, "tests": "[]"},
    {"q": "three", "a": None, "meta": {"level": "10"}, "tests": "[]"},
]
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}? {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant?{% endif %}"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "x.jsonl"


def read(path: Path, **options: Any) -> Any:
    return read_prompts(DataSpec.model_validate({"path": path, "prompt_field": "q", **options}))


def test_fields_are_renamed_by_path_and_json_texts_decoded(path: Path) -> None:
    first = read(path, fields={"answer": "a", "level": "meta.level"}, json_fields=["tests"], tags=["level"])[0]
    assert (first.reference["answer"], first.reference["level"]) == ("1", 1)
    assert first.reference["tests"] == [{"stdin": "1"}]
    assert first.tags == {"level": "1"}
    assert read(path, tags=["meta.tags"], take=1)[0].tags == {"meta.tags": "x,y"}
    with pytest.raises(DataError, match=r"x\.jsonl:2: no field 'meta.none'|x\.jsonl:1: no field 'meta.none'"):
        read(path, fields={"z": "meta.none"})
    with pytest.raises(DataError, match=r":1: field 'q' is not JSON"):
        read(path, json_fields=["q"])
    with pytest.raises(DataError, match=r"tag 'meta' is an object; name one of its fields: meta.level"):
        read(path, tags=["meta"])
    path.write_text(json.dumps({"q": "a", "tests": '{"stdin": "", "stdin": "1"}'}))
    with pytest.raises(DataError, match=r":1: field 'tests' is not JSON: the key 'stdin' appears twice"):
        read(path, json_fields=["tests"])


@pytest.mark.parametrize(
    ("field", "op", "value", "kept"),
    [
        ("meta.level", ">=", 5, ["two", "three"]),
        ("meta.level", "<", 5, ["one"]),
        ("meta.level", "==", 10, ["three"]),
        ("meta.level", "in", [1, 10], ["one", "three"]),
        ("meta.level", "not in", [1, 10], ["two"]),
        ("a", "==", "22", ["two"]),
        ("a", "!=", "22", ["one", "three"]),
        ("a", "==", None, ["three"]),
        ("a", "present", True, ["one", "two"]),
        ("a", "present", False, ["three"]),
        ("a", ">", 3, ["two"]),
        ("q", "contains", "t", ["two", "three"]),
        ("meta.tags", "contains", "y", ["one"]),
        ("q", "length <=", 3, ["one", "two"]),
        ("meta.tags", "length >=", 1, ["one"]),
        ("missing", "<", 3, []),
    ],
)
def test_filters_keep_the_rows_they_match(path: Path, field: str, op: str, value: Any, kept: list[str]) -> None:
    options = {"filters": [{"field": field, "op": op, "value": value}]}
    if not kept:
        with pytest.raises(JobError, match="has no rows"):
            read(path, **options)
        return
    assert [prompt.text for prompt in read(path, **options)] == kept


def test_filtered_rows_are_reported(path: Path) -> None:
    report = DropReport()
    spec = {"path": path, "prompt_field": "q", "filters": [{"field": "meta.level", "op": "<", "value": 3}]}
    read_prompts(DataSpec.model_validate(spec), report=report)
    assert report.as_json() == {
        "read": 3,
        "dropped": [{"reason": "filter meta.level < 3", "count": 2, "first": [f"{path}:2", f"{path}:3"]}],
    }


def test_templates_see_only_the_row(path: Path) -> None:
    assert read(path, template="Q: {{ q }} ({{ meta.level }})\n")[1].text == "Q: two (5)\n"
    with pytest.raises(DataError, match=r":1: template: 'nothing' is undefined"):
        read(path, template="{{ nothing }}")
    with pytest.raises(DataError, match=r":1: template: .*unsafe"):
        read(path, template="{{ q.__class__.__mro__ }}")
    with pytest.raises(JobError, match="line 1"):
        read(path, template="{% if %}")
    with pytest.raises(DataError, match=r":1: the rendered template is empty"):
        read(path, template="{# nothing #}")


def test_a_null_field_is_reported_as_null(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"q": null}\n')
    with pytest.raises(DataError, match=r":1: field 'q' is null"):
        read(tmp_path / "x.jsonl")


def test_a_chat_prompt_is_tokenized_by_the_models_own_template(path: Path, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    with pytest.raises(JobError, match="no chat template"):
        read_prompts(DataSpec.model_validate({"path": path, "prompt_field": "q", "chat": {}}), model)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(model)
    spec = DataSpec.model_validate({"path": path, "prompt_field": "q", "chat": {"system": "be brief"}})
    prompt = read_prompts(spec, model)[0]
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
    wanted = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer(prompt.text).input_ids == wanted
    with pytest.raises(JobError, match="needs the model's tokenizer"):
        read_prompts(spec)


PYTHON = {"type": "function", "function": {"name": "python", "description": "", "parameters": {"type": "object"}}}


def conversation(tmp_path: Path, arguments: object, **call: object) -> tuple[Path, list[dict[str, Any]]]:
    """A file with one conversation in which a tool is called, and its turns as templates expect them."""
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "what is 3 * 4?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "python", "arguments": arguments}}],
        },
        {"role": "tool", "content": "12"},
    ]
    turns[1] |= call
    (tmp_path / "x.jsonl").write_text(json.dumps({"q": turns}) + "\n")
    turns[1]["tool_calls"] = [{"function": {"name": "python", "arguments": {"code": "print(3 * 4)"}}}]
    return tmp_path / "x.jsonl", turns


@pytest.mark.parametrize("arguments", [{"code": "print(3 * 4)"}, '{"code": "print(3 * 4)"}'])
def test_turns_with_tools_are_rendered_as_the_gateway_renders_them(arguments: object, tmp_path: Path) -> None:
    model, tokenizer = tiny_llama(tmp_path / "model"), chat_tokenizer()
    tokenizer.save_pretrained(model)
    file, turns = conversation(tmp_path, arguments)
    chat = {"options": {"tools": [PYTHON]}}
    (prompt,) = read_prompts(DataSpec.model_validate({"path": file, "prompt_field": "q", "chat": chat}), model)
    gateway = Renderer(tokenizer, [tokenizer.eos_token_id])
    assert tokenizer(prompt.text).input_ids == gateway.prompt(turns, Setting((PYTHON,)))
    assert '"arguments": {"code": "print(3 * 4)"}' in prompt.text


@pytest.mark.parametrize(
    "call",
    [
        {"tool_calls": None},
        {"tool_calls": {"function": {"name": "python", "arguments": {}}}},
        {"tool_calls": [{"name": "python", "arguments": {}}]},
        {"tool_calls": [{"function": {"name": "python", "arguments": ["print(3 * 4)"]}}]},
        {"role": "user"},
        {"content": ["12"]},
    ],
)
def test_turns_that_are_no_calls_are_refused(call: dict[str, Any], tmp_path: Path) -> None:
    chat_tokenizer().save_pretrained(tiny_llama(tmp_path / "model"))
    file, _ = conversation(tmp_path, {}, **call)
    with pytest.raises(DataError, match=r':1: .* an assistant turn may have "tool_calls"'):
        read_prompts(DataSpec.model_validate({"path": file, "prompt_field": "q", "chat": {}}), tmp_path / "model")


def test_tools_are_refused_by_a_template_that_would_drop_them(path: Path, tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHAT
    tiny_llama(tmp_path / "model", tokenizer=tokenizer)
    spec = DataSpec.model_validate({"path": path, "prompt_field": "q", "chat": {"options": {"tools": [PYTHON]}}})
    with pytest.raises(JobError, match=r"data\.chat\.options\.tools: .* to chat_template\.jinja in the model's folder"):
        read_prompts(spec, tmp_path / "model")


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_chat_model_that_gets_plain_text_is_noticed(path: Path, tmp_path: Path, where: str) -> None:
    model, plain = tmp_path / "model", DataSpec.model_validate({"path": path, "prompt_field": "q"})
    assert not plain_text_notice(plain, model), "whatever is wrong with it, loading it says so"
    tiny_llama(model)
    assert not plain_text_notice(plain, model), "it is no chat model"
    if where == "chat_template.jinja":
        (model / where).write_text(CHAT)
    else:
        settings = json.loads((model / where).read_text())
        (model / where).write_text(json.dumps({**settings, "chat_template": CHAT}))
    assert "data: {chat: {}}" in plain_text_notice(plain, model)
    assert not plain_text_notice(DataSpec.model_validate({"path": path, "prompt_field": "q", "chat": {}}), model)
    mixed = {"sources": [{"name": "a", "weight": 1, "path": path, "prompt_field": "q", "chat": {}}]}
    assert not plain_text_notice(DataSpec.model_validate(mixed), model)


def test_check_prints_the_first_prompt_as_the_model_gets_it(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": 'say "x"\n'}) + "\n")
    result = CliRunner().invoke(app, ["data", "check", str(tmp_path / "x.jsonl")])
    assert r'first       "say \"x\"\n"' in result.output
    long = "a" * 500 + "b" * 500
    (tmp_path / "y.jsonl").write_text(json.dumps({"prompt": long}) + "\n")
    result = CliRunner().invoke(app, ["data", "check", str(tmp_path / "y.jsonl")])
    assert f'"{"a" * 120} [...] {"b" * 120}"' in result.output


def test_a_mixture_prefixes_prompt_ids_and_names_an_empty_source(path: Path, tmp_path: Path) -> None:
    (tmp_path / "y.jsonl").write_text('{"prompt": "y"}\n')
    sources: list[dict[str, Any]] = [
        {"name": "main", "weight": 3, "path": path, "prompt_field": "q"},
        {"name": "more", "weight": 1, "path": tmp_path / "y.jsonl"},
    ]
    prompts = read_prompts(DataSpec.model_validate({"sources": sources}))
    assert [prompt.id for prompt in prompts] == ["main/x:1", "main/x:2", "main/x:3", "more/y:1"]
    assert prompts[3].tags == {"dataset": "more"}
    sources[1]["filters"] = [{"field": "z", "op": "present"}]
    with pytest.raises(JobError, match=r"source more .* has no rows"):
        read_prompts(DataSpec.model_validate({"sources": sources}))


def test_check_tells_all_bad_rows_up_to_fifty(tmp_path: Path) -> None:
    rows = ['{"prompt": "a", "id": 1}', "no", '{"prompt": 3}', '{"prompt": "a"}']
    (tmp_path / "x.jsonl").write_text("\n".join(rows))
    result = CliRunner().invoke(app, ["data", "check", str(tmp_path / "x.jsonl")])
    assert result.exit_code == 1
    assert "2 prompts of 4 rows" in result.output
    assert "1 prompts are identical to an earlier one" in result.output
    assert "x.jsonl:2: not JSON" in result.output
    assert "x.jsonl:3: field 'prompt' is a number" in result.output
    (tmp_path / "y.jsonl").write_text("no\n" * 80)
    result = CliRunner().invoke(app, ["data", "check", str(tmp_path / "y.jsonl")])
    assert "bad rows: 50 or more" in result.output
    assert "y.jsonl:50:" in result.output


@pytest.mark.parametrize(
    ("content", "why"),
    [("", "x.jsonl has no rows"), ("\n\n", "has no rows"), ('{"other": 1}\n', "field 'prompt'")],
)
def test_check_says_why_a_file_cannot_be_used(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    result = CliRunner().invoke(app, ["data", "check", str(tmp_path / "x.jsonl")])
    assert result.exit_code == 1
    assert why in result.output


def test_check_reports_that_all_rows_were_dropped(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "job.yaml").write_text(
        "kind: rl\nname: x\nsteps: 1\nmodel: {path: model}\nscorer: {kind: countdown}\nobjective: {kind: mean}\n"
        "data: {path: x.jsonl, filters: [{field: z, op: present}]}\n"
    )
    (spec,) = load_spec(tmp_path / "job.yaml", None)
    assert "no rows: all 1 were dropped" in "\n".join(lines(examine(spec[1]), None))


def test_check_counts_tokens_with_a_model(path: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "abcde"}\n')
    model = tiny_llama(tmp_path / "model")
    result = CliRunner().invoke(app, ["data", "check", str(tmp_path / "p.jsonl"), "--model", str(model)])
    assert result.exit_code == 0, result.output
    assert "tokens      min 4, median 5, 99% 5, max 6, total 10" in result.output


def test_convert_and_decontaminate_from_the_command_line(tmp_path: Path) -> None:
    fixtures = Path(__file__).parents[2] / "fixtures" / "data"
    out, clean, report = tmp_path / "math.jsonl", tmp_path / "clean.jsonl", tmp_path / "report.json"
    invoke = CliRunner().invoke
    result = invoke(app, ["data", "convert", "math", str(fixtures / "math/train"), str(out)])
    assert result.exit_code == 0, result.output
    assert "3 prompts of 4 rows" in result.output
    assert "tags: [level, subject]" in result.output
    spec = DataSpec.model_validate({"path": out, "id_field": "id", "tags": ["level", "subject"]})
    assert read_prompts(spec)[0].tags == {"level": "1", "subject": "Algebra"}
    (tmp_path / "eval.jsonl").write_text('{"prompt": "WRITE 0.375 as a fraction, in lowest terms"}\n')
    command = ["data", "decontaminate", str(out), "--against", str(tmp_path / "eval.jsonl")]
    result = invoke(app, [*command, "--out", str(clean), "--report", str(report)])
    assert result.exit_code == 0, result.output
    assert "1 of 3 prompts overlap: 1 exactly" in result.output
    assert [prompt.id for prompt in read_prompts(DataSpec(path=clean, id_field="id"))] == ["algebra/1", "geometry/1"]
    assert json.loads(report.read_text())["overlaps"][0]["id"] == "algebra/2"
    assert isinstance(invoke(app, ["data", "convert", "math", str(fixtures), str(out)]).exception, JobError)


def test_every_data_block_on_the_page_is_valid() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    blocks = [block.partition("\n```")[0] for block in page.split("```yaml\n")[1:]]
    assert len(blocks) >= 6
    for block in blocks:
        DataSpec.model_validate(yaml.safe_load(block)["data"])


def test_a_list_in_a_csv_is_text_unless_the_job_says_json(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('prompt,numbers,target\na,"[1, 2]",3\n')
    (row,) = read_prompts(DataSpec(path=path))
    with pytest.raises(JobError, match=r"'numbers' is a string here: set data\.json_fields: \[numbers\]"):
        Countdown.check_row(CountdownScorer(), row)
    (row,) = read_prompts(DataSpec(path=path, json_fields=("numbers", "target")))
    Countdown.check_row(CountdownScorer(), row)
