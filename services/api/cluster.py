"""What the cluster has, and who holds what of it."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import httpx

from services.api.schemas import Holder, NodeView
from services.launcher import ray_token
from services.state import ENDED, Observed, RunRecord
from volley.errors import HostError

FRESH_SECONDS = 2.0
CALL_SECONDS = 10.0
_CAMEL = {"objectStoreMemory": "object_store_memory"}

Role = Literal["actor", "reward_worker", "learner_rank"]


class Cluster(Protocol):
    """The machines that runs are on."""

    async def nodes(self) -> list[NodeView]:
        """Raises `HostError` where the cluster does not answer."""


class NoCluster:
    """Of a server that is told of none: it serves what Redis holds."""

    async def nodes(self) -> list[NodeView]:
        return []


class RayCluster:
    """A Ray cluster, over the REST API of its head; this process never joins it. Use as a block.

    Args:
        address: ``http://host:port`` of the job server.
        token: of the cluster; None takes what Ray itself would.
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
        self._at = float("-inf")
        self._nodes: list[NodeView] = []
        self._busy = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def nodes(self) -> list[NodeView]:
        async with self._busy:
            if time.monotonic() - self._at >= FRESH_SECONDS:
                nodes, status = await asyncio.gather(
                    self._get("/api/v0/nodes?detail=true"), self._get("/api/cluster_status")
                )
                usage = ((status.get("clusterStatus") or {}).get("loadMetricsReport") or {}).get("usageByNode") or {}
                self._nodes = [node_view(each, usage.get(each["node_id"])) for each in nodes["result"]["result"]]
                self._at = time.monotonic()
        return self._nodes

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            answer = await self._http.get(path)
            answer.raise_for_status()
            return dict(answer.json()["data"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise HostError(f"Ray at {self._address} does not answer: {type(error).__name__} {error}") from error


def node_view(node: Mapping[str, Any], usage: Mapping[str, Any] | None) -> NodeView:
    """A node as Ray's state API tells it.

    Args:
        usage: by resource, how much is used and how much there is; None: the node reports none.
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


def holders(looked: Iterable[tuple[RunRecord, Observed]]) -> list[Holder]:
    """What each live run has reserved: its processes, at what its job says one takes."""
    found = []
    for record, observed in looked:
        if observed.state in ENDED or observed.state == "queued":
            continue
        counts: dict[Role, int] = {
            "actor": observed.actors,
            "reward_worker": observed.reward_workers,
            "learner_rank": observed.learner_ranks,
        }
        for role, count in counts.items():
            if count:
                cpus, gpus = _each(record.job, role)
                found.append(Holder(run=record.id, role=role, count=count, cpus=count * cpus, gpus=count * gpus))
    return found


def _each(job: dict[str, Any], role: Role) -> tuple[float, float]:
    """CPUs and GPUs of one process."""
    if role == "learner_rank":
        part = job.get("learner", {})
        return float(part.get("cpus_per_rank", 0)), float(part.get("gpus_per_rank", 0))
    part = job.get("actors" if role == "actor" else "reward_workers", {})
    return float(part.get("cpus", 0)), float(part.get("gpus", 0))
