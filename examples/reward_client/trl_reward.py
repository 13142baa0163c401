"""Use Volley's reward server as a reward function in TRL.

    volley reward-server --port 8091 --slots 2
    python examples/reward_client/trl_reward.py            # scores two completions as a check

In a trainer: ``GRPOTrainer(..., reward_funcs=CodeReward("http://127.0.0.1:8091"))`` with a dataset column ``tests``.
"""

import argparse
from typing import Any

from reward_servers.client import CodeItem, Item, RewardClient


class CodeReward:
    """A TRL reward function: takes completions and dataset columns, returns one reward per completion.

    A completion that could not be scored gets ``None``, which TRL leaves out.
    """

    __name__ = "code_reward"

    def __init__(self, url: str, token: str | None = None) -> None:
        self._client = RewardClient(url, token)

    def __call__(
        self, prompts: list[Any], completions: list[Any], *, tests: list[list[dict[str, Any]]], **columns: Any
    ) -> list[float | None]:
        items = [
            Item(
                id=str(number),
                scorer=CodeItem.model_validate({"kind": "code", "tests": of_prompt}),
                responses=[_text(completion)],
            )
            for number, (completion, of_prompt) in enumerate(zip(completions, tests, strict=True))
        ]
        return [item.verdicts[0].reward for item in self._client.score(items).items]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _text(completion: Any) -> str:
    """The completion's text: plain, or the last message of a conversation."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8091")
    parser.add_argument("--token")
    options = parser.parse_args()
    reward = CodeReward(options.url, options.token)
    tests = [{"stdin": "3 4\n", "expected": "7"}]
    right = "```python\nprint(sum(map(int, input().split())))\n```"
    print(reward(["add", "add"], [right, "```python\nprint(8)\n```"], tests=[tests, tests]))
    reward.close()


if __name__ == "__main__":
    main()
