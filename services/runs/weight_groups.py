"""Keeps learner and actors in one weight group, for ``broadcast: {transport: collective}``.

A group's members are fixed. When the actors change, or the group has lost a member, another group is formed while the
run continues. Until it exists, and for each version it fails on, the actors take the weights from the object store.
Those that a group delivered get there only if an actor needs them.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from actors.pool import ActorPool
from learner.pool import LearnerPool
from services.tasks import cancel_all, first_error
from volley.errors import DeadlineExceeded, WorkerDied
from volley.job import RLJob
from volley.weight_group import WeightGroupTerms

log = logging.getLogger(__name__)
POLL_SECONDS = 0.5


class WeightGroups:
    """Forms the weight groups of one learner, one after the other. Used from the run's event loop only."""

    def __init__(self, job: RLJob, actors: ActorPool, learner: LearnerPool) -> None:
        self._spec, self._actors, self._learner = job.broadcast, actors, learner
        self._cuda = job.actors.gpus > 0 and job.learner.gpus_per_rank > 0
        self._digests = job.learner.verify_weights
        self._count = 0
        self._members: tuple[tuple[str, int], ...] = ()

    @contextlib.asynccontextmanager
    async def maintained(self) -> AsyncIterator[None]:
        """During the block, form a group of all actors whenever there is none; does nothing for other transports."""
        if self._spec.transport != "collective":
            yield
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                maintaining = tasks.create_task(self._maintain(), name="weight group")
                try:
                    yield
                finally:
                    await cancel_all([maintaining])
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    @property
    def complete(self) -> bool:
        """Whether every serving actor is in the group that the learner sends to."""
        return self._learner.weight_group is not None and self._members == self._actors.weight_group_members

    async def form(self) -> bool:
        """Form a group of the serving actors; False if it was not formed within its deadline."""
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
        except (WorkerDied, DeadlineExceeded) as error:  # the learner died or hangs, which its next step raises
            log.warning("weight group %s: %s", terms.name, error)
            return False
        self._members = members if formed else ()
        return formed

    async def _maintain(self) -> None:
        while True:
            needed = bool(self._actors.weight_group_members) and not self.complete
            failed = needed and not await self.form()
            await asyncio.sleep(self._spec.deadline_s if failed else POLL_SECONDS)
