"""Preflight check of each custom kernel, with gradients, compiled for an absent H100."""

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jspeed.run.compute import preflight_checks


def test_the_example_of_every_kernel_compiles(mesh):
    there = NamedSharding(mesh(1), PartitionSpec())
    for name, (own, _, arrays) in preflight_checks.own_kernels(*preflight_checks.KERNEL_SIZES).items():
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), arrays)
        text = jax.jit(own, out_shardings=there).lower(*shapes).compile().as_text()
        assert "custom-call" in text, name
