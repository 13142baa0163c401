"""Commands against a server on a real socket: tables, JSON, exit codes, choice of server and token."""

import json
import os
from pathlib import Path

import pytest

from services.cli.local import resume_hint
from services.jobs.job_file import load_job
from services.recording.display import Display
from services.stack.folder import StackFolder
from services.stack.keeper import UpSettings
from services.store.desired import read_desired
from services.store.folder import RunFolder
from tests.unit.cli.commands import Volley
from tests.unit.fake_api import FakeApi, served, sse
from volley.client.server import find_server
from volley.local_stack import StackState

# ---- runs ----------------------------------------------------------------------------------------------------------


def test_submit_sends_the_resolved_job_with_absolute_paths(api: FakeApi, volley: Volley, job_file: Path) -> None:
    code, out, _ = volley("submit", str(job_file), "--set", "steps=7", "--tag", "who=me", "--key", "k1", "--json")
    assert code == 0
    assert json.loads(out)["id"] == "sevens-1"
    method, path, headers, body = api.seen[0]
    assert (method, path, headers["idempotency-key"]) == ("POST", "/v1/runs", "k1")
    assert body["tags"] == {"who": "me"}
    assert body["job"]["steps"] == 7
    assert body["job"]["data"]["path"] == str(job_file.parent / "train.jsonl")


def test_errors_of_a_rejected_job_are_printed_one_per_line(api: FakeApi, volley: Volley, job_file: Path) -> None:
    code, _, errors = volley("submit", str(job_file), "--set", "name=bad")
    assert code == 1
    assert errors.strip().splitlines() == ["volley: the job is invalid", "  /job/steps: too many"]


def test_ls_reads_page_after_page(api: FakeApi, volley: Volley) -> None:
    for number in range(5):
        api.add(f"run-{number}", state="running", step=3, steps=9)
    code, out, _ = volley("ls", "--json")
    assert code == 0
    assert [each["id"] for each in json.loads(out)] == [f"run-{number}" for number in (4, 3, 2, 1, 0)]
    _, out, _ = volley("ls", "--limit", "3")
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["run-4", "run-3", "run-2"]
    assert "3/9" in out
    assert "max_at_k k=8" in out
    assert "0.400" in out


def test_show_prints_state_workers_waits_and_metrics(api: FakeApi, volley: Volley) -> None:
    worker = {"name": "actor-0", "role": "actor", "state": "serving", "version": 3}
    api.add("a", state="running", step=3, steps=9, waiting=("learner has waited 9 s for group 4",), workers=(worker,))
    code, out, _ = volley("show", "a")
    assert code == 0
    for told in ("step 3/9", "actor-0", "learner has waited 9 s for group 4", "reward_mean 0.25", "trained 8", "0.500"):
        assert told in out
    _, out, _ = volley("show", "a", "--json")
    view = json.loads(out)
    assert view["observed"]["step"] == 3
    assert view["ledger"] == {"admitted": 8, "trained": 8}


def test_logs_prints_the_log_of_one_process(api: FakeApi, volley: Volley) -> None:
    api.add("a", state="running")
    assert "driver" in volley("logs", "a")[1]
    assert volley("logs", "a", "driver", "--tail", "5") == (0, "there", "")
    assert volley("logs", "a", "nobody")[0] == 3


def test_rm_deletes_only_runs_that_have_ended(api: FakeApi, volley: Volley) -> None:
    api.add("a", state="running")
    api.add("b", state="done")
    assert volley("rm", "a", "--yes")[0] == 4
    assert volley("rm", "b", "--yes")[0] == 0
    assert list(api.runs) == ["a"]


def test_unknown_runs_exit_with_3(api: FakeApi, volley: Volley) -> None:
    for command in (
        ("show", "x"),
        ("stop", "x"),
        ("pause", "x"),
        ("logs", "x"),
        ("rm", "x", "-y"),
        ("token", "rm", "x"),
    ):
        code, _, errors = volley(*command)
        assert code == 3, command
        assert errors.startswith("volley: there is no")
        assert len(errors.splitlines()) == 1


def test_usage_errors_exit_with_2(api: FakeApi, volley: Volley) -> None:
    assert volley("show")[0] == 2
    assert volley("ls", "--limit", "0")[0] == 2
    assert volley("nonsense")[0] == 2


