"""The accelerators of this machine by its files, before any package is there: the extra that fits,
why JAX uses none.

``python -m jspeed.base.accelerators`` prints the extra, or cpu, and the reason, for the Makefile.
"""

import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

# Of JAX's CUDA wheels, the better first: the least driver, by JAX's installation guide.
LEAST_DRIVER = {"cuda13": 580, "cuda12": 525}
CUDA13_PYTHON = (3, 12)  # the least that JAX's newest releases take
FAST_DRIVER = 580  # PyTorch's record runs 35 % slower below it (modded-nanogpt issue 92)
PYTHON = sys.version_info[:2]
NVIDIA, GOOGLE = "0x10de", "0x1ae0"  # PCI vendors
# the first PCI device of compute capability 7.5, the least of CUDA 13; Volta's are below it
TURING = 0x1E00


@dataclass(frozen=True)
class Accelerators:
    """What a machine has. ``driver`` is NVIDIA's version, None where no driver is loaded;
    ``before_turing``: one of the GPUs is older than CUDA 13 supports."""

    gpus: int = 0
    driver: str | None = None
    before_turing: bool = False
    tpus: int = 0

    @property
    def driver_major(self) -> int:
        """The driver's major version, 0 where it is not known."""
        return int((self.driver or "0").partition(".")[0])

    @property
    def name(self) -> str:
        """The GPUs in words, with their driver."""
        driver = f"driver {self.driver}" if self.driver else "no driver loaded"
        return f"{self.gpus} NVIDIA GPU{'s' if self.gpus > 1 else ''}, {driver}"


def find(root: Path = Path("/")) -> Accelerators:
    """Return the accelerators of the machine whose files are under ``root``."""
    devices = {name.name: name for name in (root / "dev").glob("*")}
    gpus = sum(re.fullmatch("nvidia[0-9]+", name) is not None for name in devices)
    accel = sum(re.fullmatch("accel[0-9]+", name) is not None for name in devices)
    version = re.search(
        r"Kernel Module\b.*?\s(\d+\.[\d.]+)", text_of(root / "proc/driver/nvidia/version")
    )
    pci = {(text_of(folder / "vendor"), text_of(folder / "class")[:4], text_of(folder / "device"))
             for folder in (root / "sys/bus/pci/devices").glob("*")}  # fmt: skip
    display = [
        int(device, 16) for vendor, kind, device in pci if (vendor, kind) == (NVIDIA, "0x03")
    ]
    # Other devices are passed on by vfio too.
    passed_on = (
        list((root / "dev/vfio").glob("[0-9]*"))
        if any(vendor == GOOGLE for vendor, *_ in pci)
        else []
    )
    return Accelerators(
        gpus, version and version[1], any(at < TURING for at in display), accel or len(passed_on)
    )


def cuda_root(
    environment: Mapping[str, str], packages: Iterable[Path], cuda: Path = Path("/usr/local/cuda")
) -> str:
    """Return what CUDA_ROOT has to be before JAX is imported, empty where JAX finds CUDA's compiler
    itself.

    ``packages`` are folders of sys.path. With CUDA 13's libraries there and no nvidia-cuda-nvcc
    beside them, JAX 0.10 to 0.12 takes the folder called 'None' for CUDA's. Custom kernels may not
    compile then; with 0.11.2 they do.
    """
    folders = [path / "nvidia" / "cu13" for path in packages]
    there = [folder for folder in folders if folder.is_dir()]
    if (
        "CUDA_ROOT" in environment
        or not there
        or any((folder / "bin" / "ptxas").is_file() for folder in there)
    ):
        return ""
    return str(cuda) if (cuda / "bin" / "ptxas").is_file() else ""


