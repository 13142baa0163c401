"""Keeps learner and actors in one weight group, for ``broadcast: {transport: collective}``.

A group's members are fixed. When the actors change, or the group has lost one, another is formed beside whatever goes
on; until it is there, and for each version it fails on, the actors take the weights from the object store.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from actors.pool import ActorPool
from learner.group import LearnerGroup
from services.start import cancel_all, first_error
from volley.errors import DeadlineExceeded, WorkerDied
from volley.job import RLJob
from volley.weight_group import WeightGroupTerms

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.5


class WeightGroups:
    """Of one life of the learner. Owned by the run's event loop."""

    def __init__(self, job: RLJob, actors: ActorPool, learner: LearnerGroup) -> None:
        self._spec, self._actors, self._learner = job.broadcast, actors, learner
        self._cuda = job.actors.gpus > 0 and job.learner.gpus_per_rank > 0
        self._digests = job.learner.verify_weights
        self._count = 0
        self._members: tuple[tuple[str, int], ...] = ()

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """For the length of the block, if the job wants one: see that there is a group of all actors."""
        if self._spec.transport != "collective":
            yield
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                keeping = tasks.create_task(self._keep(), name="weight group")
                try:
                    yield
                finally:
                    await cancel_all([keeping])
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    @property
    def whole(self) -> bool:
        """Are all actors that serve in the group that the learner sends to?"""
        return self._learner.weight_group is not None and self._members == self._actors.weight_group_members

    async def form(self) -> bool:
        """A new group of the actors that serve; False if it did not come about within its deadline."""
        members = self._actors.weight_group_members
        self._count += 1
        host, port = self._learner.rendezvous
        terms = WeightGroupTerms(
            host, port, str(self._count), members, self._cuda, self._digests, self._spec.deadline_s
        )
        try:
            _, formed = await asyncio.gather(
                self._actors.join_weight_group(terms), self._learner.join_weight_group(terms)
            )
        except (WorkerDied, DeadlineExceeded) as end:  # of the learner: whoever waits for its steps raises it
            log.warning("weight group %s: %s", terms.name, end)
            return False
        self._members = members if formed else ()
        return formed

    async def _keep(self) -> None:
        while True:
            needed = bool(self._actors.weight_group_members) and not self.whole
            failed = needed and not await self.form()
            await asyncio.sleep(self._spec.deadline_s if failed else LOOK_SECONDS)
