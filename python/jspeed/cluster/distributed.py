"""Join several processes by ``jax.distributed``; share values between them, and check what must be equal on all.

:mod:`jspeed.cluster.rank` finds the rank of a process, :mod:`jspeed.cluster.failure` handles errors. In a single
process every function here does nothing.
"""

import json
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import jax

from jspeed.cluster.coordinator_proxy import start_proxy
from jspeed.cluster.rank import Rank, find_rank, local_devices
from jspeed.cluster.rendezvous import WAIT_SECONDS, meet, reserved_port
from jspeed.cluster.timeout import with_timeout
from jspeed.errors import BadInput

HEARTBEAT_SECONDS = "JSPEED_HEARTBEAT_SECONDS"  # how long a process may be silent before it counts as dead

Result = TypeVar("Result")

_rank: Rank | None = None
_joined = False
connections: dict[int, socket.socket] = {}  # by the peer's rank: process 0 has one to each, the others one to process 0


def initialise(coordinator: str | None = None, processes: int | None = None, process_id: int | None = None) -> None:
    """Join the other processes, once; later calls do nothing. Call before anything asks JAX for devices.

    Raises :class:`BadInput` when they have not all come after ``JSPEED_WAIT_SECONDS`` (120).
    """
    global _rank, _joined
    if _rank is not None:
        return
    rank = find_rank(os.environ, coordinator, processes, process_id)
    if rank is None:
        return
    _rank = rank
    wait, silence = seconds_of(WAIT_SECONDS, 120), silence_seconds()
    devices = local_devices(rank, os.environ)
    host, _, agreed_port = (rank.coordinator or _detected(rank)).rpartition(":")
    # With the service on, SIGTERM would be noted by JAX and then ignored.
    jax.config.update("jax_enable_preemption_service", False)
    # gRPC would use a site's HTTP proxy between nodes; JAX only warns of that.
    os.environ["no_grpc_proxy"] = ",".join(filter(None, [os.environ.get("no_grpc_proxy"), "127.0.0.1", host]))
    jax.config.update("jax_check_proxy_envs", False)

    with reserved_port() as own_port:  # process 0's is the service's
        port, met = meet(host, int(agreed_port), rank.index, rank.count, wait, own_port)
        connections.update(met)
        address = f"127.0.0.1:{start_proxy(host, port)}" if rank.index else f"{host}:{port}"
        # JAX aborts with a stack trace when one of its own timeouts expires, so they are longer than ours.
        join = partial(
            jax.distributed.initialize,
            address,
            rank.count,
            rank.index,
            local_device_ids=devices,
            cluster_detection_method="deactivate",
            coordinator_bind_address=f"[::]:{port}",
            initialization_timeout=86_400,
            heartbeat_timeout_seconds=int(2 * silence) + 1,
            shutdown_timeout_seconds=int(2 * silence) + 1,
        )
        try:
            with_timeout(wait, join)
        except TimeoutError:
            raise BadInput(
                f"process {rank.index} of {rank.count} met the others but JAX could not connect them at {host}:{port} "
                f"in {wait:g} s; nodes must reach each other at every port, so check the firewall between them"
            ) from None
    _joined = True


def _detected(rank: Rank) -> str:
    """HOST:PORT of process 0, by JAX's own detection of Slurm and Open MPI, which JAX keeps in a private module."""
    from jax._src.clusters import ClusterEnv

    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(None, rank.count, rank.index, [], None, 60)[0]
    except (RuntimeError, ValueError) as error:
        found, reason = None, str(error)
    else:
        reason = "JAX knows no such launcher"
    if found is None:
        raise BadInput(
            f"where process 0 is cannot be told from the launcher's variables ({reason}); say so with "
            "--coordinator HOST:PORT --processes N --process-id I"
        )
    return found


def seconds_of(name: str, default: float) -> float:
    """The environment variable ``name`` as a number of seconds above 0. Raises :class:`BadInput`."""
    text = os.environ.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < 1e9:
        raise BadInput(f"the environment variable {name} is {text!r}; expected a number of seconds above 0")
    return seconds


def silence_seconds() -> float:
    """How long a process may be silent before it counts as dead: ``JSPEED_HEARTBEAT_SECONDS`` (60)."""
    return seconds_of(HEARTBEAT_SECONDS, 60)


def process_count() -> int:
    """Number of processes, without asking for devices."""
    return _rank.count if _rank else 1


def process_index() -> int:
    """Index of this process, without asking for devices."""
    return _rank.index if _rank else 0


def is_alone() -> bool:
    """Whether this is a single process: no launcher, variable or flag says otherwise."""
    return _rank is None


def client() -> Any:
    """The key-value store that all processes share, or None before they have joined and for a process alone.

    JAX keeps it in a private module.
    """
    from jax._src import distributed

    return distributed.global_state.client if _joined else None


def share(name: str, value: str, seconds: float = 3600) -> str:
    """Return process 0's ``value`` on every process. Use each ``name`` once.

    The limit covers what process 0 may have to do first, such as preparing data; its death is noticed sooner.
    """
    store = client()
    if store is None:
        return value
    if process_index() == 0:
        store.key_value_set(f"jspeed/{name}", value)
        return value
    return _awaited(name, seconds, lambda: store.blocking_key_value_get(f"jspeed/{name}", int(1000 * seconds)))


def everyones(name: str, value: Any) -> list[Any]:
    """Return the ``value``, any JSON, of every process. Use each ``name`` once."""
    store = client()
    if store is None:
        return [value]
    store.key_value_set(f"jspeed/{name}/{process_index()}", json.dumps(value))
    barrier(name)
    return [json.loads(text) for _, text in store.key_value_dir_get(f"jspeed/{name}/")]


def barrier(name: str, seconds: float = 3600) -> None:
    """Return when all processes have called this. Use each ``name`` once."""
    store = client()
    if store is not None:
        _awaited(name, seconds, lambda: store.wait_at_barrier(f"jspeed/{name}", int(1000 * seconds)))


def _awaited(name: str, seconds: float, wait: Callable[[], Result]) -> Result:
    try:
        return with_timeout(seconds, wait)
    except TimeoutError:
        raise BadInput(f"process {process_index()} waited {seconds:g} s for the others ({name})") from None


def same_everywhere(facts: Mapping[str, Any]) -> None:
    """Return when all processes have given the ``facts`` of process 0; raises :class:`BadInput` with the first other.

    It also is a barrier: no process passes before all have come.
    """
    if client() is None:
        return
    mine = json.loads(json.dumps(facts, default=str))
    first = json.loads(share("facts", json.dumps(mine)))
    for name, value in mine.items():
        if first.get(name) != value:
            raise BadInput(
                f"{name} is {value} here but {first.get(name)} on process 0; start all processes with the same "
                "command, code and data"
            )
    barrier("facts-agree")