def test_queue_prints_who_holds_what_and_why_others_wait(api: FakeApi, volley: Volley) -> None:
    assert "no runs hold resources" in volley("queue")[1]
    place = {"owner": "alice", "priority": 2, "submitted": 1.0, "since": 2.0, "resources": {"CPU": 3.0}, "most": {}}
    api.queue = {
        "items": [
            {**place, "run": "a", "state": "admitted"},
            {**place, "run": "b", "position": 1, "reason": "waits for 1 CPU: alice's a holds 3", "preempted_by": "a"},
        ],
        "owners": [{"name": "alice", "runs": 1, "cpus": 3.0, "gpus": 0.0, "limits": {"runs": 2}}],
    }
    code, out, _ = volley("queue")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert lines[1][:6] == ["a", "holds", "2", "alice", "3", "0"]
    assert lines[2][:6] == ["b", "1", "2", "alice", "3", "0"]
    assert " ".join(lines[2]).endswith(" preempted by a; waits for 1 CPU: alice's a holds 3")
    assert lines[-1] == ["alice", "1", "of", "2", "3", "0"]
    found = json.loads(volley("queue", "--json")[1])
    assert [each["run"] for each in found["items"]] == ["a", "b"]
    assert found["owners"][0]["limits"]["runs"] == 2


def test_audit_reads_page_after_page(api: FakeApi, volley: Volley) -> None:
    who = {"time": 1.0, "who": "alice", "action": "set", "run": "a"}
    changed = [{"actors": 2}, {"actors": None}, {"cpus": 3.0}, {"paused": True}, {"name": "b"}]
    api.audit = [{**who, "id": f"{number}-0", "details": each} for number, each in enumerate(changed)]
    assert [each["details"] for each in json.loads(volley("audit", "--json")[1])] == changed
    code, out, _ = volley("audit", "--limit", "4")
    assert code == 0
    words = ("actors=2", "actors=null", "cpus=3", "paused=true")
    assert [line.split()[2:] for line in out.splitlines()[1:]] == [["alice", "set", "a", word] for word in words]


def test_priority_is_sent_at_submission_and_by_set(api: FakeApi, volley: Volley, job_file: Path) -> None:
    assert volley("submit", str(job_file), "--priority", "3")[0] == 0
    assert api.seen[-2][3]["priority"] == 3
    assert volley("submit", str(job_file), "--priority", "11")[0] == 2
    assert volley("set", "sevens-1", "priority=-2")[0] == 0
    assert api.seen[-1][3] == {"priority": -2}


# ---- steering ------------------------------------------------------------------------------------------------------


def test_steering_by_id_patches_the_desired_state(api: FakeApi, volley: Volley) -> None:
    api.add("a", state="running")
    assert volley("scale", "a", "--actors", "3")[0] == 0
    assert api.seen[-1][3] == {"actors": 3}
    assert volley("set", "a", "k=4", "max_lag=2", "objective.center=true")[0] == 0
    assert api.seen[-1][3] == {"objective": {"k": 4, "center": True}, "max_lag": 2}
    assert volley("pause", "a")[0] == 0
    assert api.seen[-1][3] == {"paused": True}
    assert volley("stop", "a")[0] == 0
    assert api.runs["a"]["desired"]["stopped"]
    code, out, _ = volley("resume", "a", "--json")
    assert code == 0
    assert json.loads(out)["desired"]["stopped"] is False
    assert "desired: actors=0 " in volley("scale", "a", "--actors", "0")[1], "0 is sent and not treated as missing"


def test_steering_an_ended_run_is_a_conflict(api: FakeApi, volley: Volley) -> None:
    api.add("a", state="done")
    code, _, errors = volley("pause", "a")
    assert code == 4
    assert errors == "volley: run a has ended: resume it first\n"


def test_scale_without_a_count_says_what_is_missing(api: FakeApi, volley: Volley) -> None:
    assert "--actors" in volley("scale", "a")[2]


def test_a_run_folder_is_steered_by_its_file(volley: Volley, tmp_path: Path, job_file: Path) -> None:
    folder = RunFolder.at(tmp_path / "run", load_job(job_file))
    assert volley("scale", str(folder.path), "--actors", "2", "--reward-workers", "3")[0] == 0
    assert volley("set", str(folder.path), "k=4")[0] == 0
    code, out, _ = volley("stop", str(folder.path), "--json")
    assert code == 0
    assert json.loads(out)["desired"]["stopped"]
    desired = read_desired(folder)
    assert (desired.actors, desired.reward_workers, desired.stopped, desired.objective) == (2, 3, True, {"k": 4})
    assert desired.revision == 3
    code, _, errors = volley("scale", str(folder.path), "--environment-workers", "2")
    assert code == 1
    assert "without rollout" in errors
    code, _, errors = volley("set", str(folder.path), "priority=1")
    assert (code, "only the service has a queue" in errors) == (1, True)
    code, _, errors = volley("set", str(folder.path), "k=99")
    assert code == 1
    assert "k" in errors
    assert read_desired(folder).revision == 3