def text_of(path: Path) -> str:
    """The text of a file, empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def extra_for(machine: Accelerators, python: tuple[int, ...] = PYTHON) -> tuple[str, str]:
    """Return the extra that ``machine`` needs, or cpu, and why."""
    has = f"{machine.name}, Python {python[0]}.{python[1]}"
    if machine.gpus and 0 < machine.driver_major < LEAST_DRIVER["cuda12"]:
        return (
            "cpu",
            f"{has}; JAX's CUDA wheels need driver {LEAST_DRIVER['cuda12']} or newer: update it",
        )
    if machine.gpus and machine.driver_major >= LEAST_DRIVER["cuda13"] and python >= CUDA13_PYTHON:
        older = machine.before_turing
        return (
            ("cuda12", f"{has}; CUDA 13 has no support for GPUs before Turing")
            if older
            else ("cuda13", has)
        )
    if machine.gpus:
        return (
            "cuda12",
            f"{has}; cuda13 needs driver {LEAST_DRIVER['cuda13']} and Python 3.12, or newer ones",
        )
    return (
        ("tpu", f"{machine.tpus} TPU chips")
        if machine.tpus
        else ("cpu", "no NVIDIA GPU and no TPU in /dev")
    )


def problem(
    machine: Accelerators,
    used: str,
    visible: int,
    version: Callable[[str], str | None],
    python: tuple[int, ...] = PYTHON,
) -> str | None:
    """Say why JAX runs on the platform ``used`` (cpu, gpu, tpu) beside better devices, or slowly,
    with the remedy.

    ``visible`` GPUs are not hidden by CUDA_VISIBLE_DEVICES; ``version`` is that of a package. None:
    nothing is wrong.
    """
    if used == "gpu" and 0 < machine.driver_major < FAST_DRIVER:
        return (
            f"driver {machine.driver} is older than {FAST_DRIVER}, below which the same program in"
            " PyTorch took 35 % longer (modded-nanogpt issue 92): update it"
        )
    if used != "cpu" or not (machine.gpus and visible or machine.tpus):
        return None
    extra, why = extra_for(machine, python)
    install = f"pip install 'jax[{extra}]=={version('jax')}'"
    if extra == "tpu":
        return f"{why} are here and JAX uses the CPU: {install}"
    if extra == "cpu":
        return why
    unused = f"{machine.name}, and JAX uses the CPU"
    if machine.driver is None:
        return f"{unused}: load NVIDIA's driver (nvidia-smi)"
    wheels = [name for name in LEAST_DRIVER if version(f"jax-{name}-plugin")]
    if not wheels:
        return f"{unused}, because that is all this JAX is for: {install}"
    wheel = next((name for name in wheels if machine.driver_major >= LEAST_DRIVER[name]), None)
    if wheel is None:
        remove = f"pip uninstall -y jax-{wheels[0]}-plugin jax-{wheels[0]}-pjrt"
        return (
            f"{unused}: {wheels[0]} needs driver {LEAST_DRIVER[wheels[0]]} or newer; update it, or"
            f" {remove}; {install}"
        )
    plugin, jaxlib = version(f"jax-{wheel}-plugin"), version("jaxlib")
    if plugin != jaxlib:
        return f"{unused}: jax-{wheel}-plugin {plugin} does not fit jaxlib {jaxlib}; {install}"
    if version(f"nvidia-cudnn-cu{wheel[-2:]}") is None:
        return f"{unused}: its plugin {wheel} is here without CUDA's libraries; {install}"
    return (
        f"{unused}: CUDA did not start; JSPEED_DEBUG=1 shows JAX's own message, nvidia-smi the GPUs"
    )


def visible_gpus(environment: Mapping[str, str]) -> int:
    """Number of NVIDIA GPUs in this machine or container that ``CUDA_VISIBLE_DEVICES`` lets a
    process see.

    CUDA ignores the list from its first invalid entry on: -1 is "none", and so is the NoDevFiles
    that Slurm sets.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = map(str.strip, visible.split(","))
        return sum(
            1
            for _ in takewhile(lambda name: name and name[0] != "-" and name != "NoDevFiles", names)
        )
    return find().gpus


if __name__ == "__main__":
    if platform.system() == "Linux":
        print(*extra_for(find()))
    else:
        print("cpu JAX has GPU and TPU wheels for Linux only")
