"""The rank of a process, and its GPUs, from the variables that each launcher sets."""

import pytest

from jspeed.cluster.rank import Rank, find_rank, local_devices, visible_gpus
from jspeed.errors import BadInput

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0"}
TORCHRUN |= {"MASTER_PORT": "29500"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "4", "SLURM_PROCID": "2"}
SLURM |= {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(["RANK", "SIZE"], "13", strict=True)}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
# What Kubeflow's Trainer 2 and Training Operator 1 set:
# https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/jax/jax.go
# https://github.com/kubeflow/training-operator/blob/release-1.9/pkg/controller.v1/jax/envvar.go
TRAINER = {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:29500"}
TRAINER |= {"JAX_COORDINATOR_PORT": "29500"}
JAXJOB = {"PROCESS_ID": "1", "NUM_PROCESSES": "2", "COORDINATOR_ADDRESS": "job-worker-0", "COORDINATOR_PORT": "6666"}


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        (TORCHRUN, Rank(3, 4, "node0:29500", 1, 2)),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "x"}, Rank(3, 4, "node0:29501", 1, 2)),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "x", "JAX_COORDINATOR_PORT": "5"}, Rank(3, 4, "node0:5", 1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        (SLURM, Rank(2, 4, None, 0, 2)),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None),  # no srun
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:9"}, Rank(1, 3, None, 1, 3)),
        (OPEN_MPI | {"PMIX_NAMESPACE": "@"}, Rank(1, 3, "127.0.0.1:65053", 1, 3)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8,4", "JAX_COORDINATOR_ADDRESS": "a:1"}, Rank(2, 4, "a:1", 0, 8)),
        (TRAINER, Rank(1, 2, "job-node-0-0.job:29500")),
        (JAXJOB, Rank(1, 2, "job-worker-0:6666")),
        ({"RANK": "3"}, None),  # left by something else
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, None),
        (OPEN_MPI | {"JAX_COORDINATOR_ADDRESS": "a:1"}, Rank(1, 3, "a:1", 1, 3)),
    ],
)
def test_variables(environment, rank):
    assert find_rank(environment) == rank


def test_flags_come_before_variables():
    assert find_rank(TORCHRUN, "b:9", 8, 5) == Rank(5, 8, "b:9")


@pytest.mark.parametrize(
    ("word", "environment", "flags"),
    [
        ("MASTER_PORT", {name: TORCHRUN[name] for name in TORCHRUN if name != "MASTER_PORT"}, ()),
        ("WORLD_SIZE is not", {name: TORCHRUN[name] for name in TORCHRUN if name != "WORLD_SIZE"}, ()),
        ("'http'", TORCHRUN | {"JAX_COORDINATOR_PORT": "http"}, ()),
        ("NUM_PROCESSES is 2", JAXJOB | {"PROCESS_ID": "2"}, ()),
        ("RANK is 4", TORCHRUN | {"RANK": "4"}, ()),
        ("'one'", TORCHRUN | {"RANK": "one"}, ()),
        ("--process-id", {}, ("b:9", 8)),
        ("HOST:PORT", {}, ("b", 8, 1)),
        *(("HOST:PORT", {}, (f"b:{port}", 8, 1)) for port in ("²", "0", "65536", "9" * 5000)),
        ("JAX_COORDINATOR_ADDRESS", OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ()),
        ("RANK is not set", {"OMPI_COMM_WORLD_SIZE": "3"}, ()),
        # RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID and nothing else.
        ("LOCAL_WORLD_SIZE", {name: TORCHRUN[name] for name in TORCHRUN if name != "LOCAL_WORLD_SIZE"}, ()),
        ("LOCAL_WORLD_SIZE", TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, ()),
    ],
)
def test_incomplete_variables_are_an_error(word, environment, flags):
    with pytest.raises(BadInput, match=word):
        find_rank(environment, *flags)


def test_gpus_are_divided_over_the_processes_of_a_node():
    eight = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert local_devices(Rank(0, 2, None, 0, 1), eight) == list(range(8))
    assert local_devices(Rank(9, 16, None, 1, 8), eight) == [1]
    assert local_devices(Rank(1, 2, None, 1, 2), eight) == [4, 5, 6, 7]
    # srun --gpus-per-task=1 shows each process its own GPU only, as number 0.
    assert local_devices(Rank(1, 2, None, 1, 8), {"CUDA_VISIBLE_DEVICES": "5"}) == [0]
    # srun --gpus-per-task=2 shows each process its own two.
    two = {"CUDA_VISIBLE_DEVICES": "0,1"}
    for per_task in ("2", "h100:2"):
        assert local_devices(Rank(1, 2, None, 1, 2), two | {"SLURM_GPUS_PER_TASK": per_task}) == [0, 1]
    # With --gpu-bind=none each sees all four.
    four = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_PER_TASK": "2"}
    assert local_devices(Rank(1, 2, None, 1, 2), four) == [2, 3]
    assert local_devices(Rank(1, 2, None, 1, 2), {"CUDA_VISIBLE_DEVICES": ""}) is None
    assert local_devices(Rank(1, 2, None, 1, 2), eight | {"JAX_LOCAL_DEVICE_IDS": "3"}) is None
    with pytest.raises(BadInput, match="8 GPUs cannot be divided over 3"):
        local_devices(Rank(1, 3, None, 1, 3), eight)


@pytest.mark.parametrize(
    ("visible", "count"),
    [("", 0), ("-1", 0), ("NoDevFiles", 0), ("0,1", 2), ("0, 2", 2), ("1,-1,2", 1), ("GPU-8932f937,MIG-1a", 2)],
)
def test_hidden_gpus_do_not_count(visible, count):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count
