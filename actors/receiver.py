"""Receives weights from the learner in an engine's process, in a thread, while the engine generates."""

import logging
import threading
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from actors.weight_files import WeightFile, close_all, closing_all
from volley.checksum import WeightsDigest
from volley.errors import VolleyError
from volley.weight_group import WeightGroup, WeightGroupTerms

AWAIT_SECONDS = 600.0
KEPT = 2  # versions received but not loaded: the newest, and the one about to be loaded
logger = logging.getLogger(__name__)


class Receiver:
    """Holds versions received but not yet loaded. Each weight group has a thread, which ends with the group.

    A version that does not arrive completely is dropped: the actor then fetches it from the object store.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._received: dict[int, list[WeightFile]] = {}
        self._lock = threading.Lock()

    def join(self, terms: WeightGroupTerms, rank: int) -> None:
        """Join a new group as rank ``rank`` in the background; only the sender learns whether the group formed."""
        name = f"weight-group-{terms.name}"
        threading.Thread(target=self._follow, args=(terms, rank), name=name, daemon=True).start()

    def take(self, version: int) -> list[WeightFile]:
        """Remove and return the files of ``version``, which the caller closes; older versions are dropped.

        Raises:
            ValueError: ``version`` was not received.
        """
        with self._lock:
            if version not in self._received:
                raise ValueError(f"weights {version} were not received, only {sorted(self._received)}")
            files = self._received.pop(version)
            for old in [each for each in self._received if each < version]:
                close_all(self._received.pop(old))
            return files

    def close(self) -> None:
        """Drop all received versions."""
        with self._lock:
            while self._received:
                close_all(self._received.popitem()[1])

    def _follow(self, terms: WeightGroupTerms, rank: int) -> None:
        if terms.cuda:
            torch.cuda.set_device(self._device)
        try:
            group = WeightGroup(terms, rank)
            with suppress(EOFError):
                while True:
                    version = group.awaited(AWAIT_SECONDS)
                    if version is not None:
                        self._receive(group, version)
            group.close()
        except (VolleyError, RuntimeError, OSError) as error:
            logger.warning("rank %d leaves weight group %s: %s", rank, terms.name, error)

    def _receive(self, group: WeightGroup, version: int) -> None:
        digest = WeightsDigest()
        with closing_all() as files:
            while nbytes := group.next_size():
                file = WeightFile()
                files.append(file)
                _receive_file(group, file.sized(nbytes), digest)
            with self._lock:
                close_all(self._received.pop(version, []))  # from a learner that has restarted since
                self._received[version] = list(files)
                for old in list(self._received)[:-KEPT]:
                    close_all(self._received.pop(old))
            files.clear()  # so that `closing_all` does not close them
        group.confirm(version, digest.hexdigest() if group.terms.digests else "")


def _receive_file(group: WeightGroup, content: NDArray[np.uint8], digest: WeightsDigest) -> None:
    """Fill ``content``, uint8 [bytes], with the next file. Its memory is released before the one after it arrives."""
    group.receive(torch.from_numpy(content))
    if group.terms.digests:
        digest.add(content)
