"""Versions that are known to be bad: named on GPUs where a run meets them, and nowhere else."""

import jax
import jax.numpy as jnp
import pytest

from jspeed.base.compiler import has_cas_scatter
from jspeed.kernels.preflight import known_faults
from jspeed.run.compute.device import Device

GPU, CPU = Device("gpu", "cudnn", "native", 512), Device("cpu", "xla", "emulated", 512)
GOOD = {"jaxlib": (0, 11, 1), "cuDNN": (9, 19, 0)}


def step(width: int) -> str:
    """HLO of a sum of 8,192 rows of ``width`` by index, as JAX gives it to XLA, which makes a loop
    of it on a CPU."""
    added = jax.jit(lambda into, at, what: into.at[at].add(what))
    return added.lower(
        jnp.zeros((272, width)), jnp.zeros(8192, int), jnp.zeros((8192, width))
    ).as_text("hlo")


@pytest.mark.parametrize(
    ("version", "packed", "says"),
    [
        ({"cuDNN": (9, 10, 1)}, False, "cuDNN 9.10.1 computes 16-bit attention wrongly"),
        ({"cuDNN": (9, 10, 2)}, True, None),
        ({"cuDNN": (9, 14, 0)}, True, "cuDNN 9.14.0 computes windows within documents wrongly"),
        ({"cuDNN": (9, 14, 0)}, False, None),
        ({"cuDNN": None}, True, None),
        ({"jaxlib": (0, 10, 1)}, True, None),
        ({"jaxlib": (0, 10, 2)}, True, "jaxlib 0.10.2 adds single fp32 numbers by"),
        ({"jaxlib": (0, 11, 0)}, False, "jaxlib 0.11.0 adds single fp32 numbers"),
        ({}, True, None),
    ],
)
def test_a_bad_version_is_named_with_its_remedy(version, packed, says):
    found = known_faults.known_faults(GPU, packed, lambda: iter([step(1)]), (GOOD | version).get)
    assert [line[: len(says or "")] for line in found] == ([says] if says else [])
    assert not known_faults.known_faults(CPU, packed, lambda: iter([step(1)]), (GOOD | version).get)


def test_only_what_a_run_uses_is_named():
    bad = {"jaxlib": (0, 10, 2), "cuDNN": (9, 10, 0)}
    triton = Device("gpu", "triton", "native", 512)
    assert not known_faults.known_faults(triton, True, lambda: iter([step(4)]), bad.get)
    assert (
        len(known_faults.known_faults(triton, True, lambda: iter([step(4), step(1)]), bad.get)) == 1
    )
    lanes = Device("gpu", "cudnn_lanes", "native", 512)
    assert len(known_faults.known_faults(lanes, True, lambda: iter([step(4)]), bad.get)) == 1


@pytest.mark.parametrize(
    ("keys", "version", "said"),
    [(2048, (9, 15, 0), 0), (2056, (9, 15, 0), 1), (2056, (9, 15, 1), 0)],
)
def test_keys_that_are_no_multiple_of_128(keys, version, said):
    config = (
        f'{{"intermediate_tensor_shape":{{"element_type":"BF16","dimensions": ["24", "6", "{keys}",'
        f' "{keys}"]}}}}'
    )
    text = (
        'custom_call_target="__cudnn$fmhaSoftmaxBackward",'
        f' backend_config={{"cudnn_fmha_backend_config":{config}}}'
    )
    found = known_faults.known_faults(
        GPU, True, lambda: iter([step(4), text]), (GOOD | {"cuDNN": version}).get
    )
    assert len(found) == said and all("gradients wrongly in CUDA graphs" in line for line in found)


def test_the_installed_versions_are_read():
    assert known_faults.version_of("jaxlib") == tuple(map(int, jax.lib.__version__.split(".")[:3]))
    assert known_faults.version_of("cuDNN") is None, "no CUDA in the tests"
    assert has_cas_scatter() == ((0, 10, 2) <= known_faults.version_of("jaxlib") < (0, 11, 1))
