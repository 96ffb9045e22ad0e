"""What attention compiles to for an H100 that is not there.

Nothing runs and cuDNN plans are not built, so what cuDNN refuses only then is not found here: tests/gpu is for that.
"""

import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jspeed.model.attention import attention, find_documents

from .calls import custom_calls

BOS = 50_256
SHAPE = (4, 2048, 6, 128)


def compiled(mesh, backend: str, packed: bool, window: int | None) -> str:
    """The optimised program of all three gradients, lanes spread over two devices."""
    two = mesh(2)

    def loss(q, k, v, tokens):
        documents = find_documents(tokens, BOS, 64) if packed else None
        out = attention(q, k, v, scale=0.12, documents=documents, window=window, backend=backend)
        return jnp.sum(out.astype(jnp.float32) ** 2)[None]

    rows = NamedSharding(two, P("data"))
    spread = jax.shard_map(loss, mesh=two, in_specs=P("data"), out_specs=P("data"), check_vma=backend != "fa4")
    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=rows)
    tokens = jax.ShapeDtypeStruct(SHAPE[:2], jnp.uint16, sharding=rows)
    gradients = jax.jit(jax.grad(lambda *args: jnp.sum(spread(*args)), (0, 1, 2)))
    return gradients.trace(x, x, x, tokens).lower(lowering_platforms=("cuda",)).compile().as_text()


@pytest.mark.parametrize(("packed", "window"), [(False, None), (False, 256), (True, None), (True, 256)])
def test_cudnn(mesh, packed, window):
    calls = custom_calls(compiled(mesh, "cudnn", packed, window), "__cudnn$fmha")
    assert sorted(call.target for call in calls) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    for call in calls:
        config = json.loads(call.attributes.split("backend_config=")[1])["cudnn_fmha_backend_config"]
        assert config["mask_type"] == ("PADDING_CAUSAL" if packed else "CAUSAL")
        assert config["sliding_window_length"] == (window or 0)
        assert config["max_seg_per_batch"] == (64 if packed else 1)
        assert config["fmha_scale"] == pytest.approx(0.12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fa4-jax's use of cutlass
def test_fa4(mesh, monkeypatch):
    if importlib.util.find_spec("fa4_jax") is None:
        pytest.skip("fa4-jax is not installed (Python 3.12 or newer: pip install 'jspeed[fa4]')")
    fa4_kernels = pytest.importorskip("fa4_jax.kernels")
    monkeypatch.setattr(fa4_kernels, "_device_arch", lambda: 90)
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    assert len(custom_calls(compiled(mesh, "fa4", packed=True, window=256))) >= 2
