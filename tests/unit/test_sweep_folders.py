"""The run folders of a sweep on this machine: which are found, and how each is continued."""

import asyncio
from pathlib import Path

import pytest

from services.store.desired import change_in_folder, read_desired
from services.store.folder import RunFolder
from services.sweeps.local import LocalRunner
from services.sweeps.plan import Found
from services.sweeps.spec import Member, Sweep, load_sweep
from tests.unit.test_sweep_files import write


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return load_sweep(write(tmp_path, grid={"objective.k": [2, 4]}, seeds=[0]))


@pytest.fixture
def runner(tmp_path: Path) -> LocalRunner:
    return LocalRunner(tmp_path / "runs", tmp_path)


def left(runner: LocalRunner, member: Member, state: str, *, checkpoint: int | None = None) -> RunFolder:
    """The folder of a run that was left in this state."""
    folder = RunFolder.at(runner.folder / member.name, member.job)
    if state:
        folder.write_summary({"state": state, "problem": "why"})
    folder.append("metrics", [{"step": 0}])
    if checkpoint is not None:
        (folder.checkpoints / f"step-{checkpoint}").mkdir()
    return folder


def found(runner: LocalRunner, sweep: Sweep) -> dict[str, Found]:
    return asyncio.run(runner.find(sweep))


def test_folders_with_a_job_are_found_and_those_moved_aside_are_not(sweep: Sweep, runner: LocalRunner) -> None:
    assert found(runner, sweep) == {}
    first, second = sweep.members
    left(runner, first, "failed")
    left(runner, second, "").path.rename(runner.folder / f".{second.name}.1")
    (runner.folder / "stack").mkdir()
    (run,) = found(runner, sweep).values()
    assert (run.state, run.problem, run.job, Path(run.where).name) == ("failed", "why", first.job, first.name)


@pytest.mark.parametrize("state", ["", "starting", "running", "stopped", "failed"])
def test_a_run_goes_on_from_its_newest_checkpoint(sweep: Sweep, runner: LocalRunner, state: str) -> None:
    member = sweep.members[0]
    kept = left(runner, member, state, checkpoint=2)
    change_in_folder(kept, member.job, {"stopped": True})
    folder, checkpoint = runner._prepared_folder(member, found(runner, sweep)[member.name])
    assert checkpoint == kept.checkpoints / "step-2"
    assert folder.read("metrics") == [{"step": 0}]
    assert not read_desired(folder).stopped


@pytest.mark.parametrize("state", ["", "starting", "running", "stopped", "failed"])
def test_a_run_without_a_checkpoint_begins_again_in_an_empty_folder(
    sweep: Sweep, runner: LocalRunner, state: str
) -> None:
    member = sweep.members[0]
    left(runner, member, state)
    folder, checkpoint = runner._prepared_folder(member, found(runner, sweep)[member.name])
    assert (checkpoint, folder.read("metrics"), folder.state) == (None, [], "")
    assert RunFolder.open(folder.path)[1] == member.job
    assert folder.import_from() == runner.import_from


def test_a_folder_that_was_cut_before_its_job_was_written_begins_again(sweep: Sweep, runner: LocalRunner) -> None:
    member = sweep.members[0]
    (left(runner, member, "").path / "job.yaml").unlink()
    assert found(runner, sweep) == {}
    folder, _ = runner._prepared_folder(member, None)
    assert folder.read("metrics") == []


def test_a_failed_run_of_another_job_is_moved_aside(sweep: Sweep, runner: LocalRunner) -> None:
    member, other = sweep.members
    for number in (1, 2):
        RunFolder.at(runner.folder / member.name, other.job).append("metrics", [{"step": number}])
        folder, checkpoint = runner._prepared_folder(member, found(runner, sweep)[member.name])
        assert (checkpoint, folder.read("metrics")) == (None, [])
        aside = RunFolder(runner.folder / f".{member.name}.{number}")
        assert aside.read("metrics") == [{"step": number}]
