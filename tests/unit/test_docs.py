"""The pages say what is so: links lead somewhere, commands and job files parse, generated pages are up to date."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from services.cli import app
from volley import metrics, reference
from volley.job import JOB

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/**/*.md"), *ROOT.glob("examples/**/*.md")]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.M | re.S)
HEADING = re.compile(r"^#+ (.+)$", re.M)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """The fenced blocks of ``page`` in one of ``languages``."""
    return (body for language, body in FENCE.findall(page.read_text()) if language in languages)


def anchor(heading: str) -> str:
    """As Markdown renderers make it."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return "".join(each for each in plain if each.isalnum() or each in " -_").replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(heading) for heading in HEADING.findall(page.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_leads_somewhere(page: Path) -> None:
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
    """The command lines of ``page``, words of each."""
    for block in blocks(page, "bash", "sh", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line.removeprefix("$ "), comments=True)
            except ValueError:
                continue  # a line of a here-document
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
    """Raises what the command line would refuse; starts nothing."""
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
def test_every_make_target_and_module_is_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for words in commands(page):
        if words[0] == "make":
            assert {word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)} <= targets, words
        if "-m" in words and words[words.index("-m") + 1].partition(".")[0] in ("benchmarks", "examples", "volley"):
            module = ROOT / words[words.index("-m") + 1].replace(".", "/")
            assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), words


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_whole_job_is_one(page: Path) -> None:
    for block in blocks(page, "yaml"):
        if re.match(r"\s*(#.*\n)*kind: (rl|sft|eval|rft)\b", block):
            JOB.validate_python(yaml.safe_load(block))


def test_generated_pages_are_up_to_date() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == metrics.page(), "python -m volley.metrics > docs/metrics.md"
    made = reference.page()
    assert (ROOT / "docs/configuration.md").read_text() == made, "python -m volley.reference > docs/configuration.md"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").exists()
