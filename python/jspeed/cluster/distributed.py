"""Join several processes by ``jax.distributed``, and gather values.

:mod:`jspeed.cluster.rank` finds the rank of a process, :mod:`jspeed.cluster.failure` handles
errors. In a single process every function here does nothing.
"""

import json
import os
import socket
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax

from jspeed.base import jax_versions
from jspeed.base.processes import with_timeout
from jspeed.cluster.rank import TORCHRUN, Rank, find_rank, local_devices
from jspeed.cluster.rendezvous import proxy, rendezvous, reserved_port
from jspeed.cluster.timeout import heartbeat_limit, wait_limit
from jspeed.errors import BadInput, first_line, say

# seconds to wait for a value; process 0 may first have to prepare data, and its death is noticed
# sooner
LIMIT = 3600
# JAX aborts with a stack trace, or raises an error of its own, when one of its time limits expires:
# ours come first.
JAX_LIMIT = 86_400


class Store(Protocol):
    """What jspeed uses of the client of JAX's key-value store, whose class is private."""

    def key_value_set(self, key: str, value: str) -> None: ...  # noqa: D102
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...  # noqa: D102
    def key_value_set_bytes(self, key: str, value: bytes) -> None: ...  # noqa: D102
    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes: ...  # noqa: D102
    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None: ...  # noqa: D102


_rank: Rank | None = None
_joined = False
_gathered: Counter[str] = Counter()  # how often a name was used: a key of JAX's store is set once
# by the peer's rank: process 0 has one to each, the others one to process 0
connections: dict[int, socket.socket] = {}


def initialise(
    coordinator: str | None = None, processes: int | None = None, process_id: int | None = None
) -> None:
    """Join the other processes, once; later calls do nothing. Call before anything asks JAX for
    devices.

    The arguments are process 0's HOST:PORT, the number of processes and the index of this one;
    without them the launcher's variables say it. Raises :class:`BadInput` when one is missing after
    ``JSPEED_WAIT_SECONDS`` (120).
    """
    global _rank, _joined
    if _rank is not None:
        return
    rank = find_rank(os.environ, coordinator, processes, process_id)
    if rank is None:
        tasks = os.environ.get("SLURM_NTASKS", "1")
        if tasks != "1" and coordinator is None and "TORCHELASTIC_RESTART_COUNT" not in os.environ:
            say(
                f"note: srun did not start this process as one of the {tasks} tasks of Slurm's job:"
                " it runs alone"
            )
        for name, alone in ((TORCHRUN.rank, "0"), (TORCHRUN.size, "1")):
            if (value := os.environ.get(name, "").strip() or alone) != alone:
                say(
                    f"note: {name} is {value} but a launcher's other variables are not set: this"
                    " process runs alone"
                )
        return
    _rank = rank
    wait, silence = wait_limit(), heartbeat_limit()
    devices = local_devices(rank, os.environ)
    host, _, agreed_port = rank.coordinator.rpartition(":")
    # With the service on, JAX would take SIGTERM and ignore it.
    jax.config.update("jax_enable_preemption_service", False)
    # gRPC would use a site's HTTP proxy; JAX only warns of that.
    os.environ["no_grpc_proxy"] = ",".join(
        filter(None, [os.environ.get("no_grpc_proxy"), "127.0.0.1"])
    )
    jax.config.update("jax_check_proxy_envs", False)

    with reserved_port() as own_port:  # process 0's is the service's
        port, peers = rendezvous(host, int(agreed_port), rank.index, rank.count, wait, own_port)
        connections.update(peers)
        service = proxy(host, port) if rank.index else port
        join = partial(
            jax.distributed.initialize,
            f"127.0.0.1:{service}",
            rank.count,
            rank.index,
            local_device_ids=devices,
            cluster_detection_method="deactivate",
            coordinator_bind_address=f"[::]:{port}",
            initialization_timeout=JAX_LIMIT,
            heartbeat_timeout_seconds=int(2 * silence) + 1,
            shutdown_timeout_seconds=int(2 * silence) + 1,
        )
        try:
            with_timeout(wait, join)
        except TimeoutError:
            raise BadInput(
                f"process {rank.index} of {rank.count} registered, but JAX did not connect at"
                f" {host}:{port} within {wait:g} s; open all ports between the nodes"
            ) from None
        except jax.errors.JaxRuntimeError:
            raise
        except RuntimeError as error:
            asked = "join before the program uses JAX's devices or jax.distributed"
            raise BadInput(f"{asked}; JAX says: {first_line(error)}") from None
    _joined = True


def process_count() -> int:
    """Number of processes, without asking for devices."""
    return _rank.count if _rank else 1


def process_index() -> int:
    """Index of this process, without asking for devices."""
    return _rank.index if _rank else 0


def single_process() -> bool:
    """Whether this is a single process: no launcher, variable or flag says otherwise."""
    return _rank is None


def client() -> Store | None:
    """The key-value store that all processes share, or None before they have joined and in a single
    process."""
    return jax_versions.key_value_store() if _joined else None


def gather(name: str, value: Any) -> list[Any]:
    """Return the ``value``, any JSON, of every process, by index; all call this as often with a
    ``name``.

    Raises :class:`BadInput` as :func:`barrier` does.
    """
    store = client()
    if store is None:
        return [value]
    name = numbered(name)
    store.key_value_set(f"jspeed/{name}/{process_index()}", json.dumps(value))
    barrier(name)
    found = {
        int(key.rpartition("/")[2]): text
        for key, text in store.key_value_dir_get(f"jspeed/{name}/")
    }
    return [json.loads(found[index]) for index in range(process_count())]


def first(name: str, make: Callable[[], bytes]) -> bytes:
    """Return what ``make`` returns on process 0, which alone calls it; all call this as often with
    a ``name``.

    Raises :class:`BadInput` as :func:`barrier` does.
    """
    store = client()
    if store is None:
        return make()
    name = numbered(name)
    value = b""
    if process_index() == 0:
        value = make()
        store.key_value_set_bytes(f"jspeed/{name}", value)
    barrier(name)
    if process_index():
        value = store.blocking_key_value_get_bytes(f"jspeed/{name}", 1000 * LIMIT)
    return value


def numbered(name: str) -> str:
    """Return ``name`` with the number of its use, from the second on."""
    _gathered[name] += 1
    times = _gathered[name]
    return f"{name}, time {times}" if times > 1 else name


def barrier(name: str) -> None:
    """Return when all processes have called this. Use each ``name`` once.

    Raises :class:`BadInput` when one has not after an hour.
    """
    store = client()
    if store is not None:
        try:
            with_timeout(LIMIT, lambda: store.wait_at_barrier(f"jspeed/{name}", 1000 * JAX_LIMIT))
        except TimeoutError:
            raise BadInput(
                f"process {process_index()} waited {LIMIT:g} s for the others ({name}); find the"
                " one that failed or hangs, and start all again"
            ) from None
