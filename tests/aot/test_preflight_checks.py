"""Preflight check of each custom kernel, with gradients, compiled for an absent H100."""

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jspeed.recipe import OWN_KERNELS
from jspeed.run.compute import preflight_checks


def test_the_example_of_every_kernel_compiles(mesh):
    there = NamedSharding(mesh(1), PartitionSpec())
    cases = preflight_checks.own_kernels(*preflight_checks.KERNEL_SIZES)
    assert set(cases) == OWN_KERNELS
    for name, (own, _, arrays) in (case for parts in cases.values() for case in parts.items()):
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), arrays
        )
        text = jax.jit(own, out_shardings=there).lower(*shapes).compile().as_text()
        assert "custom-call" in text, name
