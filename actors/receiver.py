"""Receives weights from the learner in an engine's process, in a thread, while the engine generates.

What a GPU receives stays there until it is loaded, as far as there is room; the rest waits in host memory.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from volley.checksum import WeightsDigest
from volley.errors import VolleyError
from volley.weight_files import host_memory
from volley.weight_group import WeightGroup, WeightGroupTerms, close_quietly

AWAIT_SECONDS = 600.0
SPARE_GPU_MEMORY = 1 << 30  # bytes left for what the engine allocates in a step
KEPT = 2  # versions received but not loaded: the newest, and the one about to be loaded
logger = logging.getLogger(__name__)


class Receiver:
    """Holds versions received but not yet loaded. Each weight group has a thread, which ends with the group.

    A version that does not arrive completely is dropped: the actor then fetches it from the object store.

    Args:
        device: the engine's.
        has_room: whether the device can keep this many more bytes; by default by its free memory, and never on CPU.
    """

    def __init__(self, device: torch.device, has_room: Callable[[int], bool] | None = None) -> None:
        self._device, self._has_room = device, has_room or self._has_free_memory
        self._received: dict[int, list[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def join(self, terms: WeightGroupTerms, rank: int) -> None:
        """Join a new group as rank ``rank`` in the background; only the sender learns whether the group formed."""
        name = f"weight-group-{terms.name}"
        threading.Thread(target=self._follow, args=(terms, rank), name=name, daemon=True).start()

    def take(self, version: int) -> list[torch.Tensor]:
        """Remove and return the files of ``version``, uint8 [bytes] each; older versions are dropped.

        Raises:
            ValueError: ``version`` was not received.
        """
        with self._lock:
            if version not in self._received:
                raise ValueError(f"weights {version} were not received, only {sorted(self._received)}")
            files = self._received.pop(version)
            for old in [each for each in self._received if each < version]:
                del self._received[old]
            return files

    def close(self) -> None:
        """Drop all received versions."""
        with self._lock:
            self._received.clear()

    def _follow(self, terms: WeightGroupTerms, rank: int) -> None:
        if terms.cuda:
            torch.cuda.set_device(self._device)
        group: WeightGroup | None = None
        try:
            group = WeightGroup(terms, rank)
            with suppress(EOFError):
                while True:
                    version = group.awaited(AWAIT_SECONDS)
                    if version is not None:
                        self._receive(group, version)
        except (VolleyError, RuntimeError, OSError) as error:
            logger.warning("rank %d leaves weight group %s: %s", rank, terms.name, str(error))  # not the files with it
        finally:
            if group is not None:
                close_quietly(group)

    def _receive(self, group: WeightGroup, version: int) -> None:
        digest, files = WeightsDigest(), list[torch.Tensor]()
        while nbytes := group.next_size():
            file = self._memory(nbytes)
            group.receive(file)
            if group.terms.digests:
                digest.add(file.cpu().numpy())
            files.append(file)
        with self._lock:
            self._received.pop(version, None)  # from a learner that has restarted since
            self._received[version] = files
            for old in list(self._received)[:-KEPT]:
                del self._received[old]
        group.confirm(version, digest.hexdigest() if group.terms.digests else "")

    def _memory(self, nbytes: int) -> torch.Tensor:
        """Memory for a file, uint8 [bytes]. Raises `HostError`: there is too little."""
        if self._has_room(nbytes):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return torch.from_numpy(host_memory(nbytes))

    def _has_free_memory(self, nbytes: int) -> bool:
        if self._device.type != "cuda":
            return False
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return nbytes + SPARE_GPU_MEMORY <= free + cached
