"""What a token may ask for: the priority of its runs, and the resources of one run at a time.

Here a request is rejected that can never be met; the queue makes the others wait (`services.supervisor.queue`).
"""

from services.api.auth import Principal
from services.api.context import Context
from services.api.problems import Problem
from services.jobs.job_file import Job
from services.jobs.needs import resources_of
from services.supervisor.claims import Claims, largest
from services.supervisor.queue import ROUNDING, amount, beyond_quota, quotas
from volley.state import Desired, RunRecord


def check_priority(priority: int, sender: Principal) -> None:
    """Raise `Problem` 403 if the sender may not give a run this priority."""
    if priority > sender.max_priority:
        raise Problem(
            403,
            "priority-too-high",
            f"the token {sender.name} may give runs a priority of at most {sender.max_priority}, not {priority}; "
            f"an administrator can raise that: volley token limit {sender.name} --priority {priority}",
        )


def check_quota(job: Job, sender: Principal) -> None:
    """Raise `Problem` 422 if the job alone exceeds the sender's quota."""
    if problem := beyond_quota(sender.name, sender.limits, resources_of(largest(job, Desired()))):
        raise Problem(422, "over-quota", f"the run {problem}")


async def check_scale(record: RunRecord, job: Job, desired: Desired, context: Context) -> None:
    """Raise `Problem` 409 if a change of a run's workers would exceed the quota of the run's owner.

    What the owner's other runs want since the supervisor last wrote the queue counts too.
    """
    limits = (await context.store.limits()).get(record.owner)
    if limits is None:
        return
    places = await context.store.places(unreadable={})
    most, own = resources_of(largest(job, desired)), places.get(record.id)
    if problem := beyond_quota(record.owner, limits, most):
        raise Problem(409, "over-quota", f"the run {problem}")
    if own is None or own.state == "waiting":
        return
    owned = [each for each in places.values() if each.owner == record.owner and each.state != "waiting"]
    others = [each for each in owned if each.run != record.id]
    runs, claims = await context.store.read_runs([each.run for each in others], unreadable={}), Claims()
    wanting = {run.id: claims.of(run, wish, seen)[1] for run, wish, seen in runs}
    for name, limit in quotas(limits).items():
        wanted = most.get(name, 0.0)
        held = sum(max(each.most.get(name, 0.0), wanting.get(each.run, {}).get(name, 0.0)) for each in others)
        if wanted > own.most.get(name, 0.0) and held + wanted > limit + ROUNDING:
            raise Problem(
                409,
                "over-quota",
                f"the run would hold {amount(wanted, name)} and other runs of {record.owner} hold {held:g}: the quota "
                f"is {limit:g}",
            )
