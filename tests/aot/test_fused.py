"""The fused matmuls at full size, as far as the compiler goes without a GPU."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jspeed.model.fp8 import E4M3
from jspeed.model.kernels import fused_mlp

from .calls import custom_calls

N, F, D = 49_152, 3072, 768
CASES = {
    fused_mlp.squared_relu_matmul: [((N, D), E4M3), ((F, D), E4M3), ((2,), jnp.float32)],
    fused_mlp.squared_relu_gradient: [((N, D), jnp.bfloat16), ((D, F), jnp.bfloat16), ((N, F), jnp.bfloat16)],
}


@pytest.mark.parametrize("kernel", CASES, ids=lambda kernel: kernel.__name__)
def test_a_fused_matmul_is_one_kernel(mesh, kernel):
    lies = NamedSharding(mesh(1), PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=lies) for shape, dtype in CASES[kernel]]
    text = jax.jit(kernel).trace(*arrays).lower(lowering_platforms=("cuda",)).compile().as_text()
    assert Counter(call.target for call in custom_calls(text)) == {"mosaic_gpu_v2": 1}
    assert " fusion(" not in text
