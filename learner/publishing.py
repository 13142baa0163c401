"""Publishes weights while the ranks keep learning.

A second thread of rank 0 stores each bucket in the object store and sends it to the weight group, if there is one,
while the next batch runs forward and backward. Ranks on CPUs also gather their shards in such a thread each, through a
process group of their own; ranks on GPUs gather before the next batch begins, which NCCL does quickly. These threads
read the weights in place, so the optimiser's next step waits for them: `settle`.

The object store gets every version, even one sent to the weight group: actors that join later, or that the group lost,
fetch it from there.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from learner.weights import file_parts
from volley.checksum import WeightsDigest
from volley.errors import DeadlineExceeded, VolleyError
from volley.records import WeightBucket, WeightUpdate
from volley.refs import Ref
from volley.weight_group import SENDER, WeightGroup, WeightGroupTerms

logger = logging.getLogger(__name__)
REMEMBERED = 2  # versions for which `Publisher.update` still answers
Arrays = tuple[NDArray[np.uint8], ...]
Tensors = dict[str, torch.Tensor]


class ObjectStore(Protocol):
    """The function of the module `ray` that a publisher uses."""

    def put(self, value: Arrays, /) -> Ref[Arrays]: ...


@dataclass(slots=True)
class _Publication:
    version: int
    begun: float = field(default_factory=time.perf_counter)
    stored: list["Future[WeightBucket]"] = field(default_factory=list)
    digest: WeightsDigest = field(default_factory=WeightsDigest)
    update: "Future[WeightUpdate] | None" = None


class Publisher:
    """Belongs to the first rank. The private methods below `join` run in the storing thread.

    Args:
        object_store: the module `ray`.
        verify: compute a checksum of each version.
        deadline_s: limit on every wait for the storing thread.
    """

    def __init__(self, object_store: ObjectStore, *, verify: bool, deadline_s: float) -> None:
        self._object_store = object_store
        self._verify, self._deadline = verify, deadline_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._extra_bucket = threading.Semaphore()  # held while a bucket takes memory that ZeRO would have freed
        self._publications: dict[int, _Publication] = {}
        self._newest = _Publication(-1)
        self._group: WeightGroup | None = None
        self._next_group: WeightGroup | None = None  # replaces the group at the next version
        self._lost: str | None = None

    def begin(self, version: int) -> None:
        """Start publishing ``version``; `add` its buckets next. Raises whatever `settle` raises."""
        self.settle()
        self._newest = self._publications[version] = _Publication(version)
        for old in list(self._publications)[:-REMEMBERED]:
            del self._publications[old]
        self._thread.submit(self._announce, version)

    def add(self, bucket: Callable[[], Tensors], *, gathered: bool) -> None:
        """Store a bucket in the background.

        Args:
            bucket: called in the storing thread.
            gathered: its tensors already take memory that ZeRO would have freed: `add` waits for the bucket before.
                Of others any number may wait to be stored.

        Raises:
            DeadlineExceeded: the storing thread hangs.
        """
        if gathered and not self._extra_bucket.acquire(timeout=self._deadline):
            raise self._late(self._newest.version)
        stored = self._thread.submit(self._store, self._newest, bucket)
        if gathered:
            stored.add_done_callback(lambda _: self._extra_bucket.release())
        self._newest.stored.append(stored)

    def end(self) -> None:
        """Finish the version: all its buckets were added."""
        self._newest.update = self._thread.submit(self._finish, self._newest)

    def settle(self) -> None:
        """Wait until the weights may change. Errors of storing are raised by `update` instead.

        Raises:
            DeadlineExceeded: the storing thread hangs.
        """
        if wait(self._newest.stored, self._deadline).not_done:
            raise self._late(self._newest.version)

    def update(self, version: int) -> WeightUpdate:
        """Wait until ``version`` is stored, and the weight group has received it or was given up.

        Raises:
            ValueError: the version was not published, or is not among the last ``REMEMBERED``.
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
        """Send through a new group from the next version on; returns False if it did not form within its deadline."""
        formed: Future[WeightGroup] = Future()
        # A daemon thread that nobody joins: NCCL may wait for ever for members that die while it connects.
        threading.Thread(target=_form, args=(terms, formed), daemon=True).start()
        try:
            group = formed.result(2 * terms.deadline_s)
        except (VolleyError, RuntimeError, TimeoutError) as error:
            formed.cancel()
            logger.warning("weight group %s did not form: %s", terms.name, error or "connecting hangs")
            return False
        self._thread.submit(self._prepare, group)
        return True

    # ---- in the storing thread -------------------------------------------------------------------------------------

    def _prepare(self, group: WeightGroup) -> None:
        if self._next_group is not None:
            _close(self._next_group)
        self._next_group = group

    def _announce(self, version: int) -> None:
        next_group, self._next_group = self._next_group, None
        if next_group is not None:
            self._leave("a new group replaces it")
            self._group = next_group
        self._use_group(lambda group: group.announce(version))

    def _store(self, publication: _Publication, bucket: Callable[[], Tensors]) -> WeightBucket:
        parts = file_parts(bucket())
        if self._group is not None:
            whole = torch.cat([part.to(parts[-1].device) for part in parts])
            self._use_group(lambda group: group.send(whole))
            parts = [whole]
        arrays = tuple(part.cpu().numpy() for part in parts)
        if self._verify:
            publication.digest.add(np.concatenate(arrays))
        return WeightBucket(self._object_store.put(arrays), sum(array.nbytes for array in arrays))

    def _finish(self, publication: _Publication) -> WeightUpdate:
        buckets = tuple(stored.result() for stored in publication.stored)
        checksum = publication.digest.hexdigest() if self._verify else None
        received: frozenset[str] = frozenset()
        self._use_group(lambda group: group.send_end())
        if self._group is not None:
            received, problem = self._group.received(publication.version, checksum)
            if problem:
                self._leave(problem)
        lost, self._lost = self._lost, None
        seconds = time.perf_counter() - publication.begun
        return WeightUpdate(publication.version, buckets, checksum, seconds, received, lost)

    def _use_group(self, call: Callable[[WeightGroup], None]) -> None:
        """Call the group, if there is one, and leave it on an error: the object store has every bucket too."""
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
        logger.warning("weight group %s ended: %s", group.terms.name, why)
        _close(group)

    def _late(self, version: int) -> DeadlineExceeded:
        return DeadlineExceeded("learner-0", f"weights {version} to be stored", self._deadline)


class Contributor:
    """Belongs to every other rank: a thread that sends its shards to the first.

    Args:
        name: of the rank, in errors.
        deadline_s: limit on every wait for the thread.
    """

    def __init__(self, name: str, deadline_s: float) -> None:
        self._name, self._deadline = name, deadline_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._newest: tuple[int, list[Future[Tensors]]] = (-1, [])

    def begin(self, version: int) -> None:
        """Start publishing ``version``; `add` its buckets next. Raises whatever `settle` raises."""
        self.settle()
        self._newest = (version, [])

    def add(self, bucket: Callable[[], Tensors]) -> None:
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
        _close(group)  # `join` has given up


def _close(group: WeightGroup) -> None:
    try:
        group.close()
    except RuntimeError as error:
        logger.warning("weight group %s: closing failed: %s", group.terms.name, error)
