"""The rank of this process and where process 0 is, from flags or the variables of its launcher. No
jax here.

Some sets of variables hold the address of process 0: those of torchrun, ``jspeed launch`` and
Kubeflow, which scripts set by hand too. The launchers of MPI, Flux and Slurm give none, and where
several started one another the innermost counts. Half a set is completed by a launcher's, with
which it must agree, or is an error: a process that may be one of several does not train alone.
"""

import re
import subprocess
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import IPv6Address
from itertools import takewhile
from typing import NamedTuple

from jspeed.base.accelerators import visible_gpus
from jspeed.errors import BadInput

HOST = "a host's name or address, such as node0, 10.0.0.1 or fd00::1"


@dataclass(frozen=True)
class Rank:
    """Rank ``index`` of ``count`` processes, and ``local_index`` of the ``local_count`` processes
    of this node.

    ``coordinator`` is HOST:PORT of process 0, an IPv6 address in brackets.
    """

    index: int
    count: int
    coordinator: str
    local_index: int = 0
    local_count: int = 1


class Names(NamedTuple):
    """What a launcher calls the parts of a :class:`Rank`; ``address`` is HOST:PORT, or HOST and
    PORT.

    ``common`` names are also used for other things: one of them alone says nothing beside a
    launcher's, and of JAXJOB's never anything.
    """

    rank: str
    size: str = ""
    local_rank: str = ""
    local_size: str = ""
    address: tuple[str, ...] = ()
    common: bool = False

    @property
    def needed(self) -> tuple[str, ...]:
        """The variables that make the set complete."""
        return (self.rank, self.size, *(self.address or (self.local_rank, self.local_size)))

    def present(self, env: Mapping[str, str]) -> list[str]:
        """The variables of the set that are there."""
        every = dict.fromkeys(
            (self.rank, self.size, self.local_rank, self.local_size, *self.address)
        )
        return [name for name in every if name in env]


