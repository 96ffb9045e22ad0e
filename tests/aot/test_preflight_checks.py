"""Preflight check of each custom kernel, with gradients, compiled for an absent H100."""

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jspeed.kernels import CUSTOM
from jspeed.kernels.preflight import checks
from jspeed.model.custom_kernels import custom_kernel


@pytest.mark.parametrize("name", CUSTOM)
def test_the_examples_of_a_kernel_compile(mesh, name):
    there = NamedSharding(mesh(1), PartitionSpec())
    examples = custom_kernel(name).examples(checks.KERNEL_SIZES)
    for part, (own, _, arrays) in examples.items():
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), arrays
        )
        text = jax.jit(own, out_shardings=there).lower(*shapes).compile().as_text()
        assert "custom-call" in text, part
