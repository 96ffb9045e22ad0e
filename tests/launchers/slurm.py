"""Slurm on this machine alone: munge, a controller and a node of two CPUs, as root and without
systemd."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from jspeed.cluster.rendezvous import free_port

CONFIGURATION = """
ClusterName=jspeed
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=500
PartitionName=all Nodes=ALL Default=YES
"""


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run a cluster in ``folder``; yields the variables by which its commands find it."""
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)  # munge insists
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    ports = {"controller_port": free_port(), "node_port": free_port()}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(host=host, folder=folder, **ports))
    told = {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={key}",
        f"--socket={folder}/munge.socket",
    ]
    munge += [f"--{what}-file={folder}/munge.{what}" for what in ("pid", "log", "seed")]
    with ExitStack() as stack:
        for name, command in [
            ("munge", munge),
            ("controller", ["slurmctld", "-D"]),
            ("node", ["slurmd", "-D", "-N", host]),
        ]:
            log = stack.enter_context(open(folder / f"{name}.out", "w"))
            process = subprocess.Popen(command, env=os.environ | told, stdout=log, stderr=log)
            stack.callback(_end, process)
            time.sleep(0.5)
        for _ in range(100):
            state = subprocess.run(
                ["sinfo", "-h", "-o", "%t"], env=os.environ | told, capture_output=True, text=True
            )
            if state.stdout.strip() == "idle":
                break
            time.sleep(0.2)
        else:
            logs = "".join(
                (folder / f"{name}.out").read_text() for name in ("munge", "controller", "node")
            )
            raise RuntimeError(f"Slurm did not come up: {state.stdout}{state.stderr}{logs}")
        stack.callback(_cancel, told)
        yield told


def _cancel(told: dict[str, str]) -> None:
    """End the jobs of a test that failed while the daemons can still do it."""
    subprocess.run(["scancel", "--full", "--user=root"], env=os.environ | told, capture_output=True)
    for _ in range(100):
        jobs = subprocess.run(
            ["squeue", "-h"], env=os.environ | told, capture_output=True, text=True
        )
        if not jobs.stdout.strip():
            return
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    process.kill()
    process.wait()
