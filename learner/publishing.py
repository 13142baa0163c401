"""Weights out of the first rank while it goes on learning.

The rank's own thread only gathers. Another one stores each bucket in Ray's object store, and sends it to the actors in
the weight group where there is one, while the next bucket is gathered and the next batch goes forward and back. What it
reads is not copied before, so the optimiser's next step waits for it: `Publisher.settle`.

Every version lies in the object store, whoever else got it: an actor that joins, or the group lost, takes it there.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from learner.weights import file_parts
from volley.checksum import weights_checksum
from volley.errors import DeadlineExceeded, VolleyError
from volley.records import WeightBucket, WeightUpdate
from volley.weight_group import SENDER, WeightGroup, WeightGroupTerms

logger = logging.getLogger(__name__)
REMEMBERED = 2  # versions whose update may still be asked for


@dataclass(slots=True)
class _Publication:
    version: int
    begun: float = field(default_factory=time.perf_counter)
    stored: list["Future[WeightBucket]"] = field(default_factory=list)
    update: "Future[WeightUpdate] | None" = None


class Publisher:
    """The first rank's. What begins with an underscore after ``join`` runs in the storing thread.

    Args:
        verify: each version carries a checksum.
        deadline_s: bound of every wait for the storing thread.
    """

    def __init__(self, *, verify: bool, deadline_s: float) -> None:
        self._verify, self._deadline = verify, deadline_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._room = threading.Semaphore()
        self._publications: dict[int, _Publication] = {}
        self._newest = _Publication(-1)
        self._group: WeightGroup | None = None
        self._joined: WeightGroup | None = None  # takes its place with the next version
        self._lost: str | None = None

    def begin(self, version: int) -> None:
        """The buckets to come are of ``version``. Raises as `settle`."""
        self.settle()
        self._newest = self._publications[version] = _Publication(version)
        for old in list(self._publications)[:-REMEMBERED]:
            del self._publications[old]
        self._thread.submit(self._announce, version)

    def add(self, tensors: dict[str, torch.Tensor], *, resident: bool) -> None:
        """Store these. Where they are ``resident``, memory that ZeRO holds anyway, any number may wait. Others are held
        beyond their gathering: one bucket at a time.

        Raises:
            DeadlineExceeded: the storing thread hangs.
        """
        if not resident and not self._room.acquire(timeout=self._deadline):
            raise self._late(self._newest.version)
        stored = self._thread.submit(self._store, tensors)
        if not resident:
            stored.add_done_callback(lambda _: self._room.release())
        self._newest.stored.append(stored)

    def end(self) -> None:
        """All buckets were added."""
        self._newest.update = self._thread.submit(self._finish, self._newest)

    def settle(self) -> None:
        """Returns when the weights may change. What went wrong in storing is raised by `update`.

        Raises:
            DeadlineExceeded: the storing thread hangs.
        """
        if wait(self._newest.stored, self._deadline).not_done:
            raise self._late(self._newest.version)

    def update(self, version: int) -> WeightUpdate:
        """Version ``version`` once all of it is stored, and the weight group has it or was given up.

        Raises:
            ValueError: it was not published, or too long ago.
            DeadlineExceeded: the storing thread hangs.
        """
        publication = self._publications.get(version)
        if publication is None or publication.update is None:
            raise ValueError(f"version {version} is not being published")
        try:
            return publication.update.result(self._deadline)
        except TimeoutError:
            raise self._late(version) from None

    def join(self, terms: WeightGroupTerms) -> bool:
        """Send through this group from the next version on; False if it was not formed within its deadline."""
        formed: Future[WeightGroup] = Future()
        # Its own thread, not to be waited for: NCCL has no bound for members that die while it connects.
        threading.Thread(target=_form, args=(terms, formed), daemon=True).start()
        try:
            group = formed.result(2 * terms.deadline_s)
        except (VolleyError, RuntimeError, TimeoutError) as error:
            formed.cancel()
            logger.warning("weight group %s was not formed: %s", terms.name, error or "it hangs")
            return False
        self._thread.submit(self._expect, group)
        return True

    # ---- in the storing thread -------------------------------------------------------------------------------------

    def _expect(self, group: WeightGroup) -> None:
        if self._joined is not None:
            _close(self._joined)
        self._joined = group

    def _announce(self, version: int) -> None:
        joined, self._joined = self._joined, None
        if joined is not None:
            self._leave("another one takes its place")
            self._group = joined
        self._over_group(lambda group: group.announce(version))

    def _store(self, tensors: dict[str, torch.Tensor]) -> WeightBucket:
        parts = file_parts(tensors)
        if self._group is not None:
            whole = torch.cat([part.to(parts[-1].device) for part in parts])
            self._over_group(lambda group: group.send(whole))
            parts = [whole]
        arrays = tuple(part.cpu().numpy() for part in parts)
        return WeightBucket(ray.put(arrays), sum(array.nbytes for array in arrays))

    def _finish(self, publication: _Publication) -> WeightUpdate:
        buckets = tuple(stored.result() for stored in publication.stored)
        checksum = weights_checksum(_file(bucket) for bucket in buckets) if self._verify else None
        received: frozenset[str] = frozenset()
        self._over_group(lambda group: group.send_end())
        if self._group is not None:
            received, problem = self._group.received(publication.version, checksum)
            if problem:
                self._leave(problem)
        lost, self._lost = self._lost, None
        seconds = time.perf_counter() - publication.begun
        return WeightUpdate(publication.version, buckets, checksum, seconds, received, lost)

    def _over_group(self, call: Callable[[WeightGroup], None]) -> None:
        """Nothing is lost with the group: the object store has every bucket too."""
        if self._group is None:
            return
        try:
            call(self._group)
        except (VolleyError, RuntimeError) as error:
            self._leave(str(error))

    def _leave(self, why: str) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        self._lost = group.terms.name
        logger.warning("weight group %s ends: %s", group.terms.name, why)
        _close(group)

    def _late(self, version: int) -> DeadlineExceeded:
        return DeadlineExceeded("learner-0", f"weights {version} to be stored", self._deadline)


def _form(terms: WeightGroupTerms, formed: "Future[WeightGroup]") -> None:
    try:
        group = WeightGroup(terms, SENDER)
    except (VolleyError, RuntimeError) as error:
        if formed.set_running_or_notify_cancel():
            formed.set_exception(error)
        return
    if formed.set_running_or_notify_cancel():
        formed.set_result(group)
    else:
        _close(group)  # nobody waits for it any more


def _close(group: WeightGroup) -> None:
    try:
        group.close()
    except RuntimeError as error:
        logger.warning("weight group %s: %s", group.terms.name, error)


def _file(bucket: WeightBucket) -> NDArray[np.uint8]:
    file: NDArray[np.uint8] = np.concatenate(ray.get(bucket.ref, timeout=60))
    return file
