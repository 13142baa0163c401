"""In an engine's process: takes weights from the learner as they come, in a thread, while the engine generates."""

import logging
import threading
from contextlib import suppress

import torch

from actors.weight_files import WeightFile, close_all, closing_all
from volley.checksum import weights_checksum
from volley.errors import VolleyError
from volley.weight_group import WeightGroup, WeightGroupTerms

AWAIT_SECONDS = 600.0
KEPT = 2  # versions received and not loaded: the newest, and the one being asked for
logger = logging.getLogger(__name__)


class Receiver:
    """What was received and not yet loaded, by version. A thread for each weight group joined; it ends with the group.

    A version that does not come whole is not kept: the actor then takes it from the object store.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._here: dict[int, list[WeightFile]] = {}
        self._lock = threading.Lock()

    def join(self, terms: WeightGroupTerms, rank: int) -> None:
        """Be rank ``rank`` of a new group, in the background; the sender knows whether it came about."""
        name = f"weight-group-{terms.name}"
        threading.Thread(target=self._follow, args=(terms, rank), name=name, daemon=True).start()

    def take(self, version: int) -> list[WeightFile]:
        """The files of ``version``, for the caller to close; older ones are dropped.

        Raises:
            ValueError: it was not received.
        """
        with self._lock:
            if version not in self._here:
                raise ValueError(f"weights {version} were not received, only {sorted(self._here)}")
            taken = self._here.pop(version)
            for old in [each for each in self._here if each < version]:
                close_all(self._here.pop(old))
            return taken

    def close(self) -> None:
        """Drop what was received."""
        with self._lock:
            while self._here:
                close_all(self._here.popitem()[1])

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
        with closing_all() as files:
            while nbytes := group.next_size():
                file = WeightFile()
                files.append(file)
                group.receive(torch.from_numpy(file.sized(nbytes)))
            checksum = weights_checksum(file.read() for file in files) if group.terms.digests else ""
            with self._lock:
                close_all(self._here.pop(version, []))  # of a learner that started again since
                self._here[version] = list(files)
                for old in list(self._here)[:-KEPT]:
                    close_all(self._here.pop(old))
            files.clear()  # they are no longer this function's to close
        group.confirm(version, checksum)
