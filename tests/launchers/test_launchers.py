"""Each installed launcher, by its command in docs/launch.md: two processes form one run, with
launch.py's losses."""

import json
import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from jspeed.cluster.rendezvous import free_port

from ..minimal_venv import minimal_venv
from ..multi_process import REPOSITORY, metrics
from ..test_package_lists import of_skyward
from .conftest import SMALL, needs
from .slurm import slurm

ROOT = os.geteuid() == 0


def same(place, expected, name="run", processes=2):
    assert place.losses(name) == expected
    assert (
        json.loads((place.folder / name / "run.json").read_text())["devices"]["processes"]
        == processes
    )


def same_to_rounding(place, expected, name="run"):
    for kind, losses in place.losses(name).items():
        np.testing.assert_allclose(list(losses.values()), list(expected[kind].values()), atol=1e-5)


def test_one_process_alone_and_on_two_devices_trains_the_same(place, expected):
    place.run(place.line("One GPU"))
    place.run(place.line("Eight GPUs of one machine").replace("-dir run", "-dir two --mesh data=2"))
    for name in ("run", "two"):
        same_to_rounding(place, expected, name)


def test_eight_processes_train_the_same(place, expected):
    eight = {"--nproc-per-node 8": "--nproc-per-node 8"}
    place.run(place.line("Eight GPUs of one machine", 1, **eight))
    same_to_rounding(place, expected)
    assert json.loads((place.folder / "run" / "run.json").read_text())["devices"]["processes"] == 8


def test_torchrun(place, expected):
    needs("torchrun", why=": pip install torch")
    # torchrun may come from an environment of its own; PYTHON_EXEC is torchrun's name for the
    # Python of its processes.
    place.run(place.line("torchrun"), PYTHON_EXEC=sys.executable)
    same(place, expected)


def test_two_torchruns(place, expected):
    needs("torchrun", why=": pip install torch")
    swaps = {
        "10.0.0.1": "127.0.0.1",
        "29500": str(free_port()),
        "--nproc-per-node 8": "--nproc-per-node 1",
    }
    line = place.line("torchrun", 1, **swaps, **{"/shared/run": "run"})
    place.run(
        line, beside=line.replace("--node-rank 0", "--node-rank 1"), PYTHON_EXEC=sys.executable
    )
    same(place, expected)


def test_open_mpi(place, expected):
    needs("mpirun")
    if (
        "Open MPI"
        not in subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    ):
        pytest.skip("mpirun is not Open MPI's")
    allowed = {
        "OMPI_ALLOW_RUN_AS_ROOT": 1,
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1,
        "OMPI_MCA_rmaps_base_oversubscribe": 1,
    }
    place.run(
        place.line("Open MPI"), **allowed, PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe"
    )
    same(place, expected)


def test_mpich(place, expected):
    needs("mpiexec.hydra")
    place.run(place.line("MPICH, Intel MPI and others").replace("mpiexec", "mpiexec.hydra"))
    same(place, expected)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    needs("munged", "slurmctld", "slurmd", "srun", "sbatch")
    if not ROOT:
        pytest.skip("slurmd needs root")
    with slurm(tmp_path_factory.mktemp("slurm")) as told:
        yield told


def test_slurm_srun(place, expected, cluster):
    place.run(f"srun -n 2 python scripts/speedrun.py {SMALL} --run-dir run", **cluster)
    same(place, expected)


def test_slurm_beside_the_variables_of_a_script_for_pytorch(place, expected, cluster):
    exports = (
        "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)"
        " WORLD_SIZE=$SLURM_NTASKS"
    )
    job = f"#!/bin/bash\n#SBATCH --ntasks=2\nexport {exports} MASTER_PORT={free_port()}\n"
    (place.folder / "job.sh").write_text(
        f"{job}srun python scripts/speedrun.py {SMALL} --run-dir run\n"
    )
    place.run("sbatch --wait job.sh", **cluster)
    same(place, expected)


def test_slurm_sbatch_file_and_a_warning_before_the_end(place, expected, cluster):
    """The whole file; and again with many steps, warned by SIGTERM: it saves."""
    swaps = {
        "--nodes=2": "--nodes=1",
        "--ntasks-per-node=8": "--ntasks-per-node=2",
        "/shared/run": "run",
    }
    job = place.line("Slurm", **swaps, **{"#SBATCH --gpus-per-node=8\n": ""})
    (place.folder / "job.sh").write_text(job)
    place.run("sbatch --wait job.sh", **cluster)
    same(place, expected)
    many = job.replace("--steps 20 ", "").replace("run-dir run", "run-dir many")
    (place.folder / "job.sh").write_text(many)
    waiting = place.start("sbatch --wait --parsable job.sh", **cluster)
    path = place.folder / "many"
    for _ in range(1500):
        if (path / "metrics.jsonl").exists() and len(metrics(path)) > 20:
            break
        time.sleep(0.1)
    job_id = waiting.stdout.readline().strip()
    place.run(f"scancel --signal=TERM {job_id}", **cluster)
    assert waiting.wait(60) == 143
    waiting.communicate()
    run = json.loads((path / "run.json").read_text())
    assert run["status"] == "interrupted" and (path / "checkpoints" / str(run["steps"])).is_dir()
    assert {step: loss for step, loss in metrics(path).items() if step <= 20} == expected[
        "train_loss"
    ]


