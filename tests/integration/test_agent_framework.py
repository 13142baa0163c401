"""An agent of openai-agents as it comes from the package index: docs/environments.md against a scripted model."""

import asyncio
import sys
import warnings
from collections.abc import AsyncIterator

import pytest
import yaml

from environments.outside.interpreter import outside_of
from environments.outside.programs import OutsidePrograms
from environments.records import Outcome
from tests.gateway_server import Served
from tests.integration.environment_pages import volley
from tests.pages import ROOT, blocks
from volley.gateway import GatewaySpec
from volley.rollout import ProgramRollout

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
ROW = {"prompt": "What is 123456 * 654321?", "answer": str(123456 * 654321)}
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 123456, "b": 654321}}\n</tool_call>'
TWO_CALLS = f"Let me see.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
async def programs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OutsidePrograms]:
    """The page's agent in the page's environment."""
    folder = tmp_path_factory.mktemp("framework")
    found = list(blocks(ROOT / "docs" / "environments.md"))
    start = next(at for at, each in enumerate(found) if "from agents import" in each.text)
    agent, job, command = found[start : start + 3]
    (folder / "sums.py").write_text(agent.text)
    await asyncio.to_thread(volley, folder, command.text.strip())
    tree = yaml.safe_load(job.text)
    assert tree["gateway"] == {"tool_parser": "hermes"}
    tree["rollout"]["python"] = tree["rollout"]["python"].replace("~/.volley", str(folder / "home"))
    outside = outside_of(ProgramRollout.model_validate(tree["rollout"]))
    assert outside is not None
    with pytest.MonkeyPatch.context() as patch:
        beside_tests = {str(ROOT / "tests" / "integration")}  # which has an agents.py of its own
        patch.setattr(sys, "path", [str(folder), *(each for each in sys.path if each not in beside_tests)])
        made = OutsidePrograms(outside, 120.0, 300.0, 1)
        await made.start()
    yield made
    await made.close()


@pytest.fixture(scope="module")
async def served() -> AsyncIterator[Served]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's import warns of many things
        made = Served(GatewaySpec(tool_parser="hermes"))
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("says", "reward"),
    [
        ([CALL, f"It is {ROW['answer']}."], 1.0),
        (
            [
                TWO_CALLS,
                " \n",
            ],
            0.0,
        ),
        ([TWO_CALLS, CALL, f" {ROW['answer']}\n"], 1.0),
        ([CALL.replace("multiply", "divide")], 0.0),
        (["I do not know."], 0.0),
    ],
)
async def test_the_agent_is_paid_and_its_history_is_continued(
    programs: OutsidePrograms, served: Served, says: list[str], reward: float
) -> None:
    client = served.client(*says, tokens=2000)
    seen = len(served.engine.prompts)
    ended = await programs.run(ROW, str(client.base_url), client.api_key)
    assert ended.outcome == Outcome(reward)
    session = served.session(client)
    assert (session.calls, session.rewrites, session.parse_failures, served.engine.says) == (len(says), 0, 0, [])
    prompts = served.engine.prompts[seen:]
    for call, before, after in zip(session.all_calls, prompts, prompts[1:], strict=False):
        assert after[: len(before) + len(call.drawn.tokens)] == [*before, *call.drawn.tokens]


async def test_an_agent_that_uses_up_its_calls_ends(programs: OutsidePrograms, served: Served) -> None:
    client = served.client(CALL, CALL, calls=2, tokens=2000)
    ended = await programs.run(ROW, str(client.base_url), client.api_key)
    assert ended.outcome == Outcome(0.0)
    assert served.session(client).end == "calls"