TORCHRUN = Names(
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    ("MASTER_ADDR", "MASTER_PORT"),
    common=True,
)
# Kubeflow Trainer's
TRAINER = Names("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", address=("JAX_COORDINATOR_ADDRESS",))
JAXJOB = Names(  # Kubeflow Training Operator's
    "PROCESS_ID", "NUM_PROCESSES", address=("COORDINATOR_ADDRESS", "COORDINATOR_PORT"), common=True
)
ADDRESSED = (TORCHRUN, TRAINER, JAXJOB)
OPEN_MPI, *OTHER_MPI = (
    Names(f"{prefix}_RANK", f"{prefix}_SIZE", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE")
    # Open MPI and IBM Spectrum MPI; MVAPICH 2 and 3; jsrun; horovodrun
    for prefix in (
        "OMPI_COMM_WORLD",
        "MV2_COMM_WORLD",
        "MVP_COMM_WORLD",
        "JSM_NAMESPACE",
        "HOROVOD",
    )
)
FLUX = Names("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
SLURM = Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
# mpirun may start a process on each node by srun or flux, whose variables its own processes inherit
LAUNCHERS = (
    OPEN_MPI,
    *OTHER_MPI,
    Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Hydra: MPICH, Intel MPI
    Names("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),  # Cray
    Names("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    FLUX,
    SLURM,
    Names("PMIX_RANK"),  # these two tell no more
    Names("ALPS_APP_PE"),
)
JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri", "PALS_APID", "FLUX_JOB_ID", "SLURM_JOB_ID")


def find_rank(
    environment: Mapping[str, str],
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
) -> Rank | None:
    """Return this process's rank, or None for a single process.

    Flags come first, then the variables of torchrun, Kubeflow (both operators), MPI's launchers,
    Flux and Slurm. The batch script of ``sbatch`` and the shell of ``salloc`` are a single process:
    ``srun`` starts several. Raises :class:`BadInput` for variables that are there by half or
    contradict each other.
    """
    given = [coordinator, processes, process_id]
    if any(value is not None for value in given):
        if coordinator is None or processes is None or process_id is None:
            raise BadInput(
                "several processes need all of --coordinator HOST:PORT, --processes N and"
                " --process-id I; give all three, or none"
            )
        _require_index(process_id, processes, "--process-id", "--processes")
        rank = Rank(process_id, processes, host_and_port("--coordinator", coordinator))
        return rank if processes > 1 else None

    env = _non_empty(environment)
    ranks = {
        names: _rank_of(names, env)
        for names in (*ADDRESSED, *LAUNCHERS)
        if env.keys() >= {*names.needed}
    }
    chosen = next((names for names, rank in ranks.items() if rank.count > 1), None)
    # torchrun or jspeed launch, whatever started it
    if TORCHRUN in ranks and "TORCHELASTIC_RESTART_COUNT" in env:
        chosen = TORCHRUN
    else:
        _require_agreement(env, ranks, chosen)
    if chosen is None or ranks[chosen].count == 1:
        return None

    # Sets that say the same complete each other: srun sets PMI's variables too but tells of the
    # nodes in its own, and a script that sets torchrun's need not set the local ones.
    known = ranks[chosen]
    same = [
        names
        for names, rank in ranks.items()
        if (rank.index, rank.count) == (known.index, known.count)
    ]
    local = next(
        (names for names in same if {names.local_rank, names.local_size} <= env.keys()), chosen
    )
    rank = replace(ranks[local], coordinator=_coordinator(chosen, same[-1], ranks[local], env))
    if not 0 <= rank.local_index < rank.local_count:
        raise BadInput(
            f"the local rank is {rank.local_index} but this node has {rank.local_count} processes;"
            f" set {local.local_size} (1 where it is not set) to the number of processes of this"
            " node"
        )
    return rank


def _non_empty(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not empty, with Slurm's in their newest form.

    A batch script and the shell of ``salloc``, which are no step, have some of a task's variables:
    these are left out. Where that shell is a step, of one task, SLURM_NTASKS is still the number of
    the job.
    """
    env = {name: value for name, value in environment.items() if value.strip()}
    if env.get(SLURM.rank, "0") == "0" and not any(name.startswith("SLURM_STEP") for name in env):
        return {name: value for name, value in env.items() if name not in SLURM.needed}
    if "SLURM_NTASKS" in env:
        env = {SLURM.size: env["SLURM_NTASKS"], SLURM.local_size: "1"} | env
    return env


def _rank_of(names: Names, env: Mapping[str, str]) -> Rank:
    """Return the rank that a complete set tells, without the address."""
    index, count, local = (_integer(env, name, 0) for name in names[:3])
    _require_index(index, count, names.rank, names.size)
    if names is SLURM:  # 8(x2) or 8,4: the first number is enough to divide the GPUs evenly
        first = re.match("[0-9]{1,9}", env[names.local_size])
        local_count = max(int(first[0]) if first else 1, local + 1)
    elif names is FLUX:
        local_count = -(-count // max(_integer(env, names.local_size, 1), 1))
    else:
        local_count = _integer(env, names.local_size, 1)
    return Rank(index, count, "", local, local_count)


def _require_agreement(
    env: Mapping[str, str], ranks: Mapping[Names, Rank], chosen: Names | None
) -> None:
    """Raise :class:`BadInput` for a set that contradicts the rank of ``chosen``, or is there by
    half without any.

    Sets after ``chosen`` are of outer launchers. One of a launcher's that is not complete says
    nothing beside another that says "several": it is of a service that the launcher offers besides.
    """
    source = chosen or next(iter(ranks), None)
    for names in takewhile(
        lambda names: names is not chosen, ADDRESSED if chosen else (*ADDRESSED, *LAUNCHERS)
    ):
        present = names.present(env)
        alone = names.common and len(present) == 1
        no_rank = bool(names.address) and not {names.rank, names.size} & {*present}
        if not present or no_rank or (alone and (source is not None or names is JAXJOB)):
            continue
        if source is None and (
            _integer(env, names.rank, 0) != 0 or _integer(env, names.size, int(alone)) != 1
        ):
            missing = [name for name in names.needed if name and name not in env] or [
                "the number of processes"
            ]
            raise BadInput(
                f"{', '.join(present)} set without {', '.join(missing)} (unset or empty): this may"
                " be one of several processes; start it by a launcher that sets all (jspeed"
                " launch, torchrun, srun); or give --coordinator HOST:PORT --processes N"
                f" --process-id I; to run one process, unset {', '.join(present)}"
            )
        for name, its in ((names.rank, source.rank), (names.size, source.size)) if source else ():
            if name in env and _integer(env, name, 0) != _integer(env, its, 0):
                raise BadInput(
                    f"{name} is {env[name]} but {its} is {env[its]}; make them equal, or unset"
                    f" {name} if it is left from something else; jspeed launch --standalone starts"
                    " separate runs"
                )


def _coordinator(chosen: Names, launcher: Names, rank: Rank, env: Mapping[str, str]) -> str:
    """Return HOST:PORT of process 0: what ``chosen`` or else another set says, or where
    ``launcher`` started it.

    Its port is then a hash of the job's name. Raises :class:`BadInput` where nothing says the host.
    """
    for names in (chosen, TRAINER, JAXJOB, TORCHRUN):
        if names.address and env.keys() >= {*names.address}:
            if names is TRAINER:
                return host_and_port(names.address[0], env[names.address[0]])
            host, port = names.address
            number = env[port]
            if names is TORCHRUN and "TORCHELASTIC_RUN_ID" in env and (store := valid_port(number)):
                # torchrun's own store listens at MASTER_PORT
                number = str(store + 1 if store < 65_535 else store - 1)
            if names is TORCHRUN and "JAX_COORDINATOR_PORT" in env:
                port, number = "JAX_COORDINATOR_PORT", env["JAX_COORDINATOR_PORT"]
            return address(host, env[host], port, number)

    # of Open MPI before 5
    uri = re.search(r"tcp://([^,:;]+)|tcp6://\[([^],]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    if rank.local_count >= rank.count:
        host, where = "this node", "127.0.0.1"
    elif launcher is SLURM and "SLURM_STEP_NODELIST" in env:
        host, where = "SLURM_STEP_NODELIST", first_host(env["SLURM_STEP_NODELIST"])
    elif launcher is OPEN_MPI and uri:
        host, where = "OMPI_MCA_orte_hnp_uri", uri[1] or uri[2]
    else:
        raise BadInput(
            f"{launcher.rank} and its like do not give the address of process 0; set"
            " JAX_COORDINATOR_ADDRESS=HOST:PORT for all processes, with the host that rank 0"
            " starts on and a free port (by mpirun -x or mpiexec -genv)"
        )
    job = next((env[name] for name in JOBS if name in env), "")
    if launcher is SLURM:
        job += "." + env.get("SLURM_STEP_ID", "")
    # above what kernels give to clients
    default = 61_440 + zlib.crc32(job.encode(errors="replace")) % 4_096
    return address(
        host, where, "JAX_COORDINATOR_PORT", env.get("JAX_COORDINATOR_PORT", str(default))
    )


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default)).strip()
    if not re.fullmatch("-?[0-9]{1,9}", text):
        raise BadInput(f"the environment variable {name} is {text!r}; expected a whole number")
    return int(text)


def _require_index(index: int, count: int, index_name: str, count_name: str) -> None:
    if not 0 <= index < count:
        raise BadInput(
            f"{index_name} is {index} and {count_name} is {count}; expected 0 <= {index_name} <"
            f" {count_name}"
        )


def local_devices(rank: Rank, environment: Mapping[str, str]) -> list[int] | None:
    """This process's equal share of the GPUs it can see; None: JAX uses all visible devices."""
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    seen = visible_gpus(environment)
    if not seen:
        return None
    # The launcher assigned GPUs to each process: fewer than processes, or as many as Slurm's
    # [TYPE:]NUMBER says.
    per_task = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
    if per_task == str(seen) or (seen < rank.local_count and "CUDA_VISIBLE_DEVICES" in environment):
        return list(range(seen))
    if seen % rank.local_count:
        raise BadInput(
            f"{seen} GPUs cannot be divided over {rank.local_count} processes of this node; start a"
            f" number of processes that divides {seen}"
        )
    share = seen // rank.local_count
    return list(range(rank.local_index * share, (rank.local_index + 1) * share))


def valid_host(text: str) -> str | None:
    """Return the host in ``text``, an IPv6 address without its brackets; None for what no socket
    accepts as a host."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        if ":" in bare:
            IPv6Address(bare)  # also with a zone: fe80::1%eth0
        elif bare != text or not re.fullmatch(r"[\w.-]+", bare):
            return None
        else:
            bare.encode("idna")
    except ValueError:  # UnicodeError, of a name that IDNA refuses, is one
        return None
    return bare


def valid_port(text: str) -> int | None:
    """Return the port in ``text``; None for anything else."""
    return int(text) if re.fullmatch("[0-9]{1,5}", text) and 0 < int(text) < 65_536 else None


def address(host_name: str, host_text: str, port_name: str, port_text: str) -> str:
    """Return HOST:PORT, an IPv6 address in brackets. Raises :class:`BadInput` naming what is no
    host or no port."""
    host = valid_host(host_text)
    if host is None:
        raise BadInput(f"{host_name} is {host_text!r}; expected {HOST}, without a port")
    if valid_port(port_text) is None:
        raise BadInput(f"{port_name} is {port_text!r}; expected a port from 1 to 65535")
    return f"[{host}]:{port_text}" if ":" in host else f"{host}:{port_text}"


def host_and_port(name: str, text: str) -> str:
    """Return ``text``, the value of ``name``. Raises :class:`BadInput` when it is not HOST:PORT or
    [IPv6]:PORT."""
    where, _, number = text.rpartition(":")
    if (
        valid_host(where) is None
        or valid_port(number) is None
        or (":" in where and where[0] != "[")
    ):
        raise BadInput(
            f"{name} {text!r} is not HOST:PORT; write for example 10.0.0.1:29500, and brackets"
            " around an IPv6 address, whose end could be the port: [::1]:29500"
        )
    return text


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's ``nodes``, such as n[08-11,3]b[0-1],c: n08b0.

    ``scontrol`` expands it; where it is missing or refuses, the first choice in every bracket is
    the first host.
    """
    with suppress(OSError, subprocess.SubprocessError):
        command = ["scontrol", "show", "hostnames", nodes]
        shown = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.split()
        if shown:
            return shown[0]
    first = re.fullmatch(r",*((?:[^][,]|\[[^][]+\])+)(?:,.*)?", nodes)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[1]) if first else nodes
