"""What a run writes to its folder, and what a resumed run keeps of it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from typer.testing import CliRunner

from services.cli import app
from services.evaluation.evaluate import max_groups_in_flight
from services.recording import plots
from services.runs.checkpoints import newest_checkpoint
from services.store.desired import change, change_in_folder, read_desired
from services.store.folder import RunFolder, RunHasEnded
from tests.unit.test_host import job
from volley.errors import HostError, JobError
from volley.job import JOB, ActorsSpec, EvalJob
from volley.objectives import MaxAtK, resolve
from volley.state import Desired

PNG = b"\x89PNG"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, job(tmp_path / "model"))


def test_the_resolved_job_is_saved_and_reads_back(folder: RunFolder) -> None:
    again, read = RunFolder.open(folder.path)
    assert again == folder
    assert read == JOB.validate_python(yaml.safe_load((folder.path / "job.yaml").read_text()))


def test_the_folder_remembers_where_the_jobs_code_is(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder.import_from() is None
    monkeypatch.chdir(tmp_path)
    folder.keep_import_from(Path())
    assert folder.import_from() == tmp_path.resolve()


def test_two_runs_of_one_job_have_different_folders(tmp_path: Path) -> None:
    names = {RunFolder.create(tmp_path, job(tmp_path)).path for _ in range(3)}
    assert len(names) == 3


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="cannot be written: Not a directory"):
        RunFolder.create(tmp_path / "file", job(tmp_path))


def test_rewinding_a_folder_removes_rows_that_will_be_written_again(folder: RunFolder) -> None:
    folder.append("metrics", [{"step": step} for step in range(5)])
    folder.append("ledger", [{"step": step, "group": step} for step in range(5)])
    folder.append("evaluations", [{"version": version} for version in (0, 3, 5)])
    folder.append("events", [{"kind": "started"}])
    folder.rewind(3)
    assert [row["step"] for row in folder.read("metrics")] == [0, 1, 2]
    assert [row["step"] for row in folder.read("ledger")] == [0, 1, 2]
    assert [row["version"] for row in folder.read("evaluations")] == [0, 3]
    assert folder.read("events") == [{"kind": "started"}]


def test_the_newest_complete_checkpoint_is_found(folder: RunFolder) -> None:
    with pytest.raises(JobError, match=r"no checkpoint to resume from; set checkpoint\.every"):
        newest_checkpoint(folder)
    for name in ("step-9", "step-10", ".step-11.partial", "step-12.bak"):
        (folder.checkpoints / name).mkdir()
    assert newest_checkpoint(folder).name == "step-10"


def test_plots_are_drawn_from_rows(folder: RunFolder, tmp_path: Path) -> None:
    rows = [
        {"step": s, "reward_mean": s / 9, "pass_at_1": s / 9, "pass_at_4": 0.5, "entropy": 1.0, "kl_k1": 0.1}
        for s in range(9)
    ]
    folder.append("metrics", rows)
    assert plots.learning_curves(folder).read_bytes().startswith(PNG)
    row = {"estimates": [{"k": k, "mean": 0.1 * k, "low": 0.05 * k, "high": 0.12 * k} for k in (1, 2, 4)]}
    assert plots.pass_at_k({"a": row, "b": row}, tmp_path / "p.png").read_bytes().startswith(PNG)


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn from now on."""
    figures: list[Any] = []

    def made(**options: Any) -> Figure:
        figures.append(Figure(**options))
        return figures[-1]  # type: ignore[no-any-return]

    monkeypatch.setattr(plots, "Figure", made)
    return figures


