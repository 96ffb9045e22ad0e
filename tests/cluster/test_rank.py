"""The rank of a process, and its GPUs, from the variables that each launcher sets."""

import pytest

from jspeed.base.accelerators import visible_gpus
from jspeed.cluster.rank import Rank, find_rank, local_devices

from ..refusals import refused


def env(variables):
    """Variables as a shell is given them: ``RANK=3 WORLD_SIZE=4``."""
    return dict(pair.split("=", 1) for pair in variables.split())


TORCHRUN = env(
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node0 MASTER_PORT=29500"
)
# What srun (22.05) sets for task 2 of a step, the shell of `salloc -n 4` where it is a step, and a
# batch script.
STEP = env("SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_TASKS=4")
STEP |= env("SLURM_STEP_TASKS_PER_NODE=2(x2)")
SLURM = STEP | env("SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=2 SLURM_LOCALID=0")
BATCH = env("SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0")
SALLOC = (
    BATCH | STEP | env("SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_NODELIST=n1")
)
# what a script for PyTorch exports
SBATCH = env("MASTER_ADDR=n1.site MASTER_PORT=29500 WORLD_SIZE=4")
ONE = env("SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0")


def without(given, name):
    return {key: value for key, value in given.items() if key != name}


def mpi(prefix, rank, size, local_rank, local_size):
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"{prefix}_{name}": str(value) for name, value in values.items()}


