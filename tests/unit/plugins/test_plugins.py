"""Missing, broken and malformed plug-ins, found through the metadata that pip installs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from reward_servers.scorers import build_scorer
from services.cli import doctor
from services.data.prompts import read_prompts
from volley import plugins
from volley.base import Spec
from volley.data import DataSpec
from volley.errors import JobError
from volley.job import JOB
from volley.objectives import ObjectiveBase, advantages, parse_objective
from volley.plugins import OBJECTIVES, SCORERS, ObjectivePlugin, ScorerPlugin
from volley.records import Prompt

JOB_TREE: dict[str, Any] = {
    "kind": "rl",
    "name": "small",
    "steps": 2,
    "model": {"path": "/model"},
    "data": {"path": "/train.jsonl"},
    "scorer": {"kind": "countdown"},
    "objective": {"kind": "mean"},
}
Install = Callable[..., None]


class LoudScorer(Spec):
    kind: Literal["loud"] = "loud"
    letters: int = 1


class Half(ObjectiveBase):
    kind: Literal["half"] = "half"


class NotABase(Spec):
    kind: Literal["half"] = "half"


class Loud:
    """A third-party scorer without `check` and `check_row`."""

    def __init__(self, spec: LoudScorer) -> None:
        self.spec = spec

    def score(self, prompt: Prompt, texts: list[str]) -> list[Any]:
        return [len(text) for text in texts]

    def close(self) -> None: ...


LOUD = ScorerPlugin(LoudScorer, f"{__name__}:Loud")
LOUD_NOWHERE = ScorerPlugin(LoudScorer, f"{__name__}:Quiet")
HALF = ObjectivePlugin(Half, lambda g, answers, spec: (g - g.mean(-1, keepdims=True)) / 2)
HALF_FLAT = ObjectivePlugin(Half, lambda g, answers, spec: g.ravel())
HALF_INFINITE = ObjectivePlugin(Half, lambda g, answers, spec: g * np.inf)
HALF_NO_BASE = ObjectivePlugin(NotABase, lambda g, answers, spec: g)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Register an object under an entry point of a package called ``name``."""

    def installed(group: str, kind: str, value: str, name: str = "other-package") -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-1.2.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (folder / "entry_points.txt").write_text(f"[{group}]\n{kind} = {value}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(plugins, "_loaded", {})

    return installed


def scorer_error(kind: str = "loud") -> str:
    with pytest.raises(ValueError) as caught:
        JOB.validate_python({**JOB_TREE, "scorer": {"kind": kind}})
    return str(caught.value)


def test_a_scorer_is_found_checked_and_built(install: Install) -> None:
    install(SCORERS, "loud", f"{__name__}:LOUD")
    job = JOB.validate_python({**JOB_TREE, "scorer": {"kind": "loud", "letters": 2}})
    assert job.scorer == LoudScorer(letters=2)  # type: ignore[union-attr]
    assert JOB.validate_json(job.model_dump_json()) == job
    assert build_scorer(job.scorer).score(Prompt("1", ""), ["abc"]) == [3]  # type: ignore[union-attr, comparison-overlap]


def test_a_term_of_a_sum_may_be_a_plugin(install: Install) -> None:
    install(SCORERS, "loud", f"{__name__}:LOUD")
    terms = [{"scorer": {"kind": "exact"}}, {"scorer": {"kind": "loud", "letters": 3}}]
    job = JOB.validate_python({**JOB_TREE, "scorer": {"kind": "sum", "terms": terms}})
    assert job.model_dump(mode="json")["scorer"]["terms"][1] == {
        "scorer": {"kind": "loud", "letters": 3},
        "weight": 1.0,
    }


def test_an_unknown_kind_lists_the_known_ones(install: Install) -> None:
    install(SCORERS, "loud", f"{__name__}:LOUD")
    message = scorer_error("lout")
    assert "'lout' is not known. Built in: arc, code, countdown" in message
    assert "sum; format and length only as terms of kind: sum. Installed plug-ins: loud" in message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:X", "'loud' of other-package 1.2 does not load (ModuleNotFoundError"),
        (f"{__name__}:JOB_TREE", "is a dict, not a ScorerPlugin"),
        (f"{__name__}:HALF", "is a ObjectivePlugin, not a ScorerPlugin"),
    ],
)
def test_a_broken_plugin_is_reported_by_its_job_and_doctor_only(install: Install, value: str, message: str) -> None:
    install(SCORERS, "loud", value)
    assert message in scorer_error()
    JOB.validate_python(JOB_TREE)
    shown = JOB.json_schema()["$defs"]["RLJob"]["properties"]["scorer"]["anyOf"][0]["oneOf"]
    assert all("$ref" in each for each in shown)
    finding = next(each for each in doctor._plugins() if each.what == "plug-in loud (scorers)")
    assert (finding.state, finding.blocks) == ("broken", False)
    assert message in finding.fix


