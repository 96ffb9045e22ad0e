"""Preflight checks pass on a working GPU or TPU."""

import jax
import pytest

from jspeed.kernels import CUSTOM, attention_backends, custom_kernels
from jspeed.kernels.preflight import checks
from jspeed.model.custom_kernels import Attending, available
from jspeed.parallel.mesh import make_mesh
from jspeed.run.compute.device import NATIVE_FP8, chip_of

DEVICES = "gpu", "tpu"


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["xla", *attention_backends.backends()])
def test_attention(backend, packed, width):
    if backend not in available(chip_of(jax.devices()[0]), Attending(packed)).attention:
        pytest.skip(f"this device is not given {backend}")
    assert checks.attention_error(backend, width, packed) is None


@pytest.mark.parametrize("how", ["bounded", "doc_tagged"])
def test_cudnns_rows_and_tags(how):
    """Whose gradients are those of near keys alone."""
    if not custom_kernels(chip_of(jax.devices()[0])):
        pytest.skip("not a Hopper GPU")
    assert checks.attention_error("cudnn", 128, packed=True, **{how: True}) is None


def test_fp8():
    if (chip_of(jax.devices()[0]).capability or (0,)) < NATIVE_FP8:
        pytest.skip("this GPU has no FP8 matmuls")
    assert checks.fp8_error() is None


@pytest.mark.parametrize("kernel", sorted(CUSTOM))
def test_custom_kernels(kernel):
    if not custom_kernels(chip_of(jax.devices()[0])):
        pytest.skip("not a Hopper GPU")
    assert checks.custom_kernel_error(kernel) is None


def test_collectives():
    if jax.device_count() < 2:
        pytest.skip("one device")
    assert checks.collectives_error(make_mesh()) is None