OPEN_MPI = mpi("OMPI_COMM_WORLD", 1, 3, 1, 3)
# MPICH, Intel MPI
HYDRA = env("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
# Within Slurm, Hydra starts its processes from one that srun starts on each node: both have these.
IN_PROXY = SALLOC | env("SLURM_NTASKS=2")
PALS = env("PALS_RANKID=1 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2 PALS_NODEID=0 PALS_APID=j")
FLUX = env("FLUX_TASK_RANK=5 FLUX_JOB_SIZE=7 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_NNODES=2")
# Ports are a hash of the job.
HERE, N1 = "127.0.0.1:61440", "n1:62343"
# What Kubeflow's Trainer 2 and Training Operator 1 set:
# https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/jax/jax.go
# https://github.com/kubeflow/training-operator/blob/release-1.9/pkg/controller.v1/jax/envvar.go
TRAINER = env("JAX_PROCESS_ID=1 JAX_NUM_PROCESSES=2 JAX_COORDINATOR_ADDRESS=job-node-0-0.job:29500")
TRAINER |= env("JAX_COORDINATOR_PORT=29500")
JAXJOB = env("PROCESS_ID=1 NUM_PROCESSES=2 COORDINATOR_ADDRESS=job-worker-0 COORDINATOR_PORT=6666")


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        (TORCHRUN, Rank(3, 4, "node0:29500", 1, 2)),
        (TORCHRUN | env("TORCHELASTIC_RUN_ID=x"), Rank(3, 4, "node0:29501", 1, 2)),
        (
            TORCHRUN | env("TORCHELASTIC_RUN_ID=x JAX_COORDINATOR_PORT=5"),
            Rank(3, 4, "node0:5", 1, 2),
        ),
        (env("RANK=0 WORLD_SIZE=1"), None),
        (SLURM, Rank(2, 4, N1, 0, 2)),
        (SLURM | env("JAX_COORDINATOR_PORT=5"), Rank(2, 4, "n1:5", 0, 2)),
        (SLURM | ONE, None),
        (BATCH, None),
        (SALLOC, None),
        (
            OPEN_MPI | env("OMPI_MCA_orte_hnp_uri=1.0;tcp://10.0.0.1:9"),
            Rank(1, 3, "127.0.0.1:63227", 1, 3),
        ),
        (OPEN_MPI | env("PMIX_NAMESPACE=@"), Rank(1, 3, "127.0.0.1:65053", 1, 3)),
        (
            SLURM | env("SLURM_STEP_TASKS_PER_NODE=8,4 JAX_COORDINATOR_ADDRESS=a:1"),
            Rank(2, 4, "a:1", 0, 8),
        ),
        # What a script exports for PyTorch beside srun: the address is the script's, the rank
        # Slurm's.
        (SLURM | SBATCH, Rank(2, 4, "n1.site:29500", 0, 2)),
        (SLURM | SBATCH | env("RANK=2"), Rank(2, 4, "n1.site:29500", 0, 2)),
        (SLURM | env("MASTER_ADDR=n1.site MASTER_PORT=29500"), Rank(2, 4, "n1.site:29500", 0, 2)),
        (SLURM | SBATCH | env("MASTER_ADDR="), Rank(2, 4, N1, 0, 2)),  # scontrol failed there
        (SLURM | env("RANK=7"), Rank(2, 4, N1, 0, 2)),
        (SLURM | env("WORLD_SIZE=8"), Rank(2, 4, N1, 0, 2)),
        (SALLOC | env("WORLD_SIZE=8"), None),
        (SLURM | env("JAX_NUM_PROCESSES=4 JAX_COORDINATOR_ADDRESS=a:1"), Rank(2, 4, "a:1", 0, 2)),
        # srun starts torchrun or jspeed launch, whose variables are those of this process.
        (SLURM | TORCHRUN | env("TORCHELASTIC_RESTART_COUNT=0"), Rank(3, 4, "node0:29500", 1, 2)),
        (SLURM | TORCHRUN | env("WORLD_SIZE=16"), Rank(3, 16, "node0:29500", 1, 2)),
        (
            SLURM
            | env("RANK=0 WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1")
            | env("TORCHELASTIC_RESTART_COUNT=0"),
            None,
        ),
        # Variables of PMI by srun --mpi=pmi2 and by Cray's plug-in, and of PMIx.
        (SLURM | env("PMI_RANK=2 PMI_SIZE=4"), Rank(2, 4, N1, 0, 2)),
        (SLURM | mpi("PMI", 2, 4, 0, 2) | env("PMI_LOCAL_RANK=0"), Rank(2, 4, N1, 0, 2)),
        (SLURM | env("PMIX_RANK=2"), Rank(2, 4, N1, 0, 2)),
        (SLURM | ONE | env("PMIX_RANK=0 PMI_RANK=0 PMI_SIZE=1"), None),
        (HYDRA, Rank(1, 2, HERE, 1, 2)),
        (HYDRA | env("PMI_SIZE=4 JAX_COORDINATOR_ADDRESS=[::1]:1"), Rank(1, 4, "[::1]:1", 1, 2)),
        (HYDRA | IN_PROXY, Rank(1, 2, "127.0.0.1:64130", 1, 2)),
        (HYDRA | env("PMI_RANK=0 PMI_SIZE=1 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1"), None),
        (mpi("MV2_COMM_WORLD", 1, 2, 1, 2), Rank(1, 2, HERE, 1, 2)),
        (
            mpi("JSM_NAMESPACE", 1, 2, 1, 2) | mpi("OMPI_COMM_WORLD", 1, 2, 1, 2),
            Rank(1, 2, HERE, 1, 2),
        ),
        (mpi("PMI", 1, 2, 1, 2) | PALS, Rank(1, 2, "127.0.0.1:63435", 1, 2)),
        (FLUX | env("JAX_COORDINATOR_ADDRESS=a:1 PMI_RANK=5 PMI_SIZE=7"), Rank(5, 7, "a:1", 1, 4)),
        (FLUX | env("FLUX_TASK_RANK=0 FLUX_JOB_SIZE=1"), None),
        # a batch script's
        (env("PBS_NP=4 PBS_TASKNUM=1 PBS_NODENUM=0 PBS_VNODENUM=0"), None),
        (
            OPEN_MPI | env("OMPI_COMM_WORLD_LOCAL_SIZE=2") | SBATCH | env("WORLD_SIZE=3"),
            Rank(1, 3, "n1.site:29500", 1, 2),
        ),
        *(
            (
                OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_hnp_uri": uri},
                Rank(1, 3, f"{host}:{port}", 1, 2),
            )
            for uri, host, port in (
                ("1.0;tcp://10.96.0.1,10.148.0.1:34911", "10.96.0.1", 61_902),
                ("1.0;tcp6://[fe80::b9b,2620::2]:43370", "[fe80::b9b]", 62_596),
            )
        ),
        (TRAINER, Rank(1, 2, "job-node-0-0.job:29500")),
        (JAXJOB, Rank(1, 2, "job-worker-0:6666")),
        # Left by something else, or of one process.
        *(({name: "3"}, None) for name in ("PROCESS_ID", "NUM_PROCESSES", "LOCAL_RANK")),
        (env("RANK=0"), None),
        (env("WORLD_SIZE=1"), None),
        *(
            ({name: "a:1"}, None)
            for name in ("MASTER_ADDR", "JAX_COORDINATOR_ADDRESS", "COORDINATOR_ADDRESS")
        ),
        *(
            ({name: "1"}, None)
            for name in ("MASTER_PORT", "JAX_COORDINATOR_PORT", "COORDINATOR_PORT")
        ),
        (env("JAX_PROCESS_ID=0 JAX_NUM_PROCESSES=1"), None),
        (env("JAX_NUM_PROCESSES=1"), None),
        (env("PMI_SIZE=1"), None),
        (dict.fromkeys([*TORCHRUN, *TRAINER, *JAXJOB, *SLURM, *OPEN_MPI, *HYDRA, *FLUX], ""), None),
        # Every form of IPv6.
        (TORCHRUN | env("MASTER_ADDR=fd00::1"), Rank(3, 4, "[fd00::1]:29500", 1, 2)),
        (TORCHRUN | env("MASTER_ADDR=[fe80::1%eth0]"), Rank(3, 4, "[fe80::1%eth0]:29500", 1, 2)),
        (TRAINER | env("JAX_COORDINATOR_ADDRESS=[::1]:29500"), Rank(1, 2, "[::1]:29500")),
        (JAXJOB | env("COORDINATOR_ADDRESS=::1"), Rank(1, 2, "[::1]:6666")),
        (
            TORCHRUN | env("TORCHELASTIC_RUN_ID=x MASTER_PORT=65535"),
            Rank(3, 4, "node0:65534", 1, 2),
        ),
        # A script may set torchrun's variables but the local ones, which the launcher then gives.
        (SLURM | SBATCH | env("RANK=2 JAX_PROCESS_ID=0"), Rank(2, 4, "n1.site:29500", 0, 2)),
        (env("MASTER_ADDR=a MASTER_PORT=1"), None),
        (OPEN_MPI | env("JAX_COORDINATOR_ADDRESS=a:1"), Rank(1, 3, "a:1", 1, 3)),
    ],
)
def test_variables(environment, rank):
    assert find_rank(environment) == rank


