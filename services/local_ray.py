"""A Ray cluster to run on: the one that is there, or a local head of our own that ends with us."""

import contextlib
import functools
import json
import math
import os
import re
import signal
import socket
import threading
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any

from services.needs import Needs
from volley.errors import HostError

CONNECT_SECONDS = 5.0
ROOM_SECONDS = 1.0  # within which free room is given
ROOM_TO_SCALE = 16  # CPUs on top of what a job reserves on a head of its own: actors and workers may be added later


def keep_to_loopback(environment: MutableMapping[str, str]) -> None:
    """Have a Ray head started with ``environment`` listen on the loopback interface alone.

    Ray resolves 127.0.0.1 to an address that others reach, but for this switch, which it has for systems whose firewall
    asks about every port. Processes read it when they import Ray.
    """
    environment.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


@contextlib.contextmanager
def ray_cluster(
    needs: Needs, address: str | None = None, *, runtime_env: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Connect to Ray for the length of the block; yields the cluster's address.

    With no ``address`` (and no ``RAY_ADDRESS``) a head is started. Its CPU count is a scheduling figure, so it is
    raised to what the job reserves: more processes than cores share the cores.

    Args:
        runtime_env: what Ray brings to the processes of the run.

    Raises:
        HostError: no cluster answers at ``address``, or the one there lacks what the job needs and does not grow.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray gives way to every other process by default; a run would starve beside a busy editor.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # The environment of a worker is the driver's, whatever tool started the driver.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    import ray

    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        _check_answers(address)
    shipped = dict(runtime_env) if runtime_env else None
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            ray.init(address=address, log_to_driver=False, logging_level="error", runtime_env=shipped)
        else:
            with _sessions_of_their_own():
                ray.init(
                    address="local",
                    num_cpus=max(os.cpu_count() or 1, math.ceil(needs.cpus)) + ROOM_TO_SCALE,
                    resources={name: amount + ROOM_TO_SCALE for name, amount in needs.custom.items()},
                    object_store_memory=needs.object_store_bytes,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="error",
                    runtime_env=shipped,
                    _node_ip_address="127.0.0.1",
                )
    except Exception as error:
        ray.shutdown()
        where = f"at {address} does not answer" if address else "head did not start"
        raise HostError(f"Ray {where}: {' '.join(str(error).split())[:300]}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray puts its own in place, which ends the process as it stands
    try:
        gcs = str(ray.get_runtime_context().gcs_address)
        if not (address and can_grow(node_types(gcs))):  # a run waits for room then, and has nodes added
            _check_resources(needs, ray.cluster_resources(), address)
        yield gcs
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _sessions_of_their_own() -> Iterator[None]:
    """Signals to the driver's process group, such as `timeout` sends, do not reach the Ray processes started meanwhile.

    The driver ends them in order when it has written its checkpoint; they die with it in any case.
    """
    from ray._private import services

    popen = services.ConsolePopen
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def node_types(gcs_address: str) -> set[str]:
    """What the cluster's nodes are to its autoscaler, of either generation, as Ray tells it."""
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.experimental.internal_kv import _internal_kv_get

    first = json.loads(_internal_kv_get(b"__autoscaling_status") or b"{}").get("autoscaler_report") or {}
    second = get_cluster_status(gcs_address)
    return {*first.get("active_nodes", ()), *(n.ray_node_type_name for n in (*second.active_nodes, *second.idle_nodes))}


def can_grow(types: Collection[str]) -> bool:
    """Has the cluster an autoscaler? Where nobody adds nodes, the type of each is but its own id."""
    return any(not re.fullmatch(r"(node_)?[0-9a-f]{56}", name) for name in types)


def _check_answers(address: str) -> None:
    """Raise `HostError` where nobody listens at ``[ray://]host:port``: Ray itself would try for minutes."""
    host, found, port = address.removeprefix("ray://").rpartition(":")
    if not found or not port.isdigit():
        return  # "auto", or a name that Ray knows
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise HostError(f"Ray at {address} does not answer: {error}. Start it, or leave out --ray") from error


def _check_resources(needs: Needs, there: dict[str, float], address: str | None) -> None:
    if lacking := _lacking(needs, there):
        raise HostError(
            f"the Ray cluster{f' at {address}' if address else ''} is too small: the job reserves {lacking}. Lower "
            "actors.count, reward_workers.count or learner.ranks, or add nodes"
        )


class Room:
    """Asks the cluster for all of a run's processes at once, while it waits for its turn.

    The question is a placement group: it is there as a whole or not at all, and an autoscaler sees it and adds nodes.
    """

    def __init__(self, needs: Needs) -> None:
        from ray.util.placement_group import placement_group

        self._needs = needs
        self._group = placement_group([dict(each) for each in needs.processes]) if needs.processes else None

    def lacking(self) -> str:
        """What the cluster has not free, or nothing: the room is held then, until `leave`."""
        import ray

        if self._group is None or self._group.wait(ROOM_SECONDS):
            return ""
        lacking = _lacking(self._needs, ray.available_resources()) or "more on one node than any has"
        return f"waits for room on the cluster: the job reserves {lacking} free"

    def leave(self) -> None:
        """Give the room to the processes themselves."""
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)


def _lacking(needs: Needs, there: dict[str, float]) -> str:
    return "; ".join(
        f"{wanted:g} {name}s, it has {there.get(name, 0):g}"
        for name, wanted in (("CPU", needs.cpus), ("GPU", needs.gpus), *needs.custom.items())
        if wanted > there.get(name, 0) + 1e-6
    )
