"""Fused matmul kernels at full size, compiled for an absent H100 but not run."""

import re
from collections import Counter

import jax.numpy as jnp
import pytest

from jspeed.kernels import fused_mlp
from jspeed.model.fp8 import E4M3, E5M2
from jspeed.plan import cost

from .custom_calls import array_on, compiled, custom_calls

N, F, D = 49_152, 3072, 768
CASES = {
    fused_mlp.squared_relu_matmul_fp8: [((N, D), E4M3), ((F, D), E4M3), ((2,), jnp.float32)],
    fused_mlp.squared_relu_gradient_fp8: [
        ((N, D), E5M2),
        ((F, D), E4M3),
        ((N, F), E4M3),
        ((3,), jnp.float32),
    ],
}


@pytest.mark.parametrize("kernel", CASES, ids=lambda kernel: kernel.__name__)
def test_a_fused_matmul_is_one_kernel(mesh, kernel, monkeypatch, capfd):
    """Whose registers are not spilled, whose wgmma are asynchronous, and whose cost is that of a
    matmul."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    arrays = [array_on(mesh(1), *each) for each in CASES[kernel]]
    text = compiled(kernel, *arrays).as_text()
    said = "".join(capfd.readouterr())
    assert Counter(call.target for call in custom_calls(text)) == {"mosaic_gpu_v2": 1}
    # scalars, which are one array here
    assert all(found.flops or found.bytes < 100 for found in cost.kernels(text))
    assert re.findall(r"(\d+) bytes spill (?:stores|loads)", said) == ["0", "0"]
    assert "wgmma.mma_async" in said and "serialized" not in said
    # by which NaN becomes a number: only max.NaN.f32 and min.NaN.f32
    assert not re.search(r"(max|min)\.f32", said)
    kinds = set(re.findall(r"wgmma\.mma_async\S+\.f32\.(\w+\.\w+)", said))
    x, w, *_ = (jnp.dtype(array.dtype) for array in arrays)
    names = {jnp.dtype(E4M3): "e4m3", jnp.dtype(E5M2): "e5m2"}
    assert kinds == {f"{names[x]}.{names[w]}"}
    (product,) = [found for found in cost.kernels(text) if found.flops]
    assert (product.kind, product.dims) == ("fp8_matmul", (1, N, D, F))
