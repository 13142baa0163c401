"""The pages are correct: links resolve, commands and job files parse, generated pages are up to date."""

import configparser
import doctest
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from services.cli import app
from services.sweeps.spec import SweepSpec
from tests.pages import DRAWINGS, PAGES, PARSED, ROOT, RUN, blocks, page_id, to_run
from volley import metrics, reference
from volley.job import JOB

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)
HEADING = re.compile(r"^#+ (.+)$", re.M)
BASE = {  # a complete job, to which fragments on the pages are added
    "kind": "rl",
    "name": "fragment",
    "steps": 2000,
    "model": {"path": "model"},
    "data": {"path": "prompts.jsonl"},
    "scorer": {"kind": "countdown"},
    "objective": {"kind": "max_at_k", "k": 8},
}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_is_checked(page: Path) -> None:
    for block in blocks(page):
        assert block.language in DRAWINGS | PARSED | RUN, f"{block.place}: say its language"
        if block.how == "not run":
            assert block.language in RUN, f"{block.place}: only commands may need what a test lacks"
            assert len(block.what) > 15, f"{block.place}: say why"
        if block.how == "run by":
            assert page.name in (ROOT / block.what).read_text(), f"{block.place}: {block.what} does not name the page"


@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page, "python")], ids=page_id)
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run the blocks of a page from top to bottom in one namespace; sessions print what the page shows."""
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {"__name__": page.stem}
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    for block in to_run(page, "python"):
        if block.text.startswith(">>>"):
            session = parser.get_doctest(block.text, known, block.place, str(page), block.line)
            runner.run(session, clear_globs=False)
            known.update(session.globs)
        else:
            exec(compile(block.text, block.place, "exec"), known)  # noqa: S102 - a page of this repository
    assert not runner.failures


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_data_in_blocks_is_valid(page: Path) -> None:
    for block in blocks(page):
        match block.language:
            case "yaml":
                fits(yaml.safe_load(block.text), block.place)
            case "json":
                values = [block.text] if block.text.startswith("{\n") else block.text.splitlines()
                assert all(isinstance(json.loads(value), dict) for value in values if value), block.place
            case "toml":
                tomllib.loads(block.text)
            case "ini":
                unit = configparser.ConfigParser()
                unit.read_string(block.text)
                parse(typer.main.get_command(app), shlex.split(unit["Service"]["ExecStart"])[1:])


def fits(tree: dict[str, Any], place: str) -> None:
    """Raises unless ``tree`` is a job or a valid part of one."""
    if "kind" in tree:
        JOB.validate_python(tree)
        return
    if "from" in tree:  # part of a network policy
        return
    if "base" in tree:
        assert list(SweepSpec.model_validate({"name": "fragment", **tree}).all_settings())
        return
    JOB.validate_python({**BASE, **tree})


def anchor(heading: str) -> str:
    """The anchor that Markdown renderers give to a heading."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return "".join(each for each in plain if each.isalnum() or each in " -_").replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(heading) for heading in HEADING.findall(page.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_resolves(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    dead = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, fragment = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        wrong = not target.exists() or not target.is_relative_to(ROOT)
        if wrong or (fragment and target.suffix == ".md" and fragment not in anchors(target)):
            dead.append(link)
    assert not dead


def commands(page: Path) -> Iterator[list[str]]:
    """The command lines on ``page``, each split into words."""
    for block in blocks(page):
        if block.language not in ("bash", "console"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line.removeprefix("$ "), comments=True)
            except ValueError:
                continue  # a line in a here-document
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_volley_command_parses(page: Path) -> None:
    root = typer.main.get_command(app)
    for words in commands(page):
        if Path(words[0]).name != "volley" or len(words) < 2:
            continue
        end = next((i for i, word in enumerate(words) if word in ("|", ">", "&&", ";", "&")), len(words))
        parse(root, words[1:end])


def parse(command: Any, words: list[str]) -> None:
    """Parse a command line without running it; raises if it is invalid."""
    context = typer.Context(command, info_name="volley")
    while hasattr(command, "commands"):
        name, found, words = command.resolve_command(context, words)
        assert found is not None, name
        command, context = found, typer.Context(found, info_name=name, parent=context)
        if hasattr(command, "commands") and (not words or words[0].startswith("-")):
            return
    if "--help" not in words:
        command.make_parser(context).parse_args(args=list(words))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_make_target_and_module_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for words in commands(page):
        if words[0] == "make":
            assert {word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)} <= targets, words
        if "-m" in words and words[words.index("-m") + 1].partition(".")[0] in ("benchmarks", "examples", "volley"):
            module = ROOT / words[words.index("-m") + 1].replace(".", "/")
            assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), words


def test_generated_pages_are_up_to_date() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == metrics.page(), "python -m volley.metrics > docs/metrics.md"
    made = reference.page()
    assert (ROOT / "docs/configuration.md").read_text() == made, "python -m volley.reference > docs/configuration.md"


def test_the_configuration_page_has_every_key_of_every_section() -> None:
    sections = dict(re.findall(r"^## (.+)\n\n(.*(?:\n(?!## ).*)*)", reference.page(), re.M))
    models = list(reference._models())
    assert len(sections) == len(models)
    for model, text in zip(models, sections.values(), strict=True):
        assert [name for name in model.model_fields if name != "kind" and f"`{name}`" not in text] == []
    assert "| `optimizer` | [Optimizer](#optimizer) (`{lr: 1e-05}`) |" in sections["kind: sft (job)"]
    assert "| `clip_norm` | number or null, > 0 (`1.0`) |" in sections["Optimizer"]
    assert "`lr`" in sections["Optimizer"].partition(" of [PolicyOptimizer]")[0]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").exists()
