"""Admission: which group may start next, and where the groups under way are.

                    ┌─ interrupted groups of a resumed run, under their old ids, first
may_admit ─> admit ─┤
                    └─ then the next prompt, until all planned groups and refills are admitted

admit ─> generate ─> score ─┬─> ready: the group waits in the buffer to be trained on, or aside (`refill`)
                            └─> drop: fewer than two samples were scored; another group is admitted in its place
take: the groups of the next batch leave the buffer, and those aside are dropped
"""

from collections.abc import Callable
from typing import Any

from services.coordinator.buffer import SlotBuffer
from services.coordinator.ledger import Ledger
from services.coordinator.records import Batch, ReadyGroup, ResumePoint
from services.coordinator.refill import REPLACED, Refill
from services.coordinator.scoring_health import ScoringHealth
from services.coordinator.turns import Stage
from volley.job import RLJob
from volley.records import Scores
from volley.state import Desired


class Admission:
    """Keeps track of groups from admission until they are ready or dropped. It never waits and performs no I/O.

    Args:
        ledger, buffer: shared with the coordinator, which takes batches from them.
        resume: the groups that wait there are put back into the buffer, or aside again.
        is_dead: whether a group has no gradient; only asked if the job refills.

    Attributes:
        refills: groups dropped before a batch took them; each is replaced by another group.
    """

    def __init__(
        self,
        job: RLJob,
        ledger: Ledger,
        buffer: SlotBuffer[ReadyGroup],
        resume: ResumePoint,
        is_dead: Callable[[ReadyGroup], bool] = lambda _ready: False,
    ) -> None:
        self._planned = job.steps * job.prompts_per_step
        self._ledger, self._buffer = ledger, buffer
        self._refill, self._is_dead = Refill(job, resume), is_dead
        self._health = ScoringHealth(job.infra_errors, program=job.rollout is not None)
        self._stages: dict[int, Stage] = {}  # groups under way
        self.refills = resume.refills
        for ready in resume.ready:
            group_id = ready.meta.group_id
            if group_id in (resume.aside or ()):
                continue
            oldest = ready.meta.oldest_version if ready.meta.sample_tokens else resume.step
            buffer.admit(group_id, started_at=oldest, lag=ready.max_lag)
            if resume.aside is None:
                self.ready(ready)
            else:
                buffer.put(group_id, ready, oldest_version=ready.meta.oldest_version)
        # Admitted by an earlier process and lost with it.
        self._interrupted = sorted(ledger.in_flight - {ready.meta.group_id for ready in resume.ready})

    @property
    def scoring_problem(self) -> str:
        """Why scoring fails so often that groups are only admitted one at a time, to probe it; "" while it works."""
        return self._health.problem

    def pause_reason(self, desired: Desired) -> str:
        """Why no further group is admitted for now, or "" if the run is not paused."""
        if desired.paused:
            return "paused by its user"
        if desired.actors == 0:
            return "no actors are desired"
        return self.scoring_problem

    def may_admit(self, desired: Desired, *, served: int, version: int) -> bool:
        """Whether one more group may start.

        Args:
            served: the oldest version that actors serve.
            version: the learner's.
        """
        if desired.paused or desired.actors == 0:
            return False
        if self._health.failing and (self._stages or not self._health.probe_due()):
            return False
        wanted = bool(self._interrupted) or self._ledger.admitted - self.refills - len(self._refill) < self._planned
        return wanted and self._buffer.can_admit(started_at=served, version=version)

    def admit(self, *, served: int) -> int:
        """Give the next group a slot; return its id, which is also its position in the order of prompts."""
        group_id = self._interrupted.pop(0) if self._interrupted else self._ledger.admit()
        self._buffer.admit(group_id, started_at=served)
        self._stages[group_id] = "generate"
        if self._health.failing:
            self._health.start_probe()
        return group_id

    def enter(self, group_id: int, stage: Stage) -> None:
        """Note that a group under way has entered ``stage``."""
        self._stages[group_id] = stage

    def scored(self, group_id: int, scores: Scores) -> list[tuple[str, str]]:
        """Note that a group has left the last stage; return what that says of scoring, see `ScoringHealth.note`.

        Raises:
            NoSignal: scoring has failed for too long.
            JobError: the user's scorer function is broken.
        """
        del self._stages[group_id]
        return self._health.note(scores)

    def ready(self, ready: ReadyGroup) -> None:
        """Let a scored group wait in the buffer to be trained on, or aside, without its slot."""
        group_id = ready.meta.group_id
        if self._refill.limit and self._refill.sets_aside(ready, dead=self._is_dead(ready)):
            self._buffer.drop(group_id)
        else:
            self._buffer.put(group_id, ready, oldest_version=ready.meta.oldest_version)

    def take(self, version: int) -> Batch | None:
        """The next batch for a learner at ``version``, or None if there is none yet."""
        if (taken := self._buffer.take(version)) is None:
            return None
        batch = self._refill.settle([ready for _, ready in taken], version)
        for ready in batch.replaced:
            self._ledger.drop(ready.meta.group_id, REPLACED, dead=True)
        self.refills += len(batch.replaced)
        return batch

    @property
    def finished(self) -> int:
        """Groups that are generated and scored, and in no batch yet."""
        return self._buffer.ready + len(self._refill)

    def waiting(self) -> list[ReadyGroup]:
        """Those groups, in order of admission."""
        return sorted([*self._buffer.ready_items(), *self._refill.aside], key=lambda ready: ready.meta.group_id)

    def state(self) -> dict[str, Any]:
        """What a resumed run must know of replaced groups, as JSON; see `ResumePoint`."""
        return {"refills": self.refills, **self._refill.state()}

    def drop(self, group_id: int, reason: str) -> None:
        """End a group that cannot be trained on; another one is admitted in its place."""
        self._buffer.drop(group_id)
        self._ledger.drop(group_id, reason)
        self.refills += 1

    def stages(self) -> dict[str, int]:
        """How many groups are being generated and scored."""
        stages = list(self._stages.values())
        return {"generating": stages.count("generate"), "scoring": stages.count("score")}