def test_flags_come_before_variables():
    assert find_rank(TORCHRUN, "b:9", 8, 5) == Rank(5, 8, "b:9")


@pytest.mark.parametrize(
    ("word", "environment"),
    [
        ("MASTER_PORT", without(TORCHRUN, "MASTER_PORT")),
        ("without WORLD_SIZE", without(TORCHRUN, "WORLD_SIZE")),
        ("'http'", TORCHRUN | env("JAX_COORDINATOR_PORT=http")),
        ("NUM_PROCESSES is 2", JAXJOB | env("PROCESS_ID=2")),
        ("RANK is 4", TORCHRUN | env("RANK=4")),
        ("'one'", TORCHRUN | env("RANK=one")),
        ("JAX_COORDINATOR_ADDRESS", OPEN_MPI | env("OMPI_COMM_WORLD_LOCAL_SIZE=2")),
        ("MASTER_ADDR is 'node..1'", TORCHRUN | env("MASTER_ADDR=node..1")),
        ("without MASTER_ADDR ", TORCHRUN | env("MASTER_ADDR=")),
        ("MASTER_PORT is '65536'", TORCHRUN | env("MASTER_PORT=65536")),
        ("COORDINATOR_PORT is 'http'", JAXJOB | env("COORDINATOR_PORT=http")),
        ("JAX_COORDINATOR_ADDRESS '::1'", TRAINER | env("JAX_COORDINATOR_ADDRESS=::1")),
        ("without OMPI_COMM_WORLD_RANK", env("OMPI_COMM_WORLD_SIZE=3")),
        ("without JAX_COORDINATOR_ADDRESS", env("JAX_PROCESS_ID=0 JAX_NUM_PROCESSES=2")),
        ("without JAX_PROCESS_ID", env("JAX_NUM_PROCESSES=2")),
        ("without JAX_NUM_PROCESSES", env("JAX_PROCESS_ID=0 JAX_COORDINATOR_ADDRESS=a:1")),
        ("without COORDINATOR_ADDRESS", env("PROCESS_ID=0 NUM_PROCESSES=2")),
        ("without MASTER_ADDR", env("RANK=0 WORLD_SIZE=2")),
        ("without RANK", env("WORLD_SIZE=2 MASTER_ADDR=a")),
        ("RANK set without WORLD_SIZE, MASTER_ADDR, MASTER_PORT", env("RANK=1")),
        ("WORLD_SIZE set without RANK, MASTER_ADDR, MASTER_PORT", env("WORLD_SIZE=2")),
        ("without WORLD_SIZE", env("RANK=0 LOCAL_RANK=0")),
        *(
            ("without", {name: "0"})
            for name in (
                "PMI_RANK",
                "MPI_LOCALRANKID",
                "MV2_COMM_WORLD_RANK",
                "PALS_RANKID",
                "FLUX_TASK_RANK",
            )
        ),
        ("without the number of processes", env("PMIX_RANK=0")),
        ("without PMI_SIZE", PALS),
        ("without MPI_LOCALRANKID", env("PMI_RANK=0 PMI_SIZE=2")),
        ("SLURM_STEP_NUM_TASKS", env("SLURM_JOB_ID=7 SLURM_PROCID=1 SLURM_LOCALID=1")),
        ("without SLURM_LOCALID", without(SLURM, "SLURM_LOCALID")),
        # One of several by Slurm, but not by what a shell has from elsewhere; and the other way
        # round.
        ("RANK is 0 but SLURM_PROCID is 2", SLURM | env("RANK=0 WORLD_SIZE=1")),
        ("WORLD_SIZE is 1 but SLURM_STEP_NUM_TASKS", SLURM | env("RANK=2 WORLD_SIZE=1")),
        ("WORLD_SIZE is 8 but SLURM_STEP_NUM_TASKS is 4", SLURM | SBATCH | env("WORLD_SIZE=8")),
        ("WORLD_SIZE is 4 but SLURM_STEP_NUM_TASKS is 1", SLURM | ONE | SBATCH),
        ("WORLD_SIZE is 4 but SLURM_STEP_NUM_TASKS is 1", SALLOC | SBATCH),
        ("MASTER_PORT set without RANK", BATCH | SBATCH),
        ("JAX_NUM_PROCESSES is 2 but SLURM", SLURM | env("JAX_NUM_PROCESSES=2")),
        ("WORLD_SIZE is 1 but JAX_NUM_PROCESSES", TRAINER | env("WORLD_SIZE=1 LOCAL_RANK=0")),
        ("PMIX_RANK is 1 but SLURM_PROCID is 0", SLURM | ONE | env("PMIX_RANK=1")),
        ("RANK is 1 and WORLD_SIZE is 1", {**TORCHRUN, "RANK": "1", "WORLD_SIZE": "1"}),
        ("JAX_COORDINATOR_ADDRESS", HYDRA | env("PMI_SIZE=4")),
        ("SLURM_STEP_NODELIST is 'n\\[]'", SLURM | env("SLURM_STEP_NODELIST=n[]")),
        # RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID and nothing else.
        ("LOCAL_WORLD_SIZE", without(TORCHRUN, "LOCAL_WORLD_SIZE")),
        ("LOCAL_WORLD_SIZE", TORCHRUN | env("LOCAL_WORLD_SIZE=0")),
    ],
)
def test_incomplete_variables_are_an_error(word, environment):
    refused(word, find_rank, environment)


