"""A run for which nobody checks kernels takes what XLA compiles by itself, and says so."""

import dataclasses
import io

import jax
import pytest
from rich.console import Console

from jspeed.errors import BadInput
from jspeed.parallel.mesh import make_mesh
from jspeed.run.compute.checked import NOBODY, Preflight, unchecked
from jspeed.run.compute.device import Device, Placement, device_of
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
    placement = on(device_of(mesh))
    assert unchecked(RECIPE, placement, {"FP8": "auto"}, said) == Preflight(placement)
    assert not said.file.getvalue()


def test_a_gpu_takes_plain_xla_in_one_line(said):
    gpu = Device("gpu", "cudnn", "native", 512, fallbacks=("triton", "xla"), custom_kernels=OWN)
    found = unchecked(RECIPE, on(gpu), {"FP8": "auto", "OWN_KERNELS": "auto"}, said)
    assert found.record() == {
        "attention": "xla",
        "fp8": "missing",
        "own": False,
        "checked": [],
        "refused": [
            f"{name}: {NOBODY}" for name in ("attention cudnn", "custom kernels", "FP8 matmuls")
        ],
    }
    assert not found.device.fallbacks
    [line] = said.file.getvalue().splitlines()
    assert line == f"note: without attention cudnn, custom kernels, FP8 matmuls: {NOBODY}"


@pytest.mark.parametrize(
    ("device", "fields", "name"),
    [
        (Device("gpu", "cudnn", "missing", 512, asked=True), {}, "attention cudnn"),
        (Device("gpu", "xla", "native", 512), {"FP8": "on"}, "FP8 matmuls"),
        (
            Device("gpu", "xla", "missing", 1, custom_kernels=OWN),
            {"OWN_KERNELS": "on"},
            "custom kernels",
        ),
    ],
)
def test_what_was_asked_for_is_refused(device, fields, name, said):
    with pytest.raises(BadInput, match=f"{name}: .* --no-preflight") as refused:
        unchecked(RECIPE, on(device), fields, said)
    assert "\n" not in str(refused.value)
    auto = {field: "auto" for field in fields}
    plain = unchecked(RECIPE, on(dataclasses.replace(device, asked=False)), auto, said)
    assert plain.refused
