"""The gradient of a norm beside a residual stream at full size, compiled for an absent H100 but not
run."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jspeed.kernels.norm_gradient import norm_gradient
from jspeed.plan import cost
from jspeed.plan.cost import TRITON

from .custom_calls import custom_calls

T, D = 49_152, 768


def test_one_pass(mesh):
    lies = NamedSharding(mesh(1), PartitionSpec())
    arrays = [jax.ShapeDtypeStruct((T, D), jnp.bfloat16, sharding=lies)] * 3
    inverse, scale = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=lies) for shape in ((T,), ())
    )
    traced = jax.jit(norm_gradient).trace(*arrays, inverse, scale)
    lowered = traced.lower(lowering_platforms=("cuda",))
    text = lowered.compile({"xla_gpu_fail_ptx_compilation_on_register_spilling": True}).as_text()
    assert len(custom_calls(text)) == len(custom_calls(text, TRITON)) == 1
    largest = max(kernel.bytes for kernel in cost.kernels(text))
    assert largest == 4 * 2 * T * D + 4 * T + 4 * T // 16 + 4
    assert len(cost.kernels(text)) == 2  # with the sum of what the programs have summed
