"""The cluster's resources, and which runs hold them."""

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import httpx

from services.api.shared import SharedRead
from services.supervisor.ray_jobs import ray_token
from volley.errors import HostError
from volley.state import ENDED, Observed, RunRecord
from volley.views import Holder, NodeView

FRESH_SECONDS = 2.0
CALL_SECONDS = 10.0
_CAMEL = {"objectStoreMemory": "object_store_memory"}

Role = Literal["actor", "reward_worker", "environment_worker", "learner_rank"]


class Cluster(Protocol):
    """The machines on which runs execute."""

    async def nodes(self) -> list[NodeView]:
        """Return all nodes. Raises `HostError` if the cluster does not answer."""

    async def memory_by_node(self) -> list[int]:
        """Return the bytes of memory of each live node; [] if not known, or if the cluster adds nodes when needed.

        Raises:
            HostError: the cluster does not answer.
        """

    async def resources_by_node(self) -> Sequence[Mapping[str, float]] | None:
        """Return the resources of each live node; None if the cluster adds nodes when needed.

        Raises:
            HostError: the cluster does not answer.
        """


class NoCluster:
    """For a server without a cluster: it serves only what Redis holds."""

    async def nodes(self) -> list[NodeView]:
        return []

    async def memory_by_node(self) -> list[int]:
        return []

    async def resources_by_node(self) -> None:
        return None


class RayCluster:
    """A Ray cluster, read over its head's REST API without joining it. Use as an async context manager.

    Args:
        address: ``http://host:port`` of the job server.
        token: the cluster's token; None uses the one that Ray itself would.
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        token = token or ray_token()
        self._address = address
        self._http = httpx.AsyncClient(
            base_url=address,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=CALL_SECONDS,
            trust_env=False,
        )
        self._nodes = SharedRead(self._read_nodes, FRESH_SECONDS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def nodes(self) -> list[NodeView]:
        return await self._nodes.get()

    async def _read_nodes(self) -> list[NodeView]:
        nodes, status = await asyncio.gather(self._get("/api/v0/nodes?detail=true"), self._get("/api/cluster_status"))
        usage = ((status.get("clusterStatus") or {}).get("loadMetricsReport") or {}).get("usageByNode") or {}
        return [node_view(each, usage.get(each["node_id"])) for each in nodes["result"]["result"]]

    async def memory_by_node(self) -> list[int]:
        found, status = await asyncio.gather(self._get("/nodes?view=summary"), self._get("/api/cluster_status"))
        return [] if may_grow(status) else memory_of(found["summary"])

    async def resources_by_node(self) -> list[dict[str, float]] | None:
        nodes, status = await asyncio.gather(self.nodes(), self._get("/api/cluster_status"))
        return None if grows(status) else [node.resources for node in nodes if node.alive]

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            answer = await self._http.get(path)
            answer.raise_for_status()
            return dict(answer.json()["data"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise HostError(f"Ray at {self._address} does not answer: {type(error).__name__} {error}") from error


def node_view(node: Mapping[str, Any], usage: Mapping[str, Any] | None) -> NodeView:
    """Convert a node from Ray's state API.

    Args:
        usage: the used and total amount by resource; None if the node reports nothing.
    """
    total = {name: float(value) for name, value in node["resources_total"].items() if not name.startswith("node:")}
    used = {_CAMEL.get(name, name): float(pair[0]) for name, pair in (usage or {}).items()}
    return NodeView(
        id=node["node_id"],
        address=node["node_ip"],
        alive=node["state"] == "ALIVE",
        resources=total,
        available={} if usage is None else {name: value - used.get(name, 0.0) for name, value in total.items()},
    )


def may_grow(status: Mapping[str, Any]) -> bool:
    """Return whether the cluster has an autoscaler, or may have one; see `services.stack.ray.can_grow`.

    Args:
        status: of Ray's REST API, which removes underscores from names of node types.
    """
    return not _node_types(status) or grows(status)


def grows(status: Mapping[str, Any]) -> bool:
    """Return whether the cluster has an autoscaler; False as long as that is not known."""
    names = [name.lower().replace("_", "") for name in _node_types(status)]
    return not all(re.fullmatch(r"(node)?[0-9a-f]{56}", name) for name in names)


def _node_types(status: Mapping[str, Any]) -> list[str]:
    report = (status.get("clusterStatus") or {}).get("autoscalerReport") or {}
    return [*(report.get("activeNodes") or {}), *(report.get("idleNodes") or {})]


def memory_of(summary: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the memory of each live node in Ray's summary of nodes; [] until all have reported it."""
    live = [node for node in summary if node["raylet"].get("state") == "ALIVE"]
    sizes = [int(node["mem"][0]) for node in live if node.get("mem")]
    return sizes if len(sizes) == len(live) else []


def holders(runs: Iterable[tuple[RunRecord, Observed]]) -> list[Holder]:
    """Return what each live run has reserved: its process counts times the resources per process in its job."""
    found = []
    for record, observed in runs:
        if observed.state in ENDED or observed.state == "queued":
            continue
        counts: dict[Role, int] = {
            "actor": observed.actors,
            "reward_worker": observed.reward_workers,
            "environment_worker": observed.environment_workers,
            "learner_rank": observed.learner_ranks,
        }
        for role, count in counts.items():
            if count:
                cpus, gpus = _per_process(record.job, role)
                found.append(Holder(run=record.id, role=role, count=count, cpus=count * cpus, gpus=count * gpus))
    return found


def _per_process(job: dict[str, Any], role: Role) -> tuple[float, float]:
    """Return the CPUs and GPUs of one process."""
    if role == "learner_rank":
        part = job.get("learner", {})
        return float(part.get("cpus_per_rank", 0)), float(part.get("gpus_per_rank", 0))
    part = job.get(f"{role}s", {})
    return float(part.get("cpus", 0)), float(part.get("gpus", 0))
