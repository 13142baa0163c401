"""Output of commands: nothing is cut or broken at 80 columns, whole lines on a pipe, one shape of JSON."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from services.cli import app, doctor, sources, tables
from services.cli.sources import FolderRun
from services.cli.tables import headlines
from services.jobs.job_file import load_job
from services.recording.display import Display
from services.recording.recorder import _note
from services.recording.terminal import WHOLE_LINES, ItemList, Sentence, TableRow, TerminalTable
from services.store.folder import RunFolder
from tests.unit.cli.commands import Volley
from tests.unit.fake_api import FakeApi
from volley.client.server import find_server
from volley.state import Observed

ROOT = Path(__file__).parents[3]
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PROBLEM = "the learner died three times within an hour: lower learner.tokens_per_micro_batch or use more ranks"
LONG = "smollm2-135m-chain-sum-pass-at-8-with-a-name-of-sixty-three-chars-20261122-170947-99f0"
WITHOUT_JSON = {"schema", "serve", "reward-server"}  # one prints JSON only, two serve


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the output a terminal of 80 columns."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def busy(api: FakeApi) -> FakeApi:
    """A service with runs whose every field is long."""
    worker = {"name": "actor-0", "role": "actor", "state": "serving", "version": 3, "busy": 8, "pid": 12345}
    for name, state in (("best-of-8-20261122-170947-ab12", "running"), (LONG, "failed")):
        api.add(
            name,
            **{"state": state, "step": 1200, "steps": 100_000, "problem": PROBLEM if state == "failed" else ""},
            **{
                "actors": 12,
                "reward_workers": 16,
                "environment_workers_wanted": 3,
                "workers": (worker,),
                "checkpoint": 1,
                "checkpointed": 2.0,
            },
            groups={"generating": 1200, "scoring": 1300, "ready": 4400, "held": 5500, "slots": 6400},
            waiting=("learner has waited 9 s for group 4 of the batch, which actor-0 has generated since 33 s",),
        )
    api.tokens = {"somebody-with-a-rather-long-name": "operate"}
    owner, resources = "somebody-with-a-rather-long-name", {"CPU": 12.5, "GPU": 8.0}
    waits = f"waits for 12.5 CPUs and 8 GPUs: {owner}'s {LONG} holds 12.5"
    place = {"owner": owner, "priority": -10, "submitted": 1.0, "since": 2.0, "resources": resources, "most": resources}
    api.queue = {
        "items": [
            {**place, "run": LONG, "state": "admitted"},
            {**place, "run": "best-of-8-20261122-170947-ab12", "position": 1, "reason": waits, "preempted_by": LONG},
        ],
        "owners": [{"name": owner, "runs": 1, "cpus": 12.5, "gpus": 8.0, "limits": {"runs": 1, "cpus": 16.0}}],
    }
    details = {"learning_rate": 1e-6, "objective": {"k": 4}}
    record = {"id": "1-0", "time": 1.0, "who": owner, "action": "limit token", "run": LONG, "details": details}
    api.audit = [record] * 5
    return api


COMMANDS = (
    ("ls",),
    ("show", "best"),
    ("show", "smoll"),
    ("logs", "best"),
    ("token", "ls"),
    ("doctor",),
    ("queue",),
    ("audit",),
    ("compare", "best", "smoll", "best"),
)


def plain(text: str) -> str:
    return ESCAPE.sub("", text)


def words(text: str) -> set[str]:
    """The words of a text; digits are alike, because the host's free memory changes."""
    return {re.sub(r"\d", "0", word) for word in text.split()}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_at_80_columns_no_line_is_longer_and_no_word_broken(
    busy: FakeApi, volley: Volley, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    whole = volley(*command)[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    lines = plain(volley(*command)[1]).splitlines()
    assert [line for line in lines if len(line) > 80 and len(line.split()) > 3] == [], "only an id may be longer"
    assert words(" ".join(lines)) - words(whole) == set()
    assert any(line for line in lines)


def test_on_a_pipe_every_row_is_one_line_whatever_the_width(
    busy: FakeApi, volley: Volley, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = volley("ls")
    header, failed, running = out.splitlines()
    assert header.split() == ["run", "kind", "state", "step", "objective", "reward", "workers", "age"]
    assert failed.split()[:4] == [LONG, "rl", "failed", "1200/100000"]
    assert failed.endswith(f"  {PROBLEM}")
    assert running.split()[:4] == ["best-of-8-20261122-170947-ab12", "rl", "running", "1200/100000"]
    assert "\x1b" not in out


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_on_a_pipe_no_output_depends_on_the_width(
    busy: FakeApi, volley: Volley, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    wide = volley(*command)[1]
    monkeypatch.setenv("COLUMNS", "40")
    assert re.sub(r"[\d.]+", "0", volley(*command)[1]) == re.sub(r"[\d.]+", "0", wide)


def drawn(part: object, width: int) -> list[str]:
    output = io.StringIO()
    Console(width=width, file=output, force_terminal=True, color_system=None).print(part, crop=False)
    return output.getvalue().splitlines()


def test_a_table_drops_optional_columns_then_gives_the_first_cell_its_own_line() -> None:
    rows = [TableRow(("a-long-name", "x", "running", "1/2"), "one two three four five six seven"), TableRow("bcde")]
    table = TerminalTable(("run", "kind", "state", "step"), rows, ("kind",))
    assert drawn(table, 60)[0].split() == ["run", "kind", "state", "step"]
    assert drawn(table, 28)[0].split() == ["run", "state", "step"]
    assert [line.rstrip() for line in drawn(table, 24)] == [
        *("run", "  state    step", "a-long-name", "  running  1/2"),
        *("  one two three four", "  five six seven", "b", "  d        e"),
    ]


CELLS = st.text("ab1-é漢", max_size=40)


@st.composite
def generated_tables(draw: st.DrawFn) -> TerminalTable:
    """Tables of up to 14 columns, with distinct names, of which any may be optional."""
    count = draw(st.integers(1, 14))
    names = [f"c{number}{draw(CELLS)}"[: draw(st.integers(3, 30))] for number in range(10, 10 + count)]
    rows = [
        TableRow(draw(st.lists(CELLS, min_size=count, max_size=count)), draw(st.sampled_from(["", PROBLEM, LONG])))
        for _ in range(draw(st.integers(0, 4)))
    ]
    return TerminalTable(names, rows, draw(st.lists(st.sampled_from(names[1:]), unique=True)) if names[1:] else ())


@given(generated_tables(), st.integers(20, 120))
def test_only_a_single_word_is_ever_wider_than_the_terminal(table: TerminalTable, width: int) -> None:
    lines = [line.plain for line in table.lines(width)]
    assert [line for line in lines if cell_len(line) > width and len(line.split()) > 1] == []
    told = " ".join(lines).split()
    kept = [name for name in table.columns if name in told]
    assert set(table.columns) - set(table.optional) <= set(kept), "only optional columns are left out"
    at = [list(table.columns).index(name) for name in kept]
    cells = [cell for row in table.rows for cell in (*(str(row.cells[each]) for each in at), *str(row.note).split())]
    assert sorted(told) == sorted([*kept, *filter(None, cells)]), "every word is whole, and there once"


@given(generated_tables())
def test_in_a_pipe_every_row_is_one_line_with_all_columns(table: TerminalTable) -> None:
    lines = [line.plain for line in table.lines(WHOLE_LINES)]
    assert lines[0].split() == list(table.columns)
    assert len(lines) == 1 + len(table.rows) + sum(1 for row in table.rows if row.note)


def test_evaluations_of_many_k_fit_80_columns() -> None:
    ks = [2**power for power in range(14)]
    rows = [{"version": 7, "estimates": [{"k": k, "mean": k / 10_000} for k in ks]}]
    lines = drawn(tables.evaluations(rows), 80)
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).split()[3:-15] == [f"@{k}" for k in ks]


def test_a_sentence_is_broken_between_words_only() -> None:
    lines = drawn(Sentence(f"waits for {LONG}: it holds 8 GPUs"), 40)
    assert lines == ["waits for", f"{LONG}:", "it holds 8 GPUs"]


def test_a_list_breaks_between_its_items_only() -> None:
    assert drawn(ItemList(["reward 0.1", "kl 0.2", "seconds 3"], "newest  "), 26) == [
        "newest  reward 0.1  kl 0.2",
        "        seconds 3",
    ]


def test_the_bar_shows_all_numbers_at_80_columns(narrow: None, capsys: pytest.CaptureFixture[str]) -> None:
    display = Display()
    note = "reward 0.123  pass@16 0.512  live 0.50  KL 0.003  12 samples/s"
    with display.bar(f"{LONG[:64]} steps", 100_000) as bar:
        bar.advance(note, by=12_345)
    lines = plain(capsys.readouterr().out).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.strip() == note for line in lines), "the note is whole, on a line of its own"
    assert any("12345/100000" in line and re.search(r"0:00:00 [-\d]:[-\d]{2}:[-\d]{2}$", line) for line in lines)


def test_square_brackets_in_a_message_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    Display().say("pip install 'volley-rl[cpu]'")
    assert "'volley-rl[cpu]'" in capsys.readouterr().out


def test_a_step_is_summed_up_with_the_jobs_k(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"reward_mean": 0.25, "pass_at_1": 0.25, "pass_at_6": 0.6, "pass_at_16": 0.9, "live_group_fraction": 1.0}
    assert headlines(row, {"objective": {"k": 6}})[:2] == ["reward_mean 0.25", "pass_at_6 0.6"]
    assert headlines(row, {"objective": {"kind": "mean"}})[:2] == ["reward_mean 0.25", "pass_at_16 0.9"]
    assert headlines({"loss": 2.0}, {}) == ["loss 2"]
    step = {**row, "samples_per_second": 12.0}
    assert _note(step, 6) == "reward 0.250  pass@6 0.600  live 1.00  12 samples/s"
    for speed, shown in ((0.48, "0.5"), (9.94, "9.9"), (9.96, "10")):
        assert _note({**step, "samples_per_second": speed}, 6).endswith(f"  {shown} samples/s")
    assert _note({**step, "pass_at_16": 0.9}, None).split("  ")[1] == "pass@16 0.900"


@pytest.mark.parametrize("follow", [False, True])
def test_a_run_folder_is_shown_and_followed_like_a_run(volley: Volley, run_folder: RunFolder, follow: bool) -> None:
    row = {"step": 0, "reward_mean": 0.25, "pass_at_8": 0.5, "groups_trained": 7}
    run_folder.append("metrics", [row])
    estimates = [{"k": 8, "mean": 0.75, "low": 0.7, "high": 0.8}]
    run_folder.append("evaluations", [{"version": 1, "estimates": estimates}])
    (run_folder.logs / "actor-0.log").write_text("one\ntwo\n")
    run_folder.write_summary({"state": "done", "problem": ""})
    code, out, _ = volley("show", str(run_folder.path), *(["--follow"] if follow else []))
    assert code == 0
    if follow:
        assert out == "sevens-1: done\n"
        return
    for told in ("sevens-1  rl  done", "step 1/4", "pass_at_8 0.5", "trained 7", "0.750"):
        assert told in out
    assert volley("logs", str(run_folder.path))[1].splitlines()[1].split() == ["actor-0", "8"]
    assert volley("logs", str(run_folder.path), "actor-0", "--tail", "4")[1] == "two\n"
    code, _, errors = volley("logs", str(run_folder.path), "learner-0")
    assert code == 3
    assert errors.strip().endswith("has no log of learner-0; it has actor-0")


def test_following_a_folder_yields_what_is_appended(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def grow(_: float) -> None:
        run_folder.append("metrics", [{"step": 0, "reward_mean": 0.5}])
        run_folder.append("events", [{"kind": "actor_died", "time": 1.0}])
        run_folder.write_summary({"state": "failed", "problem": "gone"})

    monkeypatch.setattr(sources, "time", SimpleNamespace(sleep=grow))
    found = []
    for event in FolderRun.open(run_folder.path).follow():
        found.append((event.kind, event.data.get("state") or len(event.data.get("rows", event.data.get("items", ())))))
    assert found[:2] == [("observed", "running"), ("metrics", 1)]
    assert found[2:] == [("events", 1), ("observed", "failed"), ("ended", "failed")]


def test_following_a_folder_yields_the_rows_written_just_before_the_end(
    run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run writes its last row and its last state between any two reads of the view."""
    read = RunFolder.read

    def ends_after_this_read(folder: RunFolder, name: str) -> list[dict[str, Any]]:
        rows = read(folder, name)
        if name == "metrics" and folder.state != "done":
            folder.append("metrics", [{"step": 0, "reward_mean": 0.5}])
            folder.write_summary({"state": "done", "problem": ""})
        return rows

    view = FolderRun.open(run_folder.path)
    monkeypatch.setattr(sources, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(sources, "TABLES", ("metrics",))
    steps = view.follow()
    assert next(steps).kind == "observed"
    monkeypatch.setattr(RunFolder, "read", ends_after_this_read)
    assert [event.kind for event in steps] == ["metrics", "observed", "ended"]


# ---- JSON ----------------------------------------------------------------------------------------------------------


def leaves() -> Iterator[tuple[str, Any]]:
    """Every command with its full name."""

    def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
        for part, found in getattr(command, "commands", {}).items():
            yield from walk(found, f"{name} {part}".strip())
        if not hasattr(command, "commands"):
            yield name, command

    yield from walk(typer.main.get_command(app), "")


def test_every_command_prints_json_on_request() -> None:
    without = {name for name, command in leaves() if all("--json" not in each.opts for each in command.params)}
    assert without == WITHOUT_JSON


def test_the_page_documents_the_json_of_every_command() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    table = page.partition("| command | `--json` prints |")[2].partition("\n\n")[0]
    documented = {name for row in re.findall(r"^\| (.+?) \|", table, re.M) for name in re.findall(r"`([^`]+)`", row)}
    assert documented == {name for name, _ in leaves()} - WITHOUT_JSON


def documented_fields() -> tuple[list[str], list[str]]:
    """The fields of a run on the page: those of every command, and those that `ls` leaves out."""
    page = (ROOT / "docs/cli.md").read_text()
    common = page.partition("A run is an object with")[2].partition(";")[0]
    more = page.partition("A run is an object with")[2].partition(";")[2].partition(". ")[0]
    return re.findall(r"`(\w+)`", common), re.findall(r"`(\w+)`", more)


@pytest.mark.parametrize(
    "command", [("submit",), ("show", "a"), ("scale", "a", "--actors", "3"), ("set", "a", "k=4"), ("stop", "a")]
)
def test_a_run_has_one_shape(api: FakeApi, volley: Volley, job_file: Path, command: tuple[str, ...]) -> None:
    api.add("a", state="running", step=3, steps=9)
    _, out, _ = volley(*command, *([str(job_file)] if command == ("submit",) else []), "--json")
    common, more = documented_fields()
    assert list(json.loads(out))[: len(common) + len(more)] == common + more
    listed = json.loads(volley("ls", "--json")[1])[0]
    assert set(listed) - {"updated"} >= set(common) - {"updated"}


@pytest.mark.parametrize("command", [("show",), ("scale", "--actors", "3"), ("set", "k=4"), ("pause",), ("stop",)])
def test_a_run_folder_has_the_same_shape(volley: Volley, run_folder: RunFolder, command: tuple[str, ...]) -> None:
    name, *options = command
    _, out, _ = volley(name, str(run_folder.path), *options, "--json")
    common, more = documented_fields()
    run = json.loads(out)
    assert list(run)[: len(common) + len(more)] == common + more
    assert (run["id"], run["state"], run["folder"]) == (run_folder.run_id, "running", str(run_folder.path))


@pytest.fixture
def run_folder(tmp_path: Path, job_file: Path) -> RunFolder:
    folder = RunFolder.at(tmp_path / "sevens-1", load_job(job_file))
    folder.write_summary({"state": "running", "problem": ""})
    return folder


def test_what_changed_is_printed_as_it_is_written_on_the_command_line(api: FakeApi, volley: Volley) -> None:
    api.add("a", state="running")
    _, out, _ = volley("set", "a", "k=4", "center=true", "learning_rate=2.0e-6")
    assert out == "a: running; desired: learning_rate=2e-06 objective.k=4 objective.center=true (revision 1)\n"


# ---- ids, completion, exit codes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [("show",), ("logs",), ("scale", "--actors", "2"), ("pause",), ("stop",), ("resume",), ("rm", "-y")]
)
def test_the_beginning_of_an_id_is_enough(api: FakeApi, volley: Volley, command: tuple[str, ...]) -> None:
    api.add("sevens-20261122-1", state="done" if command[0] == "rm" else "running")
    for number in range(7):
        api.add(f"eights-{number}", state="running")
    name, *options = command
    assert volley(name, "sev", *options)[0] == 0
    assert any(path.startswith("/v1/runs/sevens-20261122-1") for _, path, _, _ in api.seen)
    code, _, errors = volley(name, "eig", *options)
    assert code == 3
    assert errors.strip().endswith("eights-6, eights-5, eights-4, eights-3, eights-2, ...; write more of the id")


def test_a_whole_id_that_begins_another_is_meant(api: FakeApi, volley: Volley) -> None:
    for name in ("a", "a-1", "a-2"):
        api.add(name, state="running")
    assert json.loads(volley("show", "a", "--json")[1])["id"] == "a"


def completed(*words: str, cwd: Path) -> list[str]:
    environment = {**os.environ, "_VOLLEY_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(("volley", *words))}
    environment["COMP_CWORD"] = str(len(words))
    command = [str(Path(sys.executable).parent / "volley")]
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_the_shell_completes_runs_folders_and_processes(api: FakeApi, run_folder: RunFolder, tmp_path: Path) -> None:
    api.add("sevens-2", state="running")
    api.add("eights-1", state="done")
    assert completed("show", "sev", cwd=tmp_path) == ["sevens-2", "sevens-1"]
    assert completed("rm", "sev", cwd=tmp_path) == ["sevens-2"], "only the service forgets runs"
    assert completed("stop", f"{tmp_path}/", cwd=tmp_path) == [str(run_folder.path)]
    assert completed("logs", "eights-1", "d", cwd=tmp_path) == ["driver"]


def test_completion_is_silent_without_a_server(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLLEY_SERVER", "http://127.0.0.1:1")
    assert completed("show", "sev", cwd=tmp_path) == []
    assert find_server()[0] == "http://127.0.0.1:1"


def test_the_exit_codes_of_the_help_are_those_of_the_page() -> None:
    from services.cli import EXIT_CODES

    page = (ROOT / "docs/cli.md").read_text().partition("| exit code |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| (\d+) \|", page, re.M) == re.findall(r"\b(\d+) ", EXIT_CODES)


def test_doctor_prints_each_fix_below_its_finding(narrow: None, capsys: pytest.CaptureFixture[str]) -> None:
    fix = "pip install 'volley-rl[cpu]', or in a clone: make setup, and then some words that need a second line"
    doctor.report([doctor.Finding("torch", "not installed", fix, blocks=True)])
    lines = [line.rstrip() for line in plain(capsys.readouterr().out).splitlines()]
    assert " ".join(" ".join(lines[2:]).split()) == fix
    assert max(map(len, lines)) <= 80


def test_a_report_of_the_driver_is_read_from_the_folder(run_folder: RunFolder, volley: Volley) -> None:
    run_folder.write_observed(Observed(state="running", step=3, steps=4, actors=1, updated=1.0))
    view = json.loads(volley("show", str(run_folder.path), "--json")[1])
    assert (view["step"], view["state"]) == (3, "lost"), "its driver has been silent since 1970"
    run_folder.write_summary({"state": "failed", "problem": "no memory"})
    view = json.loads(volley("show", str(run_folder.path), "--json")[1])
    assert (view["state"], view["problem"]) == ("failed", "no memory")
