"""Attention compiled for an absent H100; jspeed's custom kernels also for older and newer GPUs.

Nothing runs and cuDNN plans are not built, so what cuDNN refuses only then is not found here:
tests/gpu is for that.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jspeed.model.attention import attention, find_documents
from jspeed.plan import cost
from jspeed.plan.cost import TRITON
from jspeed.plan.target import Target, load_target, pretend, target_mesh

from .custom_calls import custom_calls, fmha_config

BOS = 50_256
SHAPE = (4, 2048, 6, 128)


def compiled(
    mesh,
    backend: str,
    packed: bool,
    window: int | None,
    longest: int | None = None,
    near: int | None = None,
) -> str:
    """The optimised program of all three gradients, lanes spread over two devices."""
    two = mesh(2)

    def loss(q, k, v, tokens):
        documents = find_documents(tokens, BOS, 64, longest) if packed else None
        how = {"window": window, "gradient_window": near, "backend": backend}
        out = attention(q, k, v, scale=0.12, documents=documents, **how)
        return jnp.sum(out.astype(jnp.float32) ** 2)[None]

    rows = NamedSharding(two, P("data"))
    spread = jax.shard_map(loss, mesh=two, in_specs=P("data"), out_specs=P("data"))
    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=rows)
    tokens = jax.ShapeDtypeStruct(SHAPE[:2], jnp.uint16, sharding=rows)
    gradients = jax.jit(jax.grad(lambda *args: jnp.sum(spread(*args)), (0, 1, 2)))
    return gradients.trace(x, x, x, tokens).lower(lowering_platforms=("cuda",)).compile().as_text()


@pytest.mark.parametrize(
    ("packed", "window"), [(False, None), (False, 256), (True, None), (True, 256)]
)
def test_cudnn(mesh, packed, window):
    calls = custom_calls(compiled(mesh, "cudnn", packed, window), "__cudnn$fmha")
    assert sorted(call.target for call in calls) == [
        "__cudnn$fmhaSoftmax",
        "__cudnn$fmhaSoftmaxBackward",
    ]
    for call in calls:
        config = fmha_config(call)
        assert config["mask_type"] == ("PADDING_CAUSAL" if packed else "CAUSAL")
        assert config["sliding_window_length"] == (window or 0)
        assert config["max_seg_per_batch"] == (64 if packed else 1)
        assert config["fmha_scale"] == pytest.approx(0.12)


@pytest.mark.parametrize("window", [None, 256])
def test_cudnn_is_told_the_longest_document(mesh, window):
    """Two lanes a device are eight rows of 16 slots; nothing is made of all slots by a lane."""
    text = compiled(mesh, "cudnn", True, window, longest=512)
    calls = custom_calls(text, "__cudnn$fmha")
    assert sorted(call.target for call in calls) == [
        "__cudnn$fmhaSoftmax",
        "__cudnn$fmhaSoftmaxBackward",
    ]
    for call in calls:
        config = fmha_config(call)
        assert config["intermediate_tensor_shape"]["dimensions"] == ["8", "6", "512", "512"]
        assert config["max_seg_per_batch"] == 16 and config["mask_type"] == "PADDING_CAUSAL"
        assert config["sliding_window_length"] == (window or 0)
    statistic = "f32[128,6,512]"
    assert statistic in text and "f32[128,6,2048]" not in text


@pytest.mark.parametrize("packed", [False, True])
def test_cudnns_backward_pass_may_have_a_window_of_its_own(mesh, packed):
    calls = custom_calls(
        compiled(mesh, "cudnn", packed, 640, longest=1024, near=256), "__cudnn$fmha"
    )
    windows = {call.target: fmha_config(call)["sliding_window_length"] for call in calls}
    assert windows == {"__cudnn$fmhaSoftmax": 640, "__cudnn$fmhaSoftmaxBackward": 256}
    [mask] = {fmha_config(call)["mask_type"] for call in calls}
    assert mask == ("PADDING_CAUSAL" if packed else "CAUSAL")


def target_of(name: str) -> Target:
    """A target; ``sm_120`` is an L40S that claims to be of that kind: limits of shared memory and
    registers agree."""
    if name != "sm_120":
        return load_target(name)
    text = load_target("l40s").text
    assert "{ major: 8 minor: 9 }" in text
    return Target(name, text.replace("{ major: 8 minor: 9 }", "{ major: 12 minor: 0 }"), (12, 0))


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    "name",
    ["a100", "rtx3090"]
    + [pytest.param(n, marks=pytest.mark.slow) for n in ("l40s", "h100", "sm_120")],
)
def test_custom_kernels_fit_every_gpu_from_ampere_on(name, width):
    """In registers, without spilling any, and in shared memory, which the compiler checks too."""
    target, length, heads = target_of(name), 4096, 768 // width
    one = target_mesh(target, 1)
    lies = NamedSharding(one, P("data"))
    x = jax.ShapeDtypeStruct((1, length, heads, width), jnp.bfloat16, sharding=lies)
    tokens = jax.ShapeDtypeStruct((1, length), jnp.uint16, sharding=lies)

    def gradients(q, k, v, tokens, dout):
        documents = find_documents(tokens, BOS, 64)

        def call(q, k, v):
            return attention(q, k, v, scale=0.12, documents=documents, window=384, backend="triton")

        return jax.vjp(call, q, k, v)[1](dout)

    spread = jax.shard_map(
        gradients, mesh=one, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    with pretend(target):
        lowered = jax.jit(spread).trace(x, x, x, tokens, x).lower(lowering_platforms=("cuda",))
    compiled = lowered.compile({"xla_gpu_fail_ptx_compilation_on_register_spilling": True})
    assert (
        len(custom_calls(compiled.as_text())) == len(custom_calls(compiled.as_text(), TRITON)) == 3
    )
    # Two statistics of a row, fp32, four numbers of a token, int32, and the queries with NaN for
    # lanes that overflow.
    most = 4 * length * (2 * heads + 4) + 2 * length * heads * width
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * most + 2**20
    kinds = [kernel.kind for kernel in cost.kernels(compiled.as_text(), 2048) if kernel.flops]
    assert kinds == ["attention_forward", "attention_backward", "attention_backward"]
