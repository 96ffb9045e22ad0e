"""A run for which nobody checks kernels takes what XLA compiles by itself, and says so."""

import dataclasses
import io

import jax
import pytest
from rich.console import Console

from jspeed.errors import BadInput
from jspeed.parallel.mesh import make_mesh
from jspeed.run.compute.checked import NOBODY, unchecked
from jspeed.run.compute.device import Device, Placement, Request, device_of
from jspeed.run.find_recipe import find

RECIPE = find("stdlib", trace=False).recipe
OWN = frozenset({"MLP"})


def on(device):
    return Placement(make_mesh({"data": 1}, devices=jax.devices()[:1]), "zero1", device)


@pytest.fixture
def said():
    return Console(file=io.StringIO(), width=400)


def test_a_cpu_lacks_nothing(said):
    mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
    placement = on(device_of(mesh, fields={"FP8": "auto"}))
    assert unchecked(RECIPE, placement, said) is placement
    assert not said.file.getvalue()


def test_a_gpu_takes_plain_xla_in_one_line(said):
    auto = Request(fp8="auto", custom_kernels="auto")
    gpu = Device("gpu", "cudnn", "native", 512, fallbacks=("xla",), asked=auto, custom_kernels=OWN)
    found = unchecked(RECIPE, on(gpu), said).device
    recorded = found.record()
    assert all(NOBODY in recorded["why"][name] for name in ("attention", "FP8", "custom kernels"))
    assert recorded == {
        "attention": "xla",
        "fp8": "missing",
        "own": False,
        "checked": [],
        "refused": [
            f"{name}: {NOBODY}" for name in ("attention cudnn", "custom kernels", "FP8 matmuls")
        ],
        "why": recorded["why"],
    }
    assert not found.fallbacks
    [line] = said.file.getvalue().splitlines()
    assert line == f"note: without attention cudnn, custom kernels, FP8 matmuls: {NOBODY}"


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (Device("gpu", "cudnn", "missing", 512, asked=Request("cudnn")), "attention cudnn"),
        (Device("gpu", "xla", "native", 512, asked=Request(fp8="on")), "FP8 matmuls"),
        (
            Device(
                "gpu", "xla", "missing", 1, asked=Request(custom_kernels="on"), custom_kernels=OWN
            ),
            "custom kernels",
        ),
    ],
)
def test_what_was_asked_for_is_refused(device, name, said):
    with pytest.raises(BadInput, match=f"{name}: .* --no-preflight") as refused:
        unchecked(RECIPE, on(device), said)
    assert "\n" not in str(refused.value)
    auto = dataclasses.replace(device, asked=Request(fp8="auto", custom_kernels="auto"))
    assert unchecked(RECIPE, on(auto), said).device.refused