def test_an_interrupted_run_prints_how_to_continue(tmp_path: Path, job_file: Path) -> None:
    job = load_job(job_file)
    folder = RunFolder.at(tmp_path / "run", job)
    assert "no checkpoint" in resume_hint(job, folder)
    (folder.checkpoints / "step-10").mkdir()
    assert resume_hint(job, folder).startswith(f"`volley resume {folder.path}` continues after step 10")


def test_without_a_terminal_a_progress_bar_prints_its_last_note(capsys: pytest.CaptureFixture[str]) -> None:
    with Display().bar("train", 5) as bar:
        bar.advance("reward 0.1")
        bar.advance("reward 0.2")
    out = capsys.readouterr().out
    assert "train 2/5  reward 0.2" in out
    assert "reward 0.1" not in out


def test_a_missing_checkpoint_exits_with_3(volley: Volley, tmp_path: Path, job_file: Path) -> None:
    folder = RunFolder.at(tmp_path / "run", load_job(job_file))
    (folder.checkpoints / "step-10").mkdir()
    code, _, errors = volley("export", str(folder.path), "--checkpoint", "7", "--out", str(tmp_path / "out"))
    assert code == 3
    assert "no checkpoint of step 7; it has 10" in errors
    assert not (tmp_path / "out").exists()


# ---- live ----------------------------------------------------------------------------------------------------------


def live(api: FakeApi, run_id: str, end: str) -> None:
    """A run that does three steps and ends; its live stream is cut in the middle.

    The state of the end arrives before the last rows, as it may, because the server reads states and rows in turn.
    """
    view = api.add(run_id, state="running", steps=2)
    done = {**view["observed"], "state": end, "step": 2, "problem": "" if end == "done" else "the end of it"}
    api.stream = [
        sse("observed", desired=view["desired"], observed=view["observed"], state="running"),
        sse("metrics", rows=[{"step": 0, "reward_mean": 0.5}]),
        None,
        sse("events", items=[{"id": "1-0", "kind": "actor_died", "time": 1.0, "problem": "killed"}]),
        sse("metrics", rows=[{"step": 1, "reward_mean": 0.75}]),
        sse("observed", desired=view["desired"], observed=done, state=end),
        sse("metrics", rows=[{"step": 2, "reward_mean": 0.875}]),
        sse("events", items=[{"id": "2-0", "kind": "evaluation_done", "time": 2.0}]),
        sse("ended", state=end),
    ]


@pytest.mark.parametrize(("end", "expected"), [("done", 0), ("failed", 1), ("stopped", 1)])
def test_follow_reconnects_and_exits_with_the_runs_result(
    api: FakeApi, volley: Volley, end: str, expected: int
) -> None:
    live(api, "a", end)
    code, out, _ = volley("show", "a", "--follow", "--json")
    assert code == expected
    events = [json.loads(line) for line in out.splitlines()]
    kinds = ["observed", "metrics", "events", "metrics", "observed", "metrics", "events", "ended"]
    assert [event["event"] for event in events] == kinds
    resumed = [headers.get("last-event-id") for _, path, headers, _ in api.seen if path.endswith("/live")]
    assert resumed == [None, "2"]


def test_follow_without_a_terminal_prints_lines(api: FakeApi, volley: Volley) -> None:
    live(api, "a", "failed")
    code, out, _ = volley("show", "a", "--follow")
    assert code == 1
    assert out.splitlines()[0] == "a: running"
    assert "reward_mean 0.5" in out
    assert "actor_died problem=killed" in out
    assert out.splitlines()[-3:] == [
        "a: failed the end of it",
        "  evaluation_done",
        "  step 2  reward_mean 0.875",
    ], "what the run wrote last is shown, although its last state arrived before"


def test_up_takes_a_webhook_host_in_one_form_only(volley: Volley) -> None:
    code, _, errors = volley("up", "--webhook-host", "0x7f.1")
    assert code == 2
    assert "unusual form: write 127.0.0.1" in " ".join(errors.replace("│", " ").split())


# ---- which server, which token -------------------------------------------------------------------------------------


