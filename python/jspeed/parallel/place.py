"""Who a process is among several: from flags, torchrun's variables, Slurm's or Open MPI's. No jax in here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jspeed.errors import BadInput

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """One process among ``count``; ``coordinator`` is HOST:PORT of process 0, or None where JAX detects it."""

    index: int
    count: int
    coordinator: str | None
    local_index: int = 0
    local_count: int = 1


def find_place(
    environment: Mapping[str, str],
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
) -> Place | None:
    """Return this process's place, or None for a process alone. Raises :class:`BadInput` for half of the facts."""
    given = [coordinator, processes, process_id]
    if any(value is not None for value in given):
        if coordinator is None or processes is None or process_id is None:
            raise BadInput("several processes need all of --coordinator HOST:PORT, --processes N and --process-id I")
        return _checked(Place(process_id, processes, coordinator), "--process-id", "--processes")
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _of_torchrun(environment)
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if all(name in environment for name in slurm):
        ntasks, procid, localid = (_whole(environment, name) for name in slurm[2:])
        tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split("(")[0].split(",")[0]
        return _checked(Place(procid, ntasks, None, localid, max(int(tasks), localid + 1)), *reversed(slurm[2:4]))
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return _of_open_mpi(environment)
    return None


def _of_torchrun(environment: Mapping[str, str]) -> Place | None:
    missing = [name for name in _TORCHRUN if name not in environment]
    if environment["WORLD_SIZE"] == "1":
        return None
    if missing:
        raise BadInput(
            f"RANK and WORLD_SIZE are set but {missing[0]} is not; set all of {', '.join(_TORCHRUN)}, as torchrun and "
            "scripts/launch.py do, or unset RANK to run one process"
        )
    port = _whole(environment, "MASTER_PORT")
    if "TORCHELASTIC_RUN_ID" in environment:  # torchrun's own store listens there
        port += 1
    port = int(environment.get("JAX_COORDINATOR_PORT", port))
    place = Place(
        _whole(environment, "RANK"),
        _whole(environment, "WORLD_SIZE"),
        f"{environment['MASTER_ADDR']}:{port}",
        _whole(environment, "LOCAL_RANK", 0),
        _whole(environment, "LOCAL_WORLD_SIZE", 1),
    )
    return _checked(place, "RANK", "WORLD_SIZE")


def _of_open_mpi(environment: Mapping[str, str]) -> Place | None:
    """Open MPI before 5 names its head node in a variable that JAX reads; from 5 on one node needs no name."""
    index, count, local_index, local_count = (
        _whole(environment, f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    coordinator = environment.get("JAX_COORDINATOR_ADDRESS")
    if coordinator is None and "OMPI_MCA_orte_hnp_uri" not in environment:
        if local_count < count:
            raise BadInput(
                "Open MPI does not say where process 0 is; set JAX_COORDINATOR_ADDRESS=HOST:PORT for all processes, "
                "with the host that mpirun starts rank 0 on (mpirun -x JAX_COORDINATOR_ADDRESS=...)"
            )
        job = environment.get("PMIX_NAMESPACE", "")
        coordinator = f"127.0.0.1:{61_440 + sum(job.encode()) % 4_096}"
    return _checked(Place(index, count, coordinator, local_index, local_count), "rank", "size")


def _whole(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, default)
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise BadInput(f"the environment variable {name} is {text!r}; expected a whole number") from None


def _checked(place: Place, index: str, count: str) -> Place | None:
    if not 0 <= place.index < place.count:
        raise BadInput(f"{index} is {place.index} and {count} is {place.count}; expected 0 <= {index} < {count}")
    host, _, port = (place.coordinator or "host:1").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise BadInput(f"the coordinator {place.coordinator!r} is not HOST:PORT; write for example 10.0.0.1:29500")
    return place if place.count > 1 else None


def local_devices(place: Place, environment: Mapping[str, str]) -> list[int] | None:
    """This process's equal share of the GPUs it can see; None leaves all to it (it is alone here, or no GPUs)."""
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    told = environment.get("CUDA_VISIBLE_DEVICES")
    seen = len(list(Path("/dev").glob("nvidia[0-9]*"))) if told is None else len([d for d in told.split(",") if d])
    if seen < place.local_count:  # none, or each process was given its own
        return list(range(seen)) or None
    if seen % place.local_count:
        raise BadInput(
            f"{seen} GPUs cannot be divided over {place.local_count} processes of this node; start a number of "
            f"processes that divides {seen}"
        )
    share = seen // place.local_count
    return list(range(place.local_index * share, (place.local_index + 1) * share))
