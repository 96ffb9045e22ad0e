"""HLO that XLA emits for absent H100s for matmul, FP8 matmul, collectives, random bits: guards
against XLA changes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspeed.base.compiler import options_for
from jspeed.plan import hlo

from .custom_calls import custom_calls

Meshes = Callable[[int], Mesh]
ROWS, WHOLE = PartitionSpec("data"), PartitionSpec()


def array(
    mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = WHOLE
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def compiled(function: Callable, *arrays: jax.ShapeDtypeStruct) -> str:
    return jax.jit(function).lower(*arrays).compile(compiler_options=options_for("cuda")).as_text()


@pytest.mark.parametrize("devices", [1, 8])
def test_devices_are_absent_h100s(mesh: Meshes, devices: int):
    built = mesh(devices)
    assert built.shape == {"data": devices}
    assert {device.device_kind for device in built.devices.flat} == {"NVIDIA H100 80GB HBM3"}
    assert {device.client.runtime_type for device in built.devices.flat} == {"compile_only_runtime"}


def test_matmul_is_cublaslt_and_its_gradient_is_summed(mesh: Meshes):
    eight = mesh(8)
    x, w = array(eight, (4096, 768), jnp.bfloat16, ROWS), array(eight, (768, 3072), jnp.bfloat16)
    text = compiled(jax.grad(lambda w, x: jnp.sum(jax.nn.relu(x @ w).astype(jnp.float32))), w, x)
    calls = custom_calls(text)
    assert [call.target for call in calls] == ["__cublas$lt$matmul"] * 2
    assert calls[0].arrays[0] == hlo.Array("bf16", (512, 3072))
    assert "dot_general" in calls[0].op_name
    assert __file__ in calls[0].source
    [collective] = hlo.collectives(text)
    assert (collective.kind, collective.group) == ("all-reduce", 8)
    assert collective.bytes == 768 * 3072 * 2


def test_f8_dot_is_one_cublaslt_call(mesh: Meshes):
    one = mesh(1)

    def logits(x: jax.Array, w: jax.Array) -> jax.Array:
        both_last = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, w, both_last, preferred_element_type=jnp.bfloat16)

    text = compiled(
        logits,
        array(one, (8192, 768), jnp.float8_e4m3fn),
        array(one, (50304, 768), jnp.float8_e4m3fn),
    )
    [call] = custom_calls(text)
    assert call.target == "__cublas$lt$matmul$f8"
    assert call.arrays[0] == hlo.Array("bf16", (8192, 50304))
    assert hlo.buffers(text, 2**20)[0].array == call.arrays[0]


def test_distributed_newton_schulz(mesh: Meshes):
    """One reduce-scatter, batched matmuls on what a device owns, one all-gather."""
    eight = mesh(8)

    def step(grads: jax.Array) -> jax.Array:
        x = jax.lax.psum_scatter(grads, "data", scatter_dimension=0, tiled=True)
        gram = jnp.einsum("bmk,bnk->bmn", x, x)
        x = 3 * x + jnp.einsum("bmn,bnk->bmk", gram, x)
        return jax.lax.all_gather(x, "data", axis=0, tiled=True)

    spread = jax.shard_map(step, mesh=eight, in_specs=WHOLE, out_specs=WHOLE, check_vma=False)
    text = compiled(spread, array(eight, (16, 768, 3072), jnp.bfloat16))
    scatter, gather = hlo.collectives(text)
    assert [scatter.kind, gather.kind] == ["reduce-scatter", "all-gather"]
    assert scatter.arrays == (hlo.Array("bf16", (2, 768, 3072)),)
    assert gather.arrays == (hlo.Array("bf16", (16, 768, 3072)),)
    assert scatter.bytes == gather.bytes == 16 * 768 * 3072 * 2
    assert scatter.group == gather.group == 8
    assert [call.arrays[0].dims for call in custom_calls(text, "__cublas$lt$matmul")] == [
        (2, 768, 768),
        (2, 768, 3072),
    ]


def test_loops_are_read_through(mesh: Meshes):
    one = mesh(1)
    x = array(one, (1024, 1024), jnp.bfloat16)
    text = compiled(lambda x: jax.lax.fori_loop(0, 5, lambda _, y: y @ x, x), x)
    [call] = custom_calls(text)
    assert call.computation != hlo.entry(text)
    assert "while" in {step.opcode for step in hlo.running(text)}


def test_random_bits_need_libdevice_and_find_it(mesh: Meshes):
    """The inverse error function behind normal draws comes from CUDA's libdevice, which is a file,
    not a library."""
    text = compiled(
        lambda seed: jax.random.normal(jax.random.key(seed), (1024, 768)),
        array(mesh(8), (), jnp.uint32),
    )
    assert hlo.Array("f32", (1024, 768)) in {buffer.array for buffer in hlo.buffers(text)}


def test_compiler_options_exist(mesh: Meshes):
    x = array(mesh(1), (8,), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(jnp.sin).lower(x).compile(compiler_options={"xla_gpu_enable_tritom_gemm": False})
