"""The Ray cluster of a run: an existing one, or a local head that ends with this process."""

import contextlib
import functools
import json
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any

from services.jobs.needs import GIB, RAY_BYTES, Needs
from services.stack.launcher.raylet import forking_workers
from volley.errors import HostError
from volley.memory import available_memory

CONNECT_SECONDS = 5.0
APPEAR_SECONDS = 10.0
POLL_SECONDS = 0.5
GRANT_SECONDS = 1.0  # free resources are granted within this time
ROOM_TO_SCALE = 16  # CPUs of a local head beyond what the job reserves, for actors and workers added later


def keep_to_loopback(environment: MutableMapping[str, str]) -> None:
    """Make a Ray head started with ``environment`` listen only on the loopback interface.

    Without this switch, Ray replaces 127.0.0.1 by an address that other machines can reach. Ray has it for systems
    whose firewall asks about every port. Processes read it when they import Ray.
    """
    environment.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


@contextlib.contextmanager
def ray_cluster(
    needs: Needs, address: str | None = None, *, runtime_env: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Connect to Ray while the block runs; yields the cluster's address.

    Without ``address`` and ``RAY_ADDRESS``, a local head is started. Its CPU count only limits scheduling, so it is
    raised to what the job reserves; if there are more processes than cores, they share the cores.

    Args:
        runtime_env: Ray's runtime environment for the processes of the run.

    Raises:
        HostError: no cluster answers at ``address``, or it is too small for the job and has no autoscaler.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default, Ray lowers the priority of its workers; a run would starve next to a busy editor.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Workers that Ray starts before anybody asks for them seldom fit what a run asks for, and each costs 0.7 CPU s.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Workers use the driver's environment, whichever tool started the driver.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    import ray

    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        _check_answers(address)
    _connect(needs, address, dict(runtime_env) if runtime_env else None)
    try:
        gcs = str(ray.get_runtime_context().gcs_address)
        _check_resources(needs, gcs, address)
        yield gcs
    finally:
        ray.shutdown()


def _connect(needs: Needs, address: str | None, runtime_env: dict[str, Any] | None) -> None:
    """Initialise Ray. Raises `HostError` if the cluster does not answer or the local head does not start."""
    import ray

    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level="error", runtime_env=runtime_env)
        else:
            with _new_sessions(), _without_onlookers(), forking_workers():
                ray.init(
                    address="local",
                    num_cpus=max(os.cpu_count() or 1, math.ceil(needs.cpus)) + ROOM_TO_SCALE,
                    resources={name: amount + ROOM_TO_SCALE for name, amount in needs.custom.items()},
                    object_store_memory=needs.object_store_bytes,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="error",
                    runtime_env=runtime_env,
                    _node_ip_address="127.0.0.1",
                )
    except Exception as error:
        ray.shutdown()
        where = f"at {address} does not answer" if address else "head did not start"
        raise HostError(f"Ray {where}: {' '.join(str(error).split())[:300]}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray installs a handler that ends the process at once


@contextlib.contextmanager
def _new_sessions() -> Iterator[None]:
    """Start Ray's processes in new sessions, so that signals to the driver's process group do not reach them.

    `timeout` sends such signals, for example. The driver ends Ray in order after its checkpoint; Ray's processes die
    with the driver in any case.
    """
    from ray._private import services

    popen = services.ConsolePopen
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


@contextlib.contextmanager
def _without_onlookers() -> Iterator[None]:
    """Start a head without its API server and the monitor of its autoscaler, which nobody asks about a single run.

    `ray.init` would wait for the former, which takes a second to import what it needs.
    """
    from ray._private.node import Node

    kept = Node.start_api_server, Node.start_monitor
    Node.start_api_server = Node.start_monitor = lambda node, **_: None
    try:
        yield
    finally:
        Node.start_api_server, Node.start_monitor = kept


def node_types(gcs_address: str) -> set[str]:
    """Return the autoscaler's node types of the cluster's nodes, from both generations of Ray's autoscaler."""
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.experimental.internal_kv import _internal_kv_get

    first = json.loads(_internal_kv_get(b"__autoscaling_status") or b"{}").get("autoscaler_report") or {}
    second = get_cluster_status(gcs_address)
    return {*first.get("active_nodes", ()), *(n.ray_node_type_name for n in (*second.active_nodes, *second.idle_nodes))}


def can_grow(types: Collection[str]) -> bool:
    """Return whether the cluster has an autoscaler; without one, the type of each node is just its id."""
    return any(not re.fullmatch(r"(node_)?[0-9a-f]{56}", name) for name in types)


def _check_answers(address: str) -> None:
    """Raise `HostError` if nothing listens at ``[ray://]host:port``; Ray itself would try for minutes."""
    host, found, port = address.removeprefix("ray://").rpartition(":")
    if not found or not port.isdigit():
        return  # "auto", or a name that Ray knows
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise HostError(f"Ray at {address} does not answer: {error}. Start it, or omit --ray") from error


def _check_resources(needs: Needs, gcs_address: str, address: str | None) -> None:
    """Raise `HostError` if the cluster is too small and cannot grow; a run waits while an autoscaler adds nodes.

    Nodes and the autoscaler of a cluster that has just been started appear within some seconds.
    """
    import ray

    deadline = time.monotonic() + (APPEAR_SECONDS if address else 0)
    while lacking := _lacking(needs, ray.cluster_resources()):
        if address and can_grow(node_types(gcs_address)):
            return
        if time.monotonic() >= deadline:
            where = f" at {address}" if address else ""
            raise HostError(f"the Ray cluster{where} is too small: the job reserves {lacking}. {_advice(needs)}")
        time.sleep(POLL_SECONDS)


def _advice(needs: Needs) -> str:
    import ray

    if needs.gpus and not ray.cluster_resources().get("GPU"):
        return "It has no GPU: write actors.gpus: 0 and learner.gpus_per_rank: 0 to compute on CPUs, or add nodes"
    return "Lower actors.count, reward_workers.count or learner.ranks, or add nodes"


class ClusterReservation:
    """Reserves the resources of all of a run's processes at once while the run waits for its turn.

    It is a placement group, so it is granted as a whole or not at all, and an autoscaler that sees it adds nodes.
    """

    def __init__(self, needs: Needs) -> None:
        self._needs = needs
        self._group = _reserved(needs)

    def lacking(self) -> str:
        """Return what the cluster does not have free, or "" once everything is reserved, until `leave`."""
        import ray

        if self._group is None:
            self._group = _reserved(self._needs)
        if self._group is not None and not self._group.wait(GRANT_SECONDS):
            lacking = _lacking(self._needs, ray.available_resources()) or "more on one node than any node has"
            return f"waits for room on the cluster: the job reserves {lacking} free"
        lacking = _lacking_memory(self._needs)
        if lacking:
            self.leave()  # for smaller runs, and so that two runs that wait do not count as users of memory
        return lacking

    def leave(self) -> None:
        """Release the reservation so that the processes themselves can use the resources."""
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def _reserved(needs: Needs) -> Any:
    from ray.util.placement_group import placement_group

    return placement_group([dict(each) for each in needs.processes]) if needs.processes else None


def _lacking_memory(needs: Needs) -> str:
    """Why the run waits for memory; "" on several nodes, whose free memory is not known here, or on GPUs."""
    import ray

    if needs.gpus or sum(node["Alive"] for node in ray.nodes()) != 1:
        return ""
    return memory_obstacle(needs, available_memory(), ray.cluster_resources(), ray.available_resources())


def memory_obstacle(needs: Needs, free_bytes: int, total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Why a run must wait for memory that other runs use; "" if there are none, as waiting would not help.

    Args:
        free_bytes: memory that is free on the only node.
        total, free: the cluster's resources, and those that are reserved neither by this run nor by others.
    """
    own = {"CPU": needs.cpus, "GPU": needs.gpus}
    others = any(total.get(name, 0) - free.get(name, 0) > amount + 1e-6 for name, amount in own.items())
    wanted = needs.memory_bytes - RAY_BYTES  # Ray itself runs already
    if not others or wanted <= free_bytes:
        return ""
    return (
        f"waits for memory: the run needs about {wanted / GIB:.1f} GiB and {free_bytes / GIB:.1f} GiB are free while "
        "other runs use this host"
    )


def _lacking(needs: Needs, available: dict[str, float]) -> str:
    return "; ".join(
        f"{needed:g} {name}s, it has {available.get(name, 0):g}"
        for name, needed in (("CPU", needs.cpus), ("GPU", needs.gpus), *needs.custom.items())
        if needed > available.get(name, 0) + 1e-6
    )