@pytest.fixture
def two_nodes(tmp_path):
    """Two network namespaces with a cable between them, 10.0.0.1 and 10.0.0.2, also fd00::1 and
    fd00::2.

    This machine's name resolves to the first two.
    """
    needs("ip")
    if not ROOT:
        pytest.skip("network namespaces need root")
    names, host = (f"jspeed-{os.getpid()}-0", f"jspeed-{os.getpid()}-1"), os.uname().nodename

    def ip(words, check=True):
        return subprocess.run(["ip", *words.split()], check=check, capture_output=True, text=True)

    if ip(f"netns add {names[0]}", check=False).returncode:
        pytest.skip("network namespaces cannot be made here")
    folders = [f"/etc/netns/{name}" for name in names]
    try:
        ip(f"netns add {names[1]}")
        ip(f"link add jspeed0 netns {names[0]} type veth peer name jspeed1 netns {names[1]}")
        for number, name in enumerate(names):
            ip(f"-n {name} addr add 10.0.0.{number + 1}/24 dev jspeed{number}")
            # without IPv6
            ip(f"-n {name} addr add fd00::{number + 1}/64 dev jspeed{number} nodad", check=False)
            ip(f"-n {name} link set jspeed{number} up")
            ip(f"-n {name} link set lo up")
            os.makedirs(folders[number])
            with open(f"{folders[number]}/hosts", "w") as hosts:
                hosts.write(f"127.0.0.1 localhost\n10.0.0.{number + 1} {host}\n")
        yield [f"ip netns exec {name} " for name in names]
    finally:
        for name, folder in zip(names, folders, strict=True):
            ip(f"netns del {name}", check=False)
            subprocess.run(["rm", "-rf", folder], check=True)
        if not os.listdir("/etc/netns"):
            os.rmdir("/etc/netns")


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1"])
def test_two_machines(place, expected, two_nodes, host):
    if (
        host
        not in subprocess.run(
            [*two_nodes[0].split(), "ip", "addr"], capture_output=True, text=True
        ).stdout
    ):
        pytest.skip("this machine has no IPv6")
    heading = "Two machines with eight GPUs each: launch.py"
    swaps = {"--nproc-per-node 8": "--nproc-per-node 1", "/shared/run": "run", "10.0.0.1": host}
    first, second = (
        node + place.line(heading, number, **swaps) for number, node in enumerate(two_nodes)
    )
    place.run(first, beside=second)
    same(place, expected)


VARIABLES = {
    "Trainer": dict(
        JAX_PROCESS_ID="{}", JAX_NUM_PROCESSES="2", JAX_COORDINATOR_ADDRESS="127.0.0.1:{port}"
    ),
    "JAXJob": {
        "PROCESS_ID": "{}",
        "NUM_PROCESSES": "2",
        "COORDINATOR_ADDRESS": "127.0.0.1",
        "COORDINATOR_PORT": "{port}",
    },
    "indexed Job": {"JOB_COMPLETION_INDEX": "{}"},
}


@pytest.mark.parametrize("operator", VARIABLES)
def test_kubernetes_variables(place, expected, operator):
    port = free_port()
    swaps = {"/shared/run": "run", "jspeed-0.jspeed:29500": f"127.0.0.1:{port}"}
    line = place.line("Kubernetes", operator == "indexed Job", **swaps)
    pair = []
    for index in (0, 1):
        told = " ".join(f"{k}={v.format(index, port=port)}" for k, v in VARIABLES[operator].items())
        pair.append(f"export {told}\n{line}")
    place.run(pair[0], beside=pair[1])
    same(place, expected)


def test_skypilot_run_lines(place, expected):
    _, run = place.line("SkyPilot").split("run: |\n")
    (place.folder / ".venv" / "bin").mkdir(parents=True)
    (place.folder / ".venv" / "bin" / "activate").touch()
    told = {"SKYPILOT_NUM_NODES": 1, "SKYPILOT_NODE_RANK": 0, "SKYPILOT_NUM_GPUS_PER_NODE": 2}
    place.run(textwrap.dedent(run), SKYPILOT_NODE_IPS="127.0.0.1\n", **told)
    same(place, expected)


def test_skyward_function(place, expected, monkeypatch):
    """The file's own function on two nodes, with what Skyward would tell it and no packages but
    those of its list."""
    (place.folder / "cloud.py").write_text(place.line("Skyward"))
    (place.folder / "skyward.py").write_text(
        "import sys, types\nfunction = lambda **_: lambda train: train\nImage = lambda **_:"
        " None\ninstance_info = lambda: types.SimpleNamespace(rank=int(sys.argv[1]),"
        " peers=['127.0.0.1', '127.0.0.1'])\n"
    )
    words = f"--run-dir {place.folder / 'run'} {SMALL}".split()
    (place.folder / "node.py").write_text(
        "import sys\nimport"
        f" cloud\nsys.path.append({str(REPOSITORY)!r})\nsys.exit(cloud.train(*{words!r}))\n"
    )
    # the image's includes, beside scripts
    (place.folder / "python").symlink_to(REPOSITORY / "python")
    node = minimal_venv(place.folder / "venv", of_skyward(monkeypatch))
    place.run(f"{node} node.py 0", beside=f"{node} node.py 1")
    same(place, expected)
