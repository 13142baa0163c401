"""Sends a rank's shards to the first rank while steps go on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from volley.errors import DeadlineExceeded


class Contributor:
    """Belongs to every other rank: a thread that sends its shards to the first.

    Args:
        name: of the rank, in errors.
        deadline_s: limit on every wait for the thread.
    """

    def __init__(self, name: str, deadline_s: float) -> None:
        self._name, self._deadline = name, deadline_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._newest: tuple[int, list[Future[dict[str, torch.Tensor]]]] = (-1, [])

    def begin(self, version: int) -> None:
        """Start publishing ``version``; `add` its buckets next. Raises whatever `settle` raises."""
        self.settle()
        self._newest = (version, [])

    def add(self, bucket: Callable[[], dict[str, torch.Tensor]]) -> None:
        """Send the shards of a bucket in the background."""
        self._newest[1].append(self._thread.submit(bucket))

    def settle(self) -> None:
        """Wait until the weights may change.

        Raises:
            DeadlineExceeded: the thread hangs.
            RuntimeError: a rank that it sent to, or waited for, has ended.
        """
        version, sent = self._newest  # read once: another thread may begin the next version meanwhile
        if wait(sent, self._deadline).not_done:
            raise DeadlineExceeded(self._name, f"shards of weights {version} to be sent", self._deadline)
        for each in sent:
            each.result()
