"""The loss compiled for an H100 that is not there: FP8 calls, and nothing of fp32 logits' size in memory."""

import importlib.util
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jspeed
from jspeed.model import fp8
from jspeed.model.losses import cross_entropy, root_cap, sigmoid_cap

TARGET = Path(jspeed.__file__).parent / "plan" / "targets" / "h100.txtpb"
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")

pytestmark = [
    pytest.mark.skipif(not any(map(importlib.util.find_spec, PLUGINS)), reason="needs the CUDA plugin; install .[aot]"),
    pytest.mark.skipif(not TARGET.exists(), reason="needs the description of an H100"),
]

WIDTH, VOCAB = 768, 50_304
SCALES = fp8.Scales(100 / 448, 1.6 / 448, 0.75 / 448)


@pytest.fixture(scope="module")
def device():
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET.read_text(), topology="1x1x1")
    return NamedSharding(topologies.make_mesh(topology, (1,), ("data",)), PartitionSpec())


def compiled(device, tokens, scales, cap, *, rows=1, chunk=None, gradient=True):
    """Compile the loss (and gradients) of ``tokens`` in ``rows`` rows, weighed as a step of 8 x ``tokens`` is."""

    def loss(x, w, targets):
        weights = jnp.full(targets.shape, 1 / (8 * tokens), jnp.float32)
        return cross_entropy(lambda w, x: fp8.matmul(x, w, scales), w, x, targets, weights, cap=cap, chunk=chunk)

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    x = array((rows, tokens // rows, WIDTH), jnp.bfloat16)
    w, targets = array((VOCAB, WIDTH), jnp.float32), array((rows, tokens // rows), jnp.int32)
    function = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True) if gradient else loss
    # Without a device nothing is tuned, and the default would be untuned Triton kernels.
    return jax.jit(function).lower(x, w, targets).compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def operations(program):
    """Return the instructions that run: those of the program and its loops, not those inside fusions."""
    text = program.as_text()
    fusions = set(re.findall(r"calls=(%[\w.-]+)", text))
    found, skip = [], False
    for line in text.splitlines():
        if line.endswith("{"):
            skip = line.split(" ", 1)[0] in fusions
        elif " = " in line and not skip:
            found.append(line.strip())
    return found


def results(line):
    """Return (dtype, elements) of the arrays an instruction makes."""
    made = re.split(r" [a-z][\w-]*\(", line.split(" = ", 1)[1], maxsplit=1)[0]
    return [(d, math.prod(map(int, n.split(","))) if n else 1) for d, n in re.findall(r"(\w+)\[([\d,]*)\]", made)]


def made(program, size):
    """Return {dtype: how many} of the arrays of at least ``size`` elements that are written."""
    found = {}
    for line in operations(program):
        if not re.search(r" (parameter|tuple|get-tuple-element|bitcast|while)\(", line):
            for dtype, elements in results(line):
                if elements >= size:
                    found[dtype] = found.get(dtype, 0) + 1
    return found


def gemms(program):
    return [line for line in operations(program) if '"__cublas$lt$matmul$f8"' in line]


@pytest.mark.parametrize("cap", [sigmoid_cap(15.0), root_cap(15.0)], ids=["sigmoid", "root"])
@pytest.mark.parametrize(("tokens", "rows"), [(16_384, 8), (49_152, 1)])
def test_fp8_head(device, tokens, rows, cap):
    program = compiled(device, tokens, SCALES, cap, rows=rows)
    calls = gemms(program)
    assert len(calls) == 3
    # Fast accumulation in the forward product alone.
    assert sum("HIGHEST" in line for line in calls) == 2
    # The logits once, written by their product with its scale; their gradient in the layouts of both products.
    size = tokens * VOCAB
    assert made(program, size) == {"bf16": 1, "f8e5m2": 2}
    # The logits' 2 bytes and the gradients' 1 + 1; 3% for operands.
    assert program.memory_analysis().temp_size_in_bytes < 1.03 * 4 * size


@pytest.mark.parametrize("cap", [sigmoid_cap(15.0), None], ids=["sigmoid", "none"])
def test_bf16_head(device, cap):
    program = compiled(device, 16_384, None, cap)
    size = 16_384 * VOCAB
    assert made(program, size) == {"bf16": 2}
    assert program.memory_analysis().temp_size_in_bytes < 1.03 * 4 * size


def test_chunks_share_memory(device):
    """Three chunks take the memory of one, and the head's gradient grows inside its product."""
    program = compiled(device, 49_152, SCALES, sigmoid_cap(15.0), chunk=16_384)
    size = 16_384 * VOCAB
    assert len(gemms(program)) == 3 and sum('"beta":1' in line for line in gemms(program)) == 1
    assert made(program, size) == {"bf16": 1, "f8e5m2": 2}
    assert program.memory_analysis().temp_size_in_bytes < 1.05 * 4 * size


def test_evaluation_of_a_long_row(device):
    program = compiled(device, 262_144, None, sigmoid_cap(15.0), chunk=16_384, gradient=False)
    size = 16_384 * VOCAB
    assert made(program, size) == {"bf16": 1}
    assert program.memory_analysis().temp_size_in_bytes < 1.1 * 2 * size
