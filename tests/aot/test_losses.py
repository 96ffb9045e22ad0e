"""The loss compiled for an absent H100: FP8 calls, and no fp32 array of logits size."""

import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jspeed.base.compiler import options_for
from jspeed.model import fp8
from jspeed.model.losses import Head, as_made, cross_entropy, root_cap, sigmoid_cap
from jspeed.model.sampled import columns, draw, sampled_cross_entropy
from jspeed.plan import hlo
from jspeed.recipe import Context
from jspeed.recipes import r29
from jspeed.run.compute import score

from .custom_calls import custom_calls

WIDTH, VOCAB = 768, 50_304
SCALES = fp8.Scales(100 / 448, 1.6 / 448, 0.75 / 448)


@pytest.fixture
def device(mesh):
    return NamedSharding(mesh(1), PartitionSpec())


def compiled(device, tokens, scales, cap, *, rows=1, chunk=None, sampled=None, keep=as_made):
    """Compile the loss and gradients of ``tokens`` in ``rows`` rows, weighed as a step of 8 x
    ``tokens`` is.

    ``sampled``: how many tokens of the vocabulary are scored exactly, 1 in how many of the others,
    by what order, and for how many groups.
    """

    def loss(x, w, targets):
        weights = jnp.full(targets.shape, 1 / (8 * tokens), jnp.float32)
        head, arguments = partial(fp8.head, scales=scales), (w, x, targets, weights)
        if sampled:
            return sampled_cross_entropy(
                head, *arguments, draw(targets[0, 0], VOCAB, *sampled), cap=cap, chunk=chunk
            )
        return cross_entropy(Head(head, chunk, keep), *arguments, cap=cap)

    x = array(device, (rows, tokens // rows, WIDTH), jnp.bfloat16)
    w = array(device, (VOCAB, WIDTH), jnp.float32)
    targets = array(device, (rows, tokens // rows), jnp.int32)
    function = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return jax.jit(function).lower(x, w, targets).compile(compiler_options=options_for("cuda"))


def array(device, shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=device)


def made(program, size):
    """Count by dtype the arrays of at least ``size`` elements that are written."""
    arrays = (buffer.array for buffer in hlo.buffers(program.as_text(), size))
    return Counter(array.dtype for array in arrays if math.prod(array.dims) >= size)


def gemms(program):
    return [call.attributes for call in custom_calls(program.as_text(), "__cublas$lt$matmul$f8")]


def scales_of(program):
    """Name the two scales of every FP8 call, constants of the program that bf16 has."""
    text = program.as_text()
    constants = dict(re.findall(r"%(\S+) = f32\[\]\S* constant\((\S+)\)", text))
    names = {
        np.float32(np.asarray(scale, jnp.bfloat16)): name
        for name, scale in SCALES._asdict().items()
    }
    calls = re.findall(
        r"custom-call\(%\S+, %\S+, %(\S+), %(\S+)\), custom_call_target=\"__cublas\$lt\$matmul\$f8",
        text,
    )
    return sorted(
        tuple(sorted((names[np.float32(constants[c])] for c in call), key=["grad", "x", "w"].index))
        for call in calls
    )


@pytest.mark.parametrize("cap", [sigmoid_cap(15.0), root_cap(15.0)], ids=["sigmoid", "root"])
@pytest.mark.parametrize(("tokens", "rows"), [(16_384, 8), (49_152, 1)])
def test_fp8_head(device, tokens, rows, cap):
    program = compiled(device, tokens, SCALES, cap, rows=rows)
    calls = gemms(program)
    assert len(calls) == 3
    # Fast accumulation in the forward matmul alone.
    assert sum("HIGHEST" in line for line in calls) == 2
    # Each matmul undoes what its own operands were divided by, to the last bit.
    assert scales_of(program) == sorted([("x", "w"), ("grad", "w"), ("grad", "x")])
    # The logits once, written by their matmul with its scale; their gradient in the layouts of both
    # matmuls.
    size = tokens * VOCAB
    assert made(program, size) == {"bf16": 1, "f8e5m2": 2}
    # The logits' 2 bytes and the gradients' 1 + 1; 3% for operands.
    assert program.memory_analysis().temp_size_in_bytes < 1.03 * 4 * size


def test_fp8_head_whose_logits_are_e4m3(device):
    """Their matmul writes them."""
    keep, size = partial(fp8.kept_in_e4m3, scale=0.5), 16_384 * VOCAB
    program = compiled(device, 16_384, SCALES, sigmoid_cap(15.0), keep=keep)
    assert len(gemms(program)) == 3 and made(program, size) == {"f8e4m3fn": 1, "f8e5m2": 2}
    assert program.memory_analysis().temp_size_in_bytes < 1.03 * 3 * size


@pytest.mark.parametrize("cap", [sigmoid_cap(15.0), None], ids=["sigmoid", "none"])
def test_bf16_head(device, cap):
    program = compiled(device, 16_384, None, cap)
    size = 16_384 * VOCAB
    assert made(program, size) == {"bf16": 2}
    assert program.memory_analysis().temp_size_in_bytes < 1.03 * 4 * size


def test_fp8_head_of_a_sample(device):
    """As of the whole vocabulary, on gathered rows; the gradient through a target's own row enters
    the product's."""
    tokens, exact, one_in = 49_152, 8192, 14
    program = compiled(device, tokens, SCALES, sigmoid_cap(15.0), sampled=(exact, one_in))
    assert len(gemms(program)) == 3 and sum('"beta":1' in line for line in gemms(program)) == 1
    size = tokens * columns(VOCAB, exact, one_in)
    assert made(program, size) == {"bf16": 1, "f8e5m2": 2}
    assert program.memory_analysis().temp_size_in_bytes < 1.25 * 4 * size


def test_fp8_head_of_a_sample_for_each_group(device):
    """What all score and what each group scores by itself: three matmuls each, the second kind
    batched."""
    tokens, exact, one_in = 49_152, 5248, 16
    program = compiled(
        device, tokens, SCALES, sigmoid_cap(15.0), sampled=(exact, one_in, None, one_in)
    )
    assert len(gemms(program)) == 6 and sum('"beta":1' in line for line in gemms(program)) == 2
    drawn = columns(VOCAB, exact, one_in) - exact
    assert made(program, tokens * drawn) == {"bf16": 2, "f8e5m2": 4}
    assert program.memory_analysis().temp_size_in_bytes < 1.25 * 4 * tokens * (exact + drawn)


def test_chunks_share_memory(device):
    """Three chunks take the memory of one, and the head's gradient grows inside its product."""
    program = compiled(device, 49_152, SCALES, sigmoid_cap(15.0), chunk=16_384)
    size = 16_384 * VOCAB
    assert len(gemms(program)) == 3 and sum('"beta":1' in line for line in gemms(program)) == 1
    assert made(program, size) == {"bf16": 1, "f8e5m2": 2}
    assert program.memory_analysis().temp_size_in_bytes < 1.05 * 4 * size


@pytest.mark.parametrize("canonical", [False, True])
def test_evaluation_of_a_long_row(device, canonical):
    """The trainer's score. Bits of what is impossible are unpacked where logits are summed: no
    array of them is written."""
    state = {name: r29.RECIPE.parameters["head"] for name in ("x", "head")}
    recipe = replace(r29.RECIPE, parameters=state, hidden=lambda params, *_: params["x"])

    def evaluation(x, w, tokens, tokenizer_mask):
        ctx = Context(recipe.stages[-1], training=False, tokenizer_mask=tokenizer_mask)
        return score.losses(recipe, {"x": x, "head": w}, tokens, tokens, ctx)

    x = array(device, (1, 262_144, WIDTH), jnp.bfloat16)
    tokens = array(device, (1, 262_144), jnp.int32)
    w = array(device, (VOCAB, WIDTH), jnp.bfloat16)
    bits = array(device, (VOCAB, VOCAB // 8), jnp.uint8) if canonical else None
    lowered = jax.jit(evaluation).lower(x, w, tokens, bits)
    program = lowered.compile(compiler_options=options_for("cuda"))
    size = score.LOGITS // recipe.data.vocab_size * VOCAB
    assert made(program, size) == {"bf16": 1, "f32": 1}  # raw, and softcapped
    assert program.memory_analysis().temp_size_in_bytes < 1.05 * 6 * size
