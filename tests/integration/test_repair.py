"""The code repair example: the observation for a failing program, from the real sandbox's verdict."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from reward_servers.sandbox.health import Sandbox
from reward_servers.scorers.code import Code
from services.coordinator.turns import Turns
from services.data.prompts import read_prompts
from services.jobs.job_file import load_job
from tests.models import character_tokenizer, tiny_llama
from tests.refs import NOT_STORED
from volley.job import RLJob
from volley.records import Prompt, Scores, VerdictStatus
from volley.scoring import CodeScorer

pytestmark = pytest.mark.integration

FENCE = "```"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)


@pytest.fixture(scope="module")
def job() -> RLJob:
    job = load_job(Path("examples/repair/job.yaml"))
    assert isinstance(job, RLJob)
    return job


@pytest.fixture(scope="module")
def prompts(job: RLJob, tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    folder = tiny_llama(tmp_path_factory.mktemp("model"))
    tokenizer.save_pretrained(folder)
    return read_prompts(job.data, folder)


@pytest.fixture(scope="module")
def scorer(job: RLJob) -> Iterator[Code]:
    assert isinstance(job.scorer, CodeScorer)
    sandbox = Sandbox(job.scorer.sandbox, index=41)
    yield Code(job.scorer, sandbox)
    sandbox.close()


def shown(job: RLJob, prompt: Prompt, scorer: Code, *programs: str) -> tuple[list[VerdictStatus], list[str]]:
    """Verdicts on the programs, and the observations for the samples."""
    assert job.turns is not None
    texts = [f"Here:\n{FENCE}python\n{program}\n{FENCE}" if program else "I do not know." for program in programs]
    verdicts = scorer.score(prompt, texts)
    found = Turns(job.turns, character_tokenizer()).observation(NOT_STORED, prompt, Scores.pack(verdicts), 1)
    return [verdict.status for verdict in verdicts], list(found.texts) if found else []


def test_the_observation_contains_the_failing_test(job: RLJob, prompts: list[Prompt], scorer: Code) -> None:
    constant, crash = "print(7)", "import sys; print('so far'); sys.exit(3)"
    statuses, texts = shown(job, prompts[0], scorer, "print(sum(map(int, input().split())))", constant, crash, "")
    assert statuses == [
        VerdictStatus.PASSED,
        VerdictStatus.WRONG_ANSWER,
        VerdictStatus.RUNTIME_ERROR,
        VerdictStatus.NO_ANSWER,
    ]
    passed, second, first, none = texts
    assert passed == ""
    assert second.startswith("\n<|im_start|>user\nThat fails (wrong_answer) on this input:\n-5 5\n")
    assert "Expected:\n0\n\nPrinted:\n7" in second
    assert "on this input:\n3 4\n" in first
    assert "so far" in first
    assert "That did not work: no program in the sample." in none
    assert all(text.endswith("<|im_end|>\n<|im_start|>assistant\n") for text in texts if text)


def test_a_further_turn_has_the_format_of_the_first_one(job: RLJob, prompts: list[Prompt], scorer: Code) -> None:
    """The observation continues after the answer's end token, as the chat template would."""
    _, (text,) = shown(job, prompts[0], scorer, "print(7)")
    answer = f"{FENCE}python\nprint(7)\n{FENCE}<|im_end|>"
    conversation = prompts[0].text + answer + text
    assert conversation.count("<|im_start|>assistant\n") == 2
    assert conversation.count("<|im_start|>user\n") == 2
    assert conversation.count("<|im_end|>\n<|im_start|>") == 3


def test_a_group_ends_when_all_samples_passed(job: RLJob, prompts: list[Prompt], scorer: Code) -> None:
    right = "print(sum(letter in 'aeiou' for letter in input()))"
    assert shown(job, prompts[1], scorer, right, right) == ([VerdictStatus.PASSED] * 2, [])