def test_curves_have_the_jobs_k_and_the_held_out_prompts(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = drawn(monkeypatch)
    folder.append(
        "metrics", [{"step": s, "reward_mean": 0.1, **{f"pass_at_{k}": k / 99 for k in (1, 4, 6, 16)}} for s in (0, 1)]
    )
    estimates = [{"k": k, "mean": 0.05 * k, "low": 0.0, "high": 1.0} for k in (1, 6)]
    folder.append("evaluations", [{"version": version, "estimates": estimates} for version in (0, 2)])
    plots.learning_curves(folder, k=6)
    first, second, *_ = figures[0].axes
    assert second.get_title(loc="left") == "pass@6"
    assert second.get_lines()[0].get_ydata().tolist() == pytest.approx([6 / 99] * 2)
    for axes, mean in ((first, 0.05), (second, 0.3)):
        (held_out,) = [line for line in axes.get_lines() if line.get_label() == "held-out prompts"]
        assert list(held_out.get_xdata()) == [0, 2]
        assert list(held_out.get_ydata()) == pytest.approx([mean, mean])
    assert [text.get_text() for text in first.get_legend().get_texts()] == ["training prompts", "held-out prompts"]


def test_curves_of_episodes_include_their_calls(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = drawn(monkeypatch)
    folder.append(
        "metrics", [{"step": s, "reward_mean": 0.1, "calls_mean": 1.0 + s, "length_mean": 9.0} for s in (0, 1)]
    )
    plots.learning_curves(folder)
    *_, calls, length = figures[0].axes
    assert len(figures[0].axes) == 6
    assert calls.get_title(loc="left") == "Calls of the model"
    assert calls.get_lines()[0].get_ydata().tolist() == [1.0, 2.0]
    assert length.get_lines()[0].get_ydata().tolist() == [9.0, 9.0]


def test_supervised_runs_have_a_plot_of_their_loss(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = drawn(monkeypatch)
    folder.append("metrics", [{"step": step, "loss": 2.0 - step, "grad_norm": 0.5} for step in (0, 1)])
    assert plots.loss_curves(folder) == folder.plots / "learning_curves.png"
    assert figures[0].axes[0].get_lines()[0].get_ydata().tolist() == [2.0, 1.0]


def test_smoothing_keeps_a_constant_and_the_length() -> None:
    assert plots.smooth([2.0] * 7, 3).tolist() == [2.0] * 7
    assert plots.smooth([0.0, 3.0, 0.0], 3).tolist() == [1.5, 1.0, 1.5]


def test_an_engine_always_has_a_group_waiting() -> None:
    assert max_groups_in_flight(ActorsSpec(count=2, max_num_seqs=100), n=64) == 2 * 3


def test_desired_changes_accumulate_and_invalid_ones_change_nothing(tmp_path: Path) -> None:
    spec = job(tmp_path, objective={"kind": "max_at_k", "k": 8})
    folder = RunFolder.create(tmp_path, spec)
    assert read_desired(folder).objective == {}
    change_in_folder(folder, spec, {"objective": {"k": 4}})
    change_in_folder(folder, spec, {"objective": {"center": True}, "actors": 3})
    for bad, message in (
        ({"objective": {"k": 99}}, "lower k or raise n"),
        ({"objective": {"kk": 1}}, "kk: neither a field of the objective"),
        ({"objective": {"k": "x"}}, "k"),
        ({"actor": 1}, "actor: cannot be changed on a live run; choose from actors"),
        ({"actors": -1}, "greater than or equal to 0"),
    ):
        with pytest.raises(JobError, match=message):
            change_in_folder(folder, spec, bad)
    desired = read_desired(folder)
    assert (desired.objective, desired.actors, desired.revision) == ({"k": 4, "center": True}, 3, 2)
    assert change_in_folder(folder, spec, {"actors": None, "paused": None}).actors is None
    assert change_in_folder(folder, spec, {"objective": {"center": None}}).objective == {"k": 4}
    assert change_in_folder(folder, spec, {"objective": None}).objective == {}

    (folder.path / "desired.json").write_text('{"objectiv": {}}')
    with pytest.raises(JobError, match="objectiv: unknown key"):
        read_desired(folder)


def test_a_job_that_takes_turns_on_a_gpu_keeps_its_one_actor(tmp_path: Path) -> None:
    share: dict[str, Any] = {"actors": {"gpus": 0.5}, "learner": {"gpus_per_rank": 0.5}, "placement": "colocated"}
    with pytest.raises(JobError, match="one GPU between one actor and one rank"):
        change(Desired(), job(tmp_path, **share), {"actors": 2})


@pytest.mark.parametrize("field", ["actors", "max_lag"])
def test_zero_does_not_apply_to_a_job_that_is_evaluated_either(tmp_path: Path, field: str) -> None:
    spec = EvalJob.model_validate(
        {"kind": "eval", "name": "e", "model": {"path": "m"}, "data": {"path": "d"}, "scorer": {"kind": "exact"}}
    )
    with pytest.raises(JobError, match=f"{field}: does not apply"):
        change(Desired(), spec, {field: 0})


def test_a_live_change_swaps_k_and_weights(tmp_path: Path) -> None:
    spec = job(tmp_path, objective={"kind": "max_at_k", "k": 8})
    folder = RunFolder.create(tmp_path, spec)
    halves = {"weights": {1: 0.5, 8: 0.5}}
    change_in_folder(folder, spec, {"objective": {"k": 4, "center": True}})
    assert change_in_folder(folder, spec, {"objective": halves}).objective == {**halves, "center": True}
    stored = read_desired(folder).objective
    assert resolve(spec.objective, spec.schedule, 0, stored) == MaxAtK(weights={1: 0.5, 8: 0.5}, center=True)
    harmonic = {"weights": "harmonic", "order": 6}
    assert change_in_folder(folder, spec, {"objective": harmonic}).objective == {**harmonic, "center": True}
    assert change_in_folder(folder, spec, {"objective": {"k": 2}}).objective == {"k": 2, "center": True}
    change_in_folder(folder, spec, {"objective": halves})
    assert change_in_folder(folder, spec, {"objective": {"weights": None}}).objective == {"center": True}
    for bad, message in (
        ({"weights": {1: 0.5, 99: 0.5}}, "remove the weights above n or raise n"),
        ({"weights": {1: -1}}, "not a number of 0 or more"),
        ({"k": 4, **halves}, "remove k"),
        ({"weights": "harmonic"}, "write order: 16"),
        ({"kind": "best_of_k", "k": 4}, "picks samples by their rank"),
        ({"kind": ["max_at_k"]}, "kind"),
        ({"weights": {1: 10**400}}, "not a number of 0 or more"),
    ):
        with pytest.raises(JobError, match=message):
            change_in_folder(folder, spec, {"objective": bad})
    change_in_folder(folder, spec, {"objective": {"kind": "maj_at_k", "k": 4}})
    assert change_in_folder(folder, spec, {"objective": halves}).objective["weights"] == halves["weights"]


def test_a_change_of_order_must_fit_weights_on_their_way(tmp_path: Path) -> None:
    """Order exists at both ends of the change, but not between them."""
    stages = [{"at": 5, "over": 10, "set": {"order": 4}}]
    harmonic = {"kind": "max_at_k", "weights": "harmonic", "order": 8}
    spec = job(tmp_path, objective=harmonic, sampling={"n": 8}, schedule={"stages": stages})
    with pytest.raises(JobError, match="remove order, or write weights: harmonic"):
        change_in_folder(RunFolder.create(tmp_path, spec), spec, {"objective": {"order": 2}})


def test_a_change_must_fit_every_stage_of_the_schedule(tmp_path: Path) -> None:
    stages = [{"at": 60, "set": {"k": 8}}]
    spec = job(tmp_path, objective={"kind": "max_at_k", "k": 4}, sampling={"n": 8}, schedule={"stages": stages})
    with pytest.raises(JobError, match="subset_loo"):
        change_in_folder(RunFolder.create(tmp_path, spec), spec, {"objective": {"baseline": "subset_loo"}})


def test_an_incomplete_last_row_is_ignored(folder: RunFolder) -> None:
    folder.append("metrics", [{"step": 0}, {"step": 1}])
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    assert folder.read("metrics") == [{"step": 0}, {"step": 1}]
    folder.rewind(1)
    assert folder.read("metrics") == [{"step": 0}]


@pytest.mark.parametrize("left", ['{"kind": "resu', '{"kind": "stopped"}\n{"kind": "resu'])
def test_a_row_that_a_crash_cut_off_does_not_spoil_the_next_one(folder: RunFolder, left: str) -> None:
    (folder.path / "events.jsonl").write_text(left)
    folder.append("events", [{"kind": "resumed"}])
    whole = [{"kind": "stopped"}] if "\n" in left else []
    assert folder.read("events") == [*whole, {"kind": "resumed"}]


def test_a_folder_in_use_is_rejected(folder: RunFolder) -> None:
    with folder.in_use(), pytest.raises(HostError, match="in use by a live run"), folder.in_use():
        pass
    with folder.in_use():
        pass


def test_a_run_that_has_ended_is_neither_resumed_nor_stopped(folder: RunFolder) -> None:
    assert folder.state == ""
    for state in ("done", "stopped", "failed"):
        folder.write_summary({"state": state, "problem": ""})
        with pytest.raises(RunHasEnded, match=rf"is {state}: there is nothing to stop"):
            CliRunner().invoke(app, ["stop", str(folder.path)], catch_exceptions=False)
    assert not read_desired(folder).stopped
    folder.write_summary({"state": "done", "problem": ""})
    with pytest.raises(RunHasEnded, match=r"is done: to go on, start a job from its model, .*/model"):
        CliRunner().invoke(app, ["resume", str(folder.path)], catch_exceptions=False)
    assert RunHasEnded.exit_code == 4


def test_plots_need_no_backend_of_a_notebook() -> None:
    environment = {**os.environ, "MPLBACKEND": "module://of_a_kernel.backend_inline"}
    code = "import services.recording.plots, matplotlib; print(matplotlib.get_backend())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "agg"


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_every_line_of_a_plot_is_named_even_where_lines_end_together(value: float) -> None:
    axes = Figure().subplots()
    axes.set_ylim(0, 1.02)
    plots._label_ends(axes, [(value, name, "red") for name in "abcd"], 8)
    labels = [each for each in axes.texts if isinstance(each, Annotation)]
    assert sorted(label.get_text() for label in labels) == ["a", "b", "c", "d"]
    heights = sorted(label.xy[1] for label in labels)
    assert min(np.diff(heights)) >= 0.049
    assert max(heights) <= 1.0
    assert not any(label.get_annotation_clip() for label in labels)


def test_a_live_paused_run_goes_on_when_it_is_resumed(folder: RunFolder) -> None:
    change_in_folder(folder, job(folder.path), {"paused": True})
    with folder.in_use():
        done = CliRunner().invoke(app, ["resume", str(folder.path)], catch_exceptions=False)
        assert (done.exit_code, read_desired(folder).paused) == (0, False)
        assert "goes on" in done.output
    assert not folder.is_live
