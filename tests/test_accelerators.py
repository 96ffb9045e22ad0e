"""Which extra a machine needs, by its files, and why JAX uses the CPU beside better devices."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jspeed.base.accelerators import LEAST_DRIVER, Accelerators, cuda_root, extra_for, find, problem

PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Fri May 31 09:35:42 UTC 2024\nGCC version:"
    "  gcc 11\n"
)
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U16) "
    " Tue Sep 9\n"
)
H100, V100, NVSWITCH = (
    ("0x10de", "0x030200", "0x2330"),
    ("0x10de", "0x030200", "0x1db1"),
    ("0x10de", "0x068000", "0x1af1"),
)
TPU, NETWORK = ("0x1ae0", "0xff0000", "0x006f"), ("0x8086", "0x020000", "0x1000")


def machine(root: Path, devices=(), driver=None, pci=()) -> Path:
    """The files of a machine: ``devices`` of /dev, the driver's own text, (vendor, class, device)
    on the PCI bus."""
    for name in ("null", *devices):
        (root / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "dev" / name).touch()
    if driver:
        (root / "proc/driver/nvidia").mkdir(parents=True)
        (root / "proc/driver/nvidia/version").write_text(driver)
    for number, identity in enumerate(pci):
        folder = root / f"sys/bus/pci/devices/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        for name, text in zip(("vendor", "class", "device"), identity, strict=True):
            (folder / name).write_text(text + "\n")
    return root


EIGHT = [f"nvidia{number}" for number in range(8)] + [
    "nvidiactl",
    "nvidia-uvm",
    "nvidia-caps/nvidia-cap1",
]


@pytest.mark.parametrize(
    ("python", "devices", "driver", "pci", "extra", "why"),
    [
        ((3, 13), EIGHT, OPEN.format("580.95.05"), [H100, NVSWITCH], "cuda13",
         "8 NVIDIA GPUs, driver 580.95.05, Python 3.13"),
        ((3, 12), ["nvidia0"], PROPRIETARY.format("590.44"), [H100], "cuda13", "1 NVIDIA GPU, \
driver 590.44"),
        ((3, 11), EIGHT, OPEN.format("580.95.05"), [H100], "cuda12", "Python 3.11; cuda13 needs .* \
Python 3.12"),
        ((3, 13), EIGHT, PROPRIETARY.format("550.90.07"), [H100], "cuda12", "550.90.07, .* cuda13 \
needs driver 580"),
        ((3, 13), EIGHT, PROPRIETARY.format("580.95.05"), [H100, V100], "cuda12", "no support for \
GPUs before Turing"),
        ((3, 13), EIGHT, PROPRIETARY.format("470.57.02"), [H100], "cpu", "need driver 525 or \
newer: update it"),
        ((3, 13), EIGHT, None, [H100], "cuda12", "8 NVIDIA GPUs, no driver loaded"),
        ((3, 12), ["accel0", "accel1", "accel2", "accel3"], None, [TPU], "tpu", "4 TPU chips"),
        ((3, 12), ["vfio/0", "vfio/1", "vfio/vfio"], None, [TPU, NETWORK], "tpu", "2 TPU chips"),
        # a network card that a guest has
        ((3, 12), ["vfio/17", "vfio/vfio"], None, [NETWORK], "cpu", "no TPU"),
        ((3, 12), ["accel/accel0"], None, [], "cpu", "no TPU"),  # the neural unit of a laptop
        # none of them is for us
        ((3, 12), ["nvidiactl"], OPEN.format("580.95.05"), [H100], "cpu", "no NVIDIA GPU"),
    ],
)  # fmt: skip
def test_the_extra_of_a_machine(tmp_path, python, devices, driver, pci, extra, why):
    chosen, reason = extra_for(find(machine(tmp_path, devices, driver, pci)), python)
    assert chosen == extra and re.search(why, reason), reason


def test_the_makefile_s_line_needs_no_package():
    """Nothing is installed when make asks."""
    command = [sys.executable, "-S", "-m", "jspeed.base.accelerators"]
    place = Path(__file__).parents[1] / "python"
    said = subprocess.run(
        command, cwd=place, capture_output=True, text=True, check=True
    ).stdout.split()
    assert said[0] in {"cpu", "tpu", *LEAST_DRIVER} and len(said) > 1


NEW, OLD = Accelerators(8, "580.95.05"), Accelerators(8, "550.90.07")
CPU = {"jax": "0.11.2", "jaxlib": "0.11.2"}
CUDA12 = CPU | {"jax-cuda12-plugin": "0.11.2", "nvidia-cudnn-cu12": "9.19.0.56"}
CUDA13 = CPU | {"jax-cuda13-plugin": "0.11.2", "nvidia-cudnn-cu13": "9.19.0.56"}


@pytest.mark.parametrize(
    ("found", "packages", "says"),
    [
        (NEW, CPU, "8 NVIDIA GPUs, driver 580.95.05, .*'jax\\[cuda13\\]==0.11.2'"),
        (OLD, CPU, "driver 550.90.07, .*: pip install 'jax\\[cuda12\\]==0.11.2'"),
        (OLD, CUDA13, "cuda13 needs driver 580 .*uninstall -y jax-cuda13-plugin .*'jax\\[cuda12"),
        (NEW, CUDA13 | {"nvidia-cudnn-cu13": None}, "cuda13 is here without CUDA's libraries"),
        (NEW, CUDA12 | {"jax-cuda12-plugin": "0.10.2"}, "jax-cuda12-plugin 0.10.2 does not fit"),
        (NEW, CUDA12, "CUDA did not start; JSPEED_DEBUG=1"),
        (Accelerators(1, "470.1"), CUDA12, "470.1.* need driver 525 or newer: update it"),
        (Accelerators(1, None), CUDA12, "load NVIDIA's driver"),
        (Accelerators(tpus=4), CPU, "4 TPU chips are here and JAX uses the CPU"),
    ],
)
def test_why_jax_uses_the_cpu(found, packages, says):
    said = problem(found, "cpu", found.gpus, packages.get, (3, 13))
    assert said and re.search(says, said), said
    assert problem(found, "cpu", 0, packages.get, (3, 13)) is None or found.tpus, (
        "hidden by CUDA_VISIBLE_DEVICES"
    )


def test_a_slow_driver_is_named_and_a_good_one_is_not():
    assert "driver 550.90.07 is older than 580" in problem(OLD, "gpu", 8, CUDA12.get)
    assert problem(NEW, "gpu", 8, CUDA13.get) is None
    assert problem(Accelerators(), "cpu", 0, CPU.get) is None
    assert problem(Accelerators(tpus=4), "tpu", 0, CPU.get) is None


def test_cuda_s_compiler_where_its_wheel_is_missing(tmp_path):
    """JAX takes it from nvidia-cuda-nvcc, CUDA_ROOT or /usr/local/cuda, but not the last beside
    CUDA 13's libraries."""
    cuda, packages = tmp_path / "cuda", tmp_path / "site"
    assert cuda_root({}, [packages], cuda) == ""
    (packages / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    assert cuda_root({}, [packages], cuda) == ""  # there is none
    (cuda / "bin").mkdir(parents=True)
    (cuda / "bin" / "ptxas").touch()
    assert cuda_root({}, [tmp_path, packages], cuda) == str(cuda)
    assert cuda_root({"CUDA_ROOT": "/elsewhere"}, [packages], cuda) == ""
    (packages / "nvidia" / "cu13" / "bin").mkdir()
    (packages / "nvidia" / "cu13" / "bin" / "ptxas").touch()
    assert cuda_root({}, [packages], cuda) == ""
