"""Dead groups, whose advantages are all zero, and their replacement by other groups.

scored ─> dead? ─┬─ no ───────────────────────────────> the buffer
                 ├─ yes, and the limit is reached ────> the buffer: it counts in its batch
                 └─ yes ─> set aside: its slot is free, and another group is admitted in its place

At the next batch, the dead groups admitted first take the places that are left for dead ones, and the others are
dropped. Which groups a batch has therefore does not depend on the order in which they finished, without lag.

**The size of the step.** Let a batch hold P groups, of which l are live, after M groups were made for it, in order,
until P were live or M had reached its limit. The step is ``s / P`` times the sum of the P groups' gradients, with
``s = (P - 1) / (M - 1)`` if all P are live, else ``s = P / M``. This is the expected gradient of the first group made,
given which gradients were found: of all orders that end so, the share ``s l / P`` begins with a live group (Girshick,
Mosteller and Savage, Unbiased estimates for certain binomial sampling problems, 1946). So a step with refill has the
expectation of one without, exactly.
"""

from collections.abc import Sequence

import numpy as np

from services.coordinator.records import Batch, ReadyGroup, ResumePoint
from services.coordinator.solve_rates import SolveRates
from volley.errors import JobError
from volley.job import RLJob
from volley.objectives import BestOfK, Objective, advantages
from volley.objectives.spec import weighs_companions
from volley.update import PolicyUpdate

REPLACED = "no gradient; another group took its place"
_LOG_WEIGHT = 1e-3  # small enough that no first-order weight is floored


class Refill:
    """The dead groups that wait aside until the next batch decides which of them are dropped.

    A group is judged once. Were a resumed run to judge again, under an objective that was changed meanwhile, groups
    aside could turn out live: there would be more of them than slots, and no batch could ever be taken.

    Args:
        resume: says which of its ready groups wait here, and which of the others are dead.

    Attributes:
        limit: how many may wait; 0 without refill.
    """

    def __init__(self, job: RLJob, resume: ResumePoint) -> None:
        self.limit = job.sampling.most_replaced(job.prompts_per_step)
        ready = {each.meta.group_id: each for each in resume.ready}
        self._aside = {group_id: each for group_id, each in ready.items() if group_id in (resume.aside or ())}
        self._dead = ready.keys() & resume.dead  # of the groups in the buffer

    def __len__(self) -> int:
        """How many groups wait aside."""
        return len(self._aside)

    @property
    def aside(self) -> list[ReadyGroup]:
        """The groups that wait aside."""
        return list(self._aside.values())

    def state(self) -> dict[str, list[int]]:
        """Which groups wait aside, and which dead ones are in the buffer, as JSON."""
        return {"aside": sorted(self._aside), "dead": sorted(self._dead)}

    def sets_aside(self, ready: ReadyGroup, *, dead: bool) -> bool:
        """Whether the group waits here, and not in the buffer."""
        if dead and len(self._aside) < self.limit:
            self._aside[ready.meta.group_id] = ready
            return True
        if dead:
            self._dead.add(ready.meta.group_id)
        return False

    def settle(self, taken: Sequence[ReadyGroup], version: int) -> Batch:
        """The batch of a learner at ``version`` from the groups that the buffer gave it. Nothing waits aside after."""
        dead = [ready for ready in taken if ready.meta.group_id in self._dead]
        live = [ready for ready in taken if ready.meta.group_id not in self._dead]
        usable = [ready for ready in self._aside.values() if not ready.meta.is_stale(version - ready.max_lag)]
        # A group in the buffer is never too old, so there are enough.
        kept = sorted([*dead, *usable], key=_admission)[: len(dead)]
        kept_ids = {ready.meta.group_id for ready in kept}
        replaced = [ready for ready in (*dead, *self._aside.values()) if ready.meta.group_id not in kept_ids]
        self._dead -= {ready.meta.group_id for ready in dead}
        self._aside.clear()
        return Batch(
            groups=tuple(sorted([*live, *kept], key=_admission)),
            replaced=tuple(sorted(replaced, key=_admission)),
            weight=step_weight(len(taken), live=len(live), replaced=len(replaced)),
        )


def step_weight(groups: int, *, live: int, replaced: int) -> float:
    """The factor s of a batch of ``groups`` above, of which ``live`` are live, if ``replaced`` others were dropped."""
    made = groups + replaced
    if not replaced:
        return 1.0
    return (groups - 1) / (made - 1) if live == groups else groups / made


def is_dead(ready: ReadyGroup, objective: Objective, rates: SolveRates, update: PolicyUpdate) -> bool:
    """Whether a group's advantages are zero, whatever importance weights its samples have when it is trained on.

    Args:
        rates: have the group's k, where it adapts to the prompt.

    Raises:
        JobError: `best_of_k` lacks a rank, or the objective does not take such rewards.
    """
    columns = ready.columns(ranked=isinstance(objective, BestOfK))
    valid_n = columns.valid_n.copy()
    if update.mask_truncated:
        valid_n[list(ready.meta.cut)] = False
    if valid_n.sum() < 2:
        return False  # the learner drops it, and does not count it in the batch
    log_weights_n = None
    if weighs_companions(objective):
        # Advantages are sums of products of weights: at weights in general position, none is zero by chance.
        log_weights_n = _LOG_WEIGHT * np.random.default_rng(0).uniform(-1, 1, len(valid_n))
    try:
        a_n = advantages(
            np.where(valid_n, columns.rewards_n, 0.0),
            objective,
            log_weights=log_weights_n,
            answers=columns.answers_n,
            ranks=columns.ranks_n,
            valid=valid_n,
            k=rates.k_of(ready, objective),
        )
    except ValueError as error:
        raise JobError(str(error)) from error
    return not a_n.any()


def _admission(ready: ReadyGroup) -> int:
    return ready.meta.group_id
