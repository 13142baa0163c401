"""Publishes weights while the ranks keep learning.

Two threads of rank 0 work on a version while the next batch runs forward and backward. The *fetching* thread brings one
bucket after the other to host memory, and sends it to the weight group, if there is one. The *storing* thread computes
digests and puts the buckets into the object store. At most two buckets are between them.

    training   gather ─ mark        step ...                        settle ─ update of the weights
    fetching            bucket ─ send ─ copy    bucket ─ send ─ copy
    storing                                digest ─ put      digest ─ put

Ranks on CPUs also gather their shards in such a thread each (`learner.contributor`), through a process group of their
own; ranks on GPUs gather before the next batch begins, which NCCL does quickly. Until the weights are in host memory
they are read in place, so the optimiser's next step waits for that: `settle`.

What the weight group carries is put into the object store only when an actor needs it there: one that joins later, or
that the group lost. Until then the buckets stay in this process. The same holds for what is lent to engines that take
turns with the learner: on CPU a copy in shared memory, on a GPU the weights themselves.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from learner.lending import LentBucket
from learner.staging import HostBuffer, Staging
from learner.weights import file_parts
from volley.checksum import WeightsDigest
from volley.errors import DeadlineExceeded, VolleyError, WeightsGone
from volley.records import WeightBucket, WeightUpdate
from volley.refs import Ref
from volley.weight_group import WeightGroup, WeightGroupTerms, close_quietly
from volley.weight_links import SENDER

logger = logging.getLogger(__name__)
REMEMBERED = 2  # versions for which `Publisher.update` and `Publisher.store` still answer; 1 if it lends
BETWEEN = 2  # buckets in host memory that were fetched and are not stored
Arrays = tuple[NDArray[np.uint8], ...]
Tensors = dict[str, torch.Tensor]


class ObjectStore(Protocol):
    """The function of the module `ray` that a publisher uses."""

    def put(self, value: Arrays, /) -> Ref[Arrays]: ...


class Source(Enum):
    """What the tensors of a bucket are."""

    WEIGHTS = "the weights themselves, which the optimiser changes in place"
    GATHERED = "whole tensors in memory that ZeRO would have freed"
    ON_DEMAND = "whole tensors that do not exist before the fetching thread asks for them"


@dataclass(slots=True)
class _Fetched:
    """A bucket in host memory; ``buffer`` holds ``arrays``, unless they are the bucket's own tensors."""

    arrays: Arrays
    buffer: HostBuffer | None = None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(slots=True)
class _Kept:
    """A bucket that is not in the object store.

    Attributes:
        arrays: called when it must be stored.
        drop: called when it need not be kept any longer.
        in_place: ``arrays`` reads the weights.
    """

    arrays: Callable[[], Arrays]
    drop: Callable[[], None]
    in_place: bool = False


@dataclass(slots=True)
class _Publication:
    version: int
    begun: float = field(default_factory=time.perf_counter)
    fetching: list["Future[None]"] = field(default_factory=list)
    storing: list["Future[None]"] = field(default_factory=list)
    buckets: list[WeightBucket] = field(default_factory=list)  # without a reference if ``kept`` has them
    kept: dict[int, _Kept] = field(default_factory=dict)  # by index in ``buckets``
    digest: WeightsDigest = field(default_factory=WeightsDigest)
    update: "Future[WeightUpdate] | None" = None


