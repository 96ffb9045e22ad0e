"""The rank of this process, from flags or the variables of torchrun, Kubeflow, Slurm or Open MPI. No jax here."""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from jspeed import accelerators
from jspeed.errors import BadInput

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_JAX = ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS")  # Kubeflow Trainer's, address with port
_JAXJOB = ("PROCESS_ID", "NUM_PROCESSES", "COORDINATOR_ADDRESS", "COORDINATOR_PORT")  # Kubeflow Training Operator's
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


@dataclass(frozen=True)
class Rank:
    """Rank ``index`` of ``count`` processes, and ``local_index`` of the ``local_count`` processes of this node.

    ``coordinator`` is HOST:PORT of process 0, or None if JAX detects it.
    """

    index: int
    count: int
    coordinator: str | None
    local_index: int = 0
    local_count: int = 1


def find_rank(
    environment: Mapping[str, str],
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
) -> Rank | None:
    """Return this process's rank, or None for a single process. Raises :class:`BadInput` for incomplete variables.

    Flags come first, then the variables of torchrun, Kubeflow (both operators), Slurm and Open MPI.
    """
    given = [coordinator, processes, process_id]
    if any(value is not None for value in given):
        if coordinator is None or processes is None or process_id is None:
            raise BadInput("several processes need all of --coordinator HOST:PORT, --processes N and --process-id I")
        return _checked(Rank(process_id, processes, coordinator), "--process-id", "--processes")
    present = [name for name in _TORCHRUN if name in environment]
    if present[:2] == ["RANK", "WORLD_SIZE"] or len(present) > 2:
        return _of_torchrun(environment)
    for index, count, *address in (_JAX, _JAXJOB):
        if all(name in environment for name in (index, count, *address)):
            coordinator = ":".join(environment[name] for name in address)
            return _checked(Rank(_integer(environment, index), _integer(environment, count), coordinator), index, count)
    if all(name in environment for name in _SLURM):
        return _of_slurm(environment)
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return _of_open_mpi(environment)
    return None


def _of_torchrun(environment: Mapping[str, str]) -> Rank | None:
    missing = [name for name in _TORCHRUN if name not in environment]
    if environment.get("WORLD_SIZE") == "1":
        return None
    if missing:
        raise BadInput(
            f"{', '.join(name for name in _TORCHRUN if name in environment)} are set but {missing[0]} is not; set all "
            f"of {', '.join(_TORCHRUN)}, as torchrun and jspeed launch do, or unset RANK to run one process"
        )
    port = _integer(environment, "MASTER_PORT")
    if "TORCHELASTIC_RUN_ID" in environment:  # torchrun's own store listens there
        port += 1
    port = _integer(environment, "JAX_COORDINATOR_PORT", port)
    rank = Rank(
        _integer(environment, "RANK"),
        _integer(environment, "WORLD_SIZE"),
        f"{environment['MASTER_ADDR']}:{port}",
        _integer(environment, "LOCAL_RANK", 0),
        _integer(environment, "LOCAL_WORLD_SIZE", 1),
    )
    return _checked(rank, "RANK", "WORLD_SIZE")


def _of_slurm(environment: Mapping[str, str]) -> Rank | None:
    """``SLURM_STEP_TASKS_PER_NODE`` reads ``8(x2)`` or ``8,4``; the first number suffices to divide the GPUs evenly."""
    count, index, local = (_integer(environment, name) for name in _SLURM[2:])
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "").split("(")[0].split(",")[0]
    tasks_here = max(int(tasks) if re.fullmatch("[0-9]{1,9}", tasks) else 1, local + 1)
    return _checked(
        Rank(index, count, environment.get("JAX_COORDINATOR_ADDRESS"), local, tasks_here),
        "SLURM_PROCID",
        "SLURM_NTASKS",
    )


def _of_open_mpi(environment: Mapping[str, str]) -> Rank | None:
    """Open MPI before 5 names its head node in a variable that JAX reads; from 5 on one node needs no name.

    The port is a hash of the job's name, as JAX's own detection of Open MPI (OmpiCluster) computes it.
    """
    index, count, local_index, local_count = (
        _integer(environment, f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    coordinator = environment.get("JAX_COORDINATOR_ADDRESS")
    if coordinator is None and "OMPI_MCA_orte_hnp_uri" not in environment:
        if local_count < count:
            raise BadInput(
                "Open MPI does not give the address of process 0; set JAX_COORDINATOR_ADDRESS=HOST:PORT for all "
                "processes, with the host that mpirun starts rank 0 on (mpirun -x JAX_COORDINATOR_ADDRESS=...)"
            )
        job = environment.get("PMIX_NAMESPACE", "")
        coordinator = f"127.0.0.1:{61_440 + zlib.crc32(job.encode()) % 4_096}"
    return _checked(Rank(index, count, coordinator, local_index, local_count), "rank", "size")


def _integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, default)
    if text is None:
        raise BadInput(f"the environment variable {name} is not set; expected a whole number")
    try:
        return int(text)
    except ValueError:
        raise BadInput(f"the environment variable {name} is {text!r}; expected a whole number") from None


def _checked(rank: Rank, index: str, count: str) -> Rank | None:
    if not 0 <= rank.index < rank.count:
        raise BadInput(f"{index} is {rank.index} and {count} is {rank.count}; expected 0 <= {index} < {count}")
    if not 0 <= rank.local_index < rank.local_count:
        raise BadInput(
            f"the local rank is {rank.local_index} but this node has {rank.local_count} processes; set "
            "LOCAL_WORLD_SIZE (1 where it is not set) to the number of processes of this node"
        )
    host, _, port = (rank.coordinator or "host:1").rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65_536:
        raise BadInput(f"the coordinator {rank.coordinator!r} is not HOST:PORT; write for example 10.0.0.1:29500")
    return rank if rank.count > 1 else None


def visible_gpus(environment: Mapping[str, str]) -> int:
    """Number of NVIDIA GPUs in this machine or container that ``CUDA_VISIBLE_DEVICES`` lets a process see.

    CUDA ignores the list from its first invalid entry on: -1 is "none", and so is the NoDevFiles that Slurm sets.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = map(str.strip, visible.split(","))
        return sum(1 for _ in takewhile(lambda name: name and name[0] != "-" and name != "NoDevFiles", names))
    return accelerators.find().gpus


def local_devices(rank: Rank, environment: Mapping[str, str]) -> list[int] | None:
    """This process's equal share of the GPUs it can see; None: JAX uses all visible devices."""
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    seen = visible_gpus(environment)
    if not seen:
        return None
    # The launcher assigned GPUs to each process: fewer than processes, or as many as Slurm's [TYPE:]NUMBER says.
    per_task = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
    if per_task == str(seen) or (seen < rank.local_count and "CUDA_VISIBLE_DEVICES" in environment):
        return list(range(seen))
    if seen % rank.local_count:
        raise BadInput(
            f"{seen} GPUs cannot be divided over {rank.local_count} processes of this node; start a number of "
            f"processes that divides {seen}"
        )
    share = seen // rank.local_count
    return list(range(rank.local_index * share, (rank.local_index + 1) * share))
