"""``http``: scores with an external reward server.

    POST {"prompt": {"id", "text"}, "row": {...}, "samples": ["...", ...]}  ->  {"rewards": [0.0, null, ...]}

``null`` is an infra error for that sample. Any other failure is, after retries, an infra error for the whole group.
The answer may also have ``"ranks": [...]``, by which best_of_k picks samples.
"""

import os
import random
import sys
import time
from collections.abc import Sequence
from typing import TypeGuard

import httpx

from reward_servers.scorers.base import infra_error
from volley.errors import JobError
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import HttpScorer

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
MAX_WAIT_S = 5.0


class Remote:
    """Sends one request per group, retried until ``timeout_s`` has passed."""

    def __init__(self, spec: HttpScorer, transport: httpx.BaseTransport | None = None) -> None:
        self._spec = spec
        token = os.environ.get(spec.token_env) if spec.token_env else None
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(headers=headers, transport=transport)

    @staticmethod
    def check(spec: HttpScorer) -> None:
        """Raise JobError if the token's environment variable is not set."""
        if spec.token_env and spec.token_env not in os.environ:
            raise JobError(
                f"http scorer: the environment variable {spec.token_env} is not set; export it or remove token_env"
            )

    @staticmethod
    def check_row(spec: HttpScorer, prompt: Prompt) -> None:
        """Accept every row."""

    def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        body = {
            "prompt": {"id": prompt.id, "text": prompt.text},
            "row": dict(prompt.reference),
            "samples": list(texts),
        }
        deadline, problem = time.monotonic() + self._spec.timeout_s, ""
        for attempt in range(self._spec.attempts):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                response = self._client.post(self._spec.url, json=body, timeout=left)
                if response.status_code not in RETRIED:
                    response.raise_for_status()
                    return _verdicts(response.json(), len(texts))
                problem = f"HTTP {response.status_code}"
            except (httpx.HTTPStatusError, httpx.InvalidURL, ValueError) as failure:
                problem = str(failure)
                break
            except httpx.HTTPError as failure:
                problem = f"{type(failure).__name__}: {failure}"
            time.sleep(max(0.0, min(0.1 * 2**attempt * (1 + random.random()), MAX_WAIT_S, deadline - time.monotonic())))
        return [infra_error(f"{self._spec.url}: {problem or 'timed out'}")] * len(texts)

    def close(self) -> None:
        self._client.close()


def _verdicts(answer: object, count: int) -> list[Verdict]:
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list) or len(rewards) != count:
        raise ValueError(f'the answer must be {{"rewards": [...]}} with {count} numbers or nulls')
    ranks = answer.get("ranks") if isinstance(answer, dict) else None
    if ranks is None:
        ranks = [None] * count
    if not isinstance(ranks, list) or len(ranks) != count:
        raise ValueError(f'"ranks", if there are any, must be {count} numbers or nulls')
    return [_verdict(reward, rank) for reward, rank in zip(rewards, ranks, strict=True)]


def _is_finite(number: object) -> TypeGuard[float]:
    """Whether it is a number that a float holds."""
    return isinstance(number, int | float) and abs(number) <= sys.float_info.max


def _verdict(reward: object, rank: object) -> Verdict:
    if reward is None:
        return infra_error("the server returned no reward")
    if not _is_finite(reward):
        raise ValueError(f"the server returned the reward {reward!r}, which is not a finite number")
    if rank is not None and not _is_finite(rank):
        raise ValueError(f"the server returned the rank {rank!r}, which is not a finite number")
    status = VerdictStatus.PASSED if reward > 0 else VerdictStatus.WRONG_ANSWER
    return Verdict(status, float(reward), rank=None if rank is None else float(rank))