class Publisher:
    """Belongs to the first rank.

    Args:
        object_store: the module `ray`.
        verify: compute a checksum of each version.
        deadline_s: limit on every wait for the threads.
        staging: buffers for what is copied.
        lends: lend versions to engines that use the same device, in place of storing them.
    """

    def __init__(
        self, object_store: ObjectStore, *, verify: bool, deadline_s: float, staging: Staging, lends: bool = False
    ) -> None:
        self._object_store, self._staging, self._lends = object_store, staging, lends
        self._verify, self._deadline = verify and not lends, deadline_s  # what is not copied cannot differ
        self._fetching = ThreadPoolExecutor(1, thread_name_prefix="publish-fetch")
        self._storing = ThreadPoolExecutor(1, thread_name_prefix="publish-store")
        self._extra_bucket = threading.Semaphore()  # held while a bucket takes memory that ZeRO would have freed
        self._between = threading.Semaphore(BETWEEN)
        self._keeping = threading.Lock()  # held while kept buckets are stored or dropped
        self._publications: dict[int, _Publication] = {}
        self._newest = _Publication(-1)
        self._group: WeightGroup | None = None
        self._next_group: WeightGroup | None = None  # replaces the group at the next version
        self._lost: str | None = None

    def begin(self, version: int) -> None:
        """Start publishing ``version``; `add` its buckets next. Raises whatever `settle` raises."""
        self.settle()
        if (again := self._publications.pop(version, None)) is not None:
            self._drop(again)
        self._newest = self._publications[version] = _Publication(version)
        for old in list(self._publications)[: -1 if self._lends else -REMEMBERED]:
            self._drop(self._publications.pop(old))
        self._fetching.submit(self._announce, version)

    def add(self, bucket: Callable[[], Tensors], source: Source) -> None:
        """Publish a bucket in the background.

        Args:
            bucket: called in the fetching thread.
            source: with `Source.GATHERED`, `add` waits until the bucket before is in host memory, so that at most two
                take extra memory. Of others any number may wait to be fetched.

        Raises:
            DeadlineExceeded: the fetching thread hangs.
        """
        gathered = source is Source.GATHERED
        if gathered and not self._extra_bucket.acquire(timeout=self._deadline):
            raise self._late(self._newest.version)
        if self._lends:
            fetching = self._fetching.submit(self._lend, self._newest, bucket)
        else:
            marked, in_place = self._staging.mark(), source is Source.WEIGHTS
            fetching = self._fetching.submit(self._fetch, self._newest, bucket, marked, in_place=in_place)
        if gathered:
            fetching.add_done_callback(lambda _: self._extra_bucket.release())
        self._newest.fetching.append(fetching)

    def end(self) -> None:
        """Finish the version: all its buckets were added."""
        self._newest.update = self._fetching.submit(self._finish, self._newest)

    def settle(self) -> None:
        """Wait until the weights may change. Errors of publishing are raised by `update` instead.

        Raises:
            DeadlineExceeded: a thread hangs.
        """
        if wait(self._newest.fetching, self._deadline).not_done:
            raise self._late(self._newest.version)

    def update(self, version: int) -> WeightUpdate:
        """Wait until ``version`` is in the object store, or the weight group has delivered it to all its members.

        Raises:
            ValueError: the version was not published, or is not among the last ``REMEMBERED``.
            DeadlineExceeded: a thread hangs.
        """
        publication = self._publications.get(version)
        if publication is None or publication.update is None:
            raise ValueError(f"version {version} is not being published")
        try:
            return publication.update.result(self._deadline)
        except DeadlineExceeded:
            raise
        except TimeoutError:
            raise self._late(version) from None

    def store(self, version: int) -> WeightUpdate:
        """Put what is kept of ``version`` into the object store too; returns the update with all of it.

        Raises:
            WeightsGone: the version is not among the last ``REMEMBERED``.
            DeadlineExceeded: a thread hangs.
        """
        try:
            update, publication = self.update(version), self._publications[version]
        except (KeyError, ValueError):
            raise WeightsGone(f"the learner does not have weights {version} any longer") from None
        stored = replace(update, buckets=self._all_stored(publication))
        if not stored.stored:
            raise WeightsGone(f"weights {version} were replaced by newer ones")
        return stored

    def leave_device(self) -> None:
        """Forget what is kept in place: the weights are going to change."""
        with self._keeping:
            for index in [index for index, kept in self._newest.kept.items() if kept.in_place]:
                self._newest.kept.pop(index).drop()

    def join(self, terms: WeightGroupTerms) -> bool:
        """Send through a new group from the next version on; returns False if it did not form within its deadline."""
        formed: Future[WeightGroup] = Future()
        # A daemon thread that nobody joins: NCCL may wait for ever for members that die while it connects.
        threading.Thread(target=_form, args=(terms, formed), daemon=True).start()
        try:
            group = formed.result(2 * terms.deadline_s)
        except Exception as error:  # noqa: BLE001 - a library may raise anything; the object store has every version
            formed.cancel()
            logger.warning("weight group %s did not form: %s", terms.name, error or "connecting hangs")
            return False
        self._fetching.submit(self._prepare, group)
        return True

    # ---- in the fetching thread ------------------------------------------------------------------------------------

    def _prepare(self, group: WeightGroup) -> None:
        if self._next_group is not None:
            close_quietly(self._next_group)
        self._next_group = group

    def _announce(self, version: int) -> None:
        next_group, self._next_group = self._next_group, None
        if next_group is not None:
            self._leave("a new group replaces it")
            self._group = next_group
        self._use_group(lambda group: group.announce(version))

    def _fetch(
        self,
        publication: _Publication,
        bucket: Callable[[], Tensors],
        gathered: "torch.cuda.Event | None",
        *,
        in_place: bool,
    ) -> None:
        """Bring a bucket to host memory, and let the storing thread have it; returns when the weights may change."""
        self._between.acquire()
        try:
            with self._staging.beside(gathered):
                fetched = self._brought(bucket)
        except BaseException:
            self._between.release()
            raise
        storing = self._storing.submit(self._store, publication, fetched, keep=self._group is not None)
        storing.add_done_callback(lambda _: self._between.release())
        publication.storing.append(storing)
        if in_place and fetched.buffer is None:
            wait([storing])

    def _lend(self, publication: _Publication, bucket: Callable[[], Tensors]) -> None:
        """Lend a bucket; on CPU returns when the weights may change."""
        tensors = bucket()
        lent = LentBucket(tensors)
        arrays = lent.arrays if lent.copied else partial(_on_host, bucket)
        publication.kept[len(publication.buckets)] = _Kept(arrays, lent.take_back, in_place=not lent.copied)
        publication.buckets.append(WeightBucket(None, lent.nbytes, lent.path))

    def _brought(self, bucket: Callable[[], Tensors]) -> _Fetched:
        """Send the bucket, if there is a group; returns it in host memory, copied only if sent, or if on a device."""
        parts = file_parts(bucket())
        device = parts[-1].device
        if device.type == "cpu" and self._group is None:
            return _Fetched(tuple(part.numpy() for part in parts))
        if device.type == "cpu":
            buffer = self._staging.copied(parts)
            self._use_group(lambda group: group.send(buffer.content))
            return _Fetched((buffer.array,), buffer)
        if self._group is not None:
            whole = torch.cat([part.to(device) for part in parts])
            self._use_group(lambda group: group.send(whole))
            parts = [whole]
        buffer = self._staging.copied(parts)
        return _Fetched((buffer.array,), buffer)

    def _finish(self, publication: _Publication) -> WeightUpdate:
        for each in [*publication.fetching, *publication.storing]:
            each.result()
        checksum = publication.digest.hexdigest() if self._verify else None
        received: frozenset[str] = frozenset()
        self._use_group(lambda group: group.send_end())
        if self._group is not None:
            received, problem = self._group.received(publication.version, checksum)
            if problem:
                self._leave(problem)
        if self._group is None and not self._lends:  # a group may have been lost in the course of this version
            self._all_stored(publication)
        lost, self._lost = self._lost, None
        seconds = time.perf_counter() - publication.begun
        return WeightUpdate(publication.version, tuple(publication.buckets), checksum, seconds, received, lost)

    def _use_group(self, call: Callable[[WeightGroup], None]) -> None:
        """Call the group, if there is one, and leave it on an error: the object store will have every bucket."""
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
        close_quietly(group)

    # ---- storing ---------------------------------------------------------------------------------------------------

    def _store(self, publication: _Publication, fetched: _Fetched, *, keep: bool) -> None:
        """In the storing thread: put a bucket into the object store, or keep it here."""
        if self._verify:
            arrays = fetched.arrays
            publication.digest.add(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
        if keep:
            publication.kept[len(publication.buckets)] = _Kept(lambda: fetched.arrays, partial(self._free, fetched))
            publication.buckets.append(WeightBucket(None, fetched.nbytes))
        else:
            publication.buckets.append(self._put(fetched.arrays))
            self._free(fetched)

    def _all_stored(self, publication: _Publication) -> tuple[WeightBucket, ...]:
        """Put the buckets of a version that are kept here into the object store; returns all its buckets.

        Those that are lent are kept on, since engines may be reading them.
        """
        for index in range(len(publication.buckets)):
            with self._keeping:  # for one bucket at a time, because `begin` waits for it
                kept = publication.kept.get(index)
                if kept is None or publication.buckets[index].ref is not None:
                    continue
                publication.buckets[index] = self._put(kept.arrays())
                if not self._lends:
                    publication.kept.pop(index).drop()
        return tuple(publication.buckets)

    def _put(self, arrays: Arrays) -> WeightBucket:
        return WeightBucket(self._object_store.put(arrays), sum(array.nbytes for array in arrays))

    def _drop(self, publication: _Publication) -> None:
        with self._keeping:
            while publication.kept:
                publication.kept.popitem()[1].drop()

    def _free(self, fetched: _Fetched) -> None:
        if fetched.buffer is not None:
            self._staging.give_back(fetched.buffer)

    def _late(self, version: int) -> DeadlineExceeded:
        return DeadlineExceeded("learner-0", f"weights {version} to be stored", self._deadline)


def _on_host(bucket: Callable[[], Tensors]) -> Arrays:
    return tuple(part.cpu().numpy() for part in file_parts(bucket()))


def _form(terms: WeightGroupTerms, formed: "Future[WeightGroup]") -> None:
    try:
        group = WeightGroup(terms, SENDER)
    except Exception as error:  # noqa: BLE001 - `join` says what it was, and the run goes on without a group
        if formed.set_running_or_notify_cancel():
            formed.set_exception(error)
        return
    if formed.set_running_or_notify_cancel():
        formed.set_result(group)
    else:
        close_quietly(group)  # `join` has given up