@pytest.mark.parametrize(
    ("word", "flags"),
    [
        ("--process-id", ("b:9", 8)),
        ("HOST:PORT", ("b", 8, 1)),
        *(("HOST:PORT", (f"b:{port}", 8, 1)) for port in ("²", "0", "65536", "9" * 5000)),
        ("HOST:PORT", ("::1:29500", 8, 1)),
    ],
)
def test_incomplete_flags_are_an_error(word, flags):
    refused(word, find_rank, {}, *flags)


def test_gpus_are_divided_over_the_processes_of_a_node():
    eight = env("CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7")
    assert local_devices(Rank(0, 2, "a:1", 0, 1), eight) == list(range(8))
    assert local_devices(Rank(9, 16, "a:1", 1, 8), eight) == [1]
    assert local_devices(Rank(1, 2, "a:1", 1, 2), eight) == [4, 5, 6, 7]
    # srun --gpus-per-task=1 shows each process its own GPU only, as number 0.
    assert local_devices(Rank(1, 2, "a:1", 1, 8), env("CUDA_VISIBLE_DEVICES=5")) == [0]
    # srun --gpus-per-task=2 shows each process its own two.
    two = env("CUDA_VISIBLE_DEVICES=0,1")
    for per_task in ("2", "h100:2"):
        found = local_devices(Rank(1, 2, "a:1", 1, 2), two | {"SLURM_GPUS_PER_TASK": per_task})
        assert found == [0, 1]
    # With --gpu-bind=none each sees all four.
    four = env("CUDA_VISIBLE_DEVICES=0,1,2,3 SLURM_GPUS_PER_TASK=2")
    assert local_devices(Rank(1, 2, "a:1", 1, 2), four) == [2, 3]
    assert local_devices(Rank(1, 2, "a:1", 1, 2), env("CUDA_VISIBLE_DEVICES=")) is None
    assert local_devices(Rank(1, 2, "a:1", 1, 2), eight | env("JAX_LOCAL_DEVICE_IDS=3")) is None
    refused("8 GPUs cannot be divided over 3", local_devices, Rank(1, 3, "a:1", 1, 3), eight)


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0,1", 2),
        ("0, 2", 2),
        ("1,-1,2", 1),
        ("GPU-8932f937,MIG-1a", 2),
    ],
)
def test_hidden_gpus_do_not_count(visible, count):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count