def test_a_token_is_printed_only_when_it_is_created(api: FakeApi, volley: Volley) -> None:
    assert volley("token", "create", "ci", "--scope", "operate") == (0, "very-secret\n", "")
    code, out, _ = volley("token", "ls")
    assert code == 0
    assert "operate" in out
    assert "very-secret" not in out
    assert volley("token", "limit", "ci", "--runs", "2", "--gpus", "0.5")[0] == 0
    limits = {"runs": 2, "cpus": None, "gpus": 0.5, "priority": 0}
    assert json.loads(volley("token", "ls", "--json")[1])[0]["limits"] == limits
    assert volley("token", "ls")[1].splitlines()[1].split()[:6] == ["ci", "operate", "2", "any", "0.5", "0"]
    assert volley("token", "create", "ci")[0] == 4
    assert volley("token", "limit", "ci", "--priority", "5")[0] == 0
    assert json.loads(volley("token", "ls", "--json")[1])[0]["limits"] == {**limits, "priority": 5}, "others stay"
    assert volley("token", "limit", "ci", "--lift", "gpus", "--cpus", "3")[0] == 0
    assert json.loads(volley("token", "ls", "--json")[1])[0]["limits"] == {
        **limits,
        "gpus": None,
        "cpus": 3,
        "priority": 5,
    }
    assert volley("token", "limit", "ci", "--lift", "gpus", "--gpus", "3")[0] == 2
    for command in ("create", "limit"):
        for number in ("nan", "inf"):
            code, _, errors = volley("token", command, "ci", "--gpus", number)
            assert code == 2
            assert "--gpus" in errors
            assert "Input should be" in errors
    assert volley("token", "rm", "ci")[0] == 0


def test_the_token_in_the_environment_is_sent_and_its_absence_reported(
    api: FakeApi, volley: Volley, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.token = "s3cret"
    code, _, errors = volley("ls")
    assert code == 1
    assert "token" in errors
    monkeypatch.setenv("VOLLEY_TOKEN", "s3cret")
    assert volley("ls")[0] == 0


def configure(tmp_path: Path, text: str, mode: int = 0o600) -> None:
    file = tmp_path / "config" / "volley" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    file.chmod(mode)


def test_a_configured_token_is_sent_only_to_its_own_server(
    api: FakeApi, volley: Volley, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with served(FakeApi().app) as other:
        configure(tmp_path, f'server = "{other}"\ntoken = "s3cret"\n')
        assert volley("ls")[0] == 0
        assert "authorization" not in api.seen[-1][2]
    url = find_server()[0]
    monkeypatch.delenv("VOLLEY_SERVER")
    (tmp_path / "config" / "volley" / "config.toml").write_text(f'server = "{url}"\ntoken = "s3cret"\n')
    assert volley("ls")[0] == 0
    assert api.seen[-1][2]["authorization"] == "Bearer s3cret"


@pytest.mark.parametrize(
    ("text", "mode", "told"),
    [
        ('token = "s3cret"', 0o644, "chmod 600"),
        ('tokken = "x"', 0o600, "unknown key tokken"),
        ("server = 3", 0o600, "must be strings"),
        ("server", 0o600, "config.toml"),
    ],
)
def test_an_invalid_configuration_is_reported(
    api: FakeApi, volley: Volley, tmp_path: Path, text: str, mode: int, told: str
) -> None:
    configure(tmp_path, text, mode)
    code, _, errors = volley("ls")
    assert code == 1
    assert told in errors
    assert "s3cret" not in errors


def test_the_stack_of_volley_up_is_found_by_its_folder(
    api: FakeApi, volley: Volley, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = find_server()[0]
    monkeypatch.delenv("VOLLEY_SERVER")
    code, _, errors = volley("ls")
    assert code == 1
    assert "`volley up` starts one" in errors
    folder = StackFolder.at()
    folder.path.mkdir()
    folder.write_state(StackState(1, url, "unix:///x", "http://x", "/tmp/x", guarded=False, ready=True))
    assert volley("ls")[0] == 0


def test_up_rejects_options_that_differ_from_the_running_stack(volley: Volley, tmp_path: Path) -> None:
    folder = StackFolder(tmp_path / "stack")
    settings = UpSettings(folder=folder.path, port=7, cpus=8, runs=folder.runs, redis="redis://:s3cret@host/0")
    state = StackState(
        os.getpid(), "http://x", "redis://:s3cret@host/0", "http://y", "/p", False, True, settings.public()
    )
    assert "s3cret" not in json.dumps(state.settings)
    with folder.kept():
        folder.write_state(state)
        up = ("up", "--dir", str(folder.path))
        for same in ((), ("--port", "7", "--redis", "redis://:s3cret@host/0"), ("--runs", str(folder.runs))):
            code, out, _ = volley(*up, *same)
            assert (code, out.split(":")[0]) == (0, "already up")
        code, _, errors = volley(*up, "--port", "7", "--allow-code", "mine", "--redis", "redis://:0ther@host/0")
    assert code == 4
    assert "already up with other settings: `volley down` first" in errors
    assert "--allow-code is [], not ['mine']" in errors
    assert "--redis" in errors
    assert not any(word in errors for word in ("--port", "s3cret", "0ther"))


def test_an_unreachable_server_is_one_line(volley: Volley) -> None:
    code, _, errors = volley("ls", "--server", "http://127.0.0.1:1")
    assert code == 1
    assert errors.startswith("volley: http://127.0.0.1:1 does not answer")
    assert len(errors.splitlines()) == 1