def test_a_plugin_whose_name_is_not_its_kind_is_rejected(install: Install) -> None:
    install(SCORERS, "quiet", f"{__name__}:LOUD")
    assert "without the field kind: Literal['quiet']" in scorer_error("quiet")


def test_a_missing_scorer_class_is_an_error(install: Install) -> None:
    install(SCORERS, "loud", f"{__name__}:LOUD_NOWHERE")
    job = JOB.validate_python({**JOB_TREE, "scorer": {"kind": "loud"}})
    with pytest.raises(JobError, match="Quiet of a plug-in does not load"):
        build_scorer(job.scorer)  # type: ignore[union-attr, arg-type]


def test_two_packages_with_the_same_plugin_name_are_rejected(install: Install) -> None:
    install(SCORERS, "loud", f"{__name__}:LOUD")
    install(SCORERS, "loud", f"{__name__}:LOUD", name="third-package")
    assert "offered by other-package 1.2 and third-package 1.2" in scorer_error()


def test_an_objective_gets_only_valid_samples_and_supports_center_and_normalize(install: Install) -> None:
    install(OBJECTIVES, "half", f"{__name__}:HALF")
    rewards = np.array([[1.0, 2.0, 99.0, 6.0], [1.0, 5.0, 9.0, 2.0]])
    valid = np.array([[True, True, False, True], [True, False, False, False]])
    got = advantages(rewards, {"kind": "half"}, valid=valid)
    np.testing.assert_allclose(got, [[-1.0, -0.5, 0.0, 1.5], [0.0, 0.0, 0.0, 0.0]])
    scaled = advantages([[1.0, 3.0]], {"kind": "half", "normalize": "std"})
    np.testing.assert_allclose(scaled, [[-0.5, 0.5]])
    objective = parse_objective({"kind": "half"})
    assert parse_objective(objective) is objective


@pytest.mark.parametrize(
    ("value", "message"),
    [("HALF_FLAT", r"advantages of shape \(3,\) for rewards of shape \(1, 3\)"), ("HALF_INFINITE", "not finite")],
)
def test_the_result_of_an_objective_is_checked(install: Install, value: str, message: str) -> None:
    install(OBJECTIVES, "half", f"{__name__}:{value}")
    with pytest.raises(ValueError, match=message):
        advantages([[1.0, 2.0, 3.0]], {"kind": "half"})


def test_an_objective_without_the_shared_fields_is_rejected(install: Install) -> None:
    install(OBJECTIVES, "half", f"{__name__}:HALF_NO_BASE")
    with pytest.raises(ValueError, match=r"not a subclass of volley\.objectives\.ObjectiveBase"):
        parse_objective({"kind": "half"})


def test_an_unknown_recipe_or_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'gsm9k' is not known\. Built in: aime, "):
        DataSpec.model_validate({"path": "x", "recipe": "gsm9k"})
    with pytest.raises(ValueError, match=r"'xml' is not known\. Built in: auto, csv, "):
        DataSpec.model_validate({"path": "x", "format": "xml"})


def test_a_readers_errors_are_reported(install: Install, tmp_path: Path) -> None:
    example = "examples.plugin.volley_example_plugin"
    install(plugins.DATA, "blocks", f"{example}:BLOCKS")
    install(plugins.DATA, "nobody", "no_such_module:X", name="third-package")
    import sys

    sys.modules["volley_example_plugin.blocks"] = __import__(f"{example}.blocks", fromlist=["read"])
    (tmp_path / "bad.txt").write_text("prompt: one\n\nwhat is this\n")
    with pytest.raises(JobError, match=r"bad\.txt: the reader of format blocks failed: line 3: write 'field: value'"):
        read_prompts(DataSpec.model_validate({"path": tmp_path / "bad.txt", "format": "blocks"}))
    del sys.modules["volley_example_plugin.blocks"]
