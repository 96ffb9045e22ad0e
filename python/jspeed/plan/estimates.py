"""Estimates for a recipe without a compiler or a device: parameters, memory, FLOPs, compute-optimal tokens.

Memory that persists between steps (parameters, optimizer state) is exact: it follows from the shapes and shardings of
training. What a step adds is an estimate by formula; ``plan.py`` without ``--no-compile`` compiles the step instead.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jspeed.errors import BadInput, nearest
from jspeed.parallel.layout import check_layout, partition, sharded_dim
from jspeed.recipe import ParamSpec, Recipe, Stage, leaves
from jspeed.run.compute.device import GPU_MICRO_BATCH, Device, micro_batches
from jspeed.run.compute.program import state_shardings
from jspeed.run.find_recipe import find
from jspeed.sizes import active_matmul_parameters, is_matrix

# Fields of the recipe llmc, which is the GPT-2 of llm.c. Sizes: Radford et al. 2019, table 2; GPT-3: Brown et al. 2020,
# table 2.1, its batch of 3.2 M tokens as 1,536 lanes so that 512 devices divide it, its 300 G tokens.
# GPT-2's vocabulary without the padding of llmc, so that counts are the published ones.
PRESETS: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 12, "width": 768, "heads": 12},
    "gpt2-medium": {"layers": 24, "width": 1024, "heads": 16},
    "gpt2-large": {"layers": 36, "width": 1280, "heads": 20},
    "gpt2-xl": {"layers": 48, "width": 1600, "heads": 25},
    "gpt3": {"layers": 96, "width": 12_288, "heads": 96, "context": 2048, "lanes": 1536, "steps": 95_367},
}


class Memory(NamedTuple):
    """Bytes of one device. The first three are exact and persist; the others are added by a step at its peak."""

    parameters: int  # as they are stored, the master copy
    optimizer: int
    batch: int
    gathered: int  # the copies that forward and backward pass read
    gradients: int
    activations: int

    @property
    def kept(self) -> int:
        """Bytes that persist between steps."""
        return self.parameters + self.optimizer + self.batch


def gpt(
    layers: int,
    width: int,
    heads: int,
    *,
    vocab: int = 50_257,
    context: int = 1024,
    lanes: int = 512,
    steps: int | None = None,
) -> Recipe:
    """A GPT-2 by numbers: the recipe ``llmc`` with other fields, so that it can be compiled and trained too.

    Its functions are not tried here. Raises :class:`BadInput` for sizes that are no whole numbers above zero, or
    heads that do not divide the width.
    """
    sizes = {"layers": layers, "width": width, "heads": heads, "vocab": vocab, "context": context, "lanes": lanes}
    for name, size in sizes.items():
        if size < 1:
            raise BadInput(f"a GPT with {name} = {size} cannot be; give a whole number above 0")
    if width % heads:
        raise BadInput(f"a GPT of width {width} cannot have {heads} heads; give heads that divide the width")
    fields = {"LAYERS": layers, "WIDTH": width, "HEADS": heads, "MLP_WIDTH": 4 * width, "VOCAB": vocab}
    fields |= {"LANE_LEN": context, "EVAL_LEN": context, "LANES": lanes} | ({"STEPS": steps} if steps else {})
    recipe = find("llmc", [f"{name}={value}" for name, value in fields.items()], trace=False).recipe
    return replace(recipe, name=f"gpt-{layers}x{width}")


def preset(name: str) -> Recipe:
    """Return :func:`gpt` of a published size. Raises :class:`BadInput` with the names there are."""
    if name not in PRESETS:
        raise BadInput(f"model {name} is unknown{nearest(name, PRESETS)}; known models: {', '.join(PRESETS)}")
    return replace(gpt(**PRESETS[name]), name=name)


def absent_mesh(devices: int) -> Mesh:
    """An abstract mesh of ``devices`` on one ``data`` axis: enough for shapes and shardings."""
    if devices < 1:
        raise BadInput(f"{devices} devices are too few; give a whole number above 0")
    return cast(Mesh, AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,)))


def memory(recipe: Recipe, stage: Stage, layout: str, devices: int, micro_batch: int | None = None) -> Memory:
    """Bytes of one of ``devices`` in a step of ``stage`` with micro-batches of ``micro_batch`` tokens.

    The state under ``layout`` is exact. Gathered: every parameter that is cast or sharded, unsharded in its compute
    dtype. Gradients: unsharded in that dtype, then the device's shard in the stored dtype; with several micro-batches
    also an unsharded fp32 sum. Activations: :func:`activation_bytes`. Raises :class:`BadInput` for a layout
    that is unknown or a batch that does not divide.
    """
    mesh = absent_mesh(devices)
    check_layout(layout, mesh, recipe)
    parts, at_once = micro_batching(recipe, stage, devices, micro_batch)
    state, _ = state_shardings(recipe, layout, mesh)
    specs = [spec for _, spec in leaves(recipe.parameters)]
    own = _local_bytes(state["params"])
    copies = sum(_bytes(s) for s in specs if _copied(s, layout, mesh))
    whole = sum(_bytes(s) for s in specs)
    return Memory(
        parameters=own,
        optimizer=_local_bytes({name: part for name, part in state.items() if name != "params"}),
        batch=recipe.lanes // devices * (stage.lane_len + 1) * 2,
        gathered=copies,
        gradients=whole + own + (4 * sum(math.prod(s.shape) for s in specs) if parts > 1 else 0),
        activations=activation_bytes(recipe, at_once),
    )


def widest_memory(recipe: Recipe, layout: str, devices: int, micro_batch: int | None = None) -> Memory:
    """:func:`memory` of the stage with the longest lanes."""
    return memory(recipe, widest(recipe), layout, devices, micro_batch)


def widest(recipe: Recipe) -> Stage:
    """Return the stage with the longest lanes."""
    return max(recipe.stages, key=lambda stage: stage.lane_len)


def verdict(found: Memory, limit: int) -> str:
    """Whether a step fits into ``limit`` bytes: ``no`` if what stays and the gathered copy alone need more."""
    if found.kept + found.gathered > limit:
        return "no"
    return "likely" if sum(found) <= limit else "perhaps not"


def micro_batching(recipe: Recipe, stage: Stage, devices: int, micro_batch: int | None = None) -> tuple[int, int]:
    """Return (micro-batches in a step, tokens a device takes at once), as training on GPUs would without measuring."""
    gpu = Device("gpu", "cudnn", "native", GPU_MICRO_BATCH)
    parts = micro_batches(recipe, stage, absent_mesh(devices), gpu, micro_batch)
    return parts, recipe.lanes // devices * stage.lane_len // parts


def activation_bytes(recipe: Recipe, tokens: int) -> int:
    """Bytes of activations saved for the backward pass of ``tokens``: an estimate from the table of parameters.

    Input and output of every matrix, one looked-up row of every table, and twice the logits (they and their gradient
    exist at once). For a GPT-2 that is 32 bytes x width x layers a token in bf16: Korthikanti et al. 2022 (arXiv
    2205.05198, equation 1: 34) without dropout masks, whose attention keeps no scores. XLA recomputes part of it and
    keeps other things, such as inputs of norms; nothing is rematerialised on purpose. :func:`memory` with it lies
    14 % below what XLA needs for a step of llmc on eight H100s, 12 % below for r29, 1 % above for track3.
    """
    return sum(_kept_for_backward(spec) for _, spec in leaves(recipe.parameters)) * tokens


def flops_without_mask(recipe: Recipe, stage: Stage) -> int:
    """Training FLOPs per token as PaLM and nanoGPT count: every query meets every key of its lane, masked or not.

    ``6 N + 12 x layers x width x lane length``, N the active matmul parameters (PaLM, arXiv 2204.02311, appendix B).
    """
    return 6 * active_matmul_parameters(recipe, stage) + 12 * recipe.layers * recipe.attention_width * stage.lane_len


def days(flops: float, devices: int, peak: float, fraction: float) -> float:
    """Days that ``flops`` take on ``devices`` of ``peak`` FLOPs a second each, of which ``fraction`` is reached."""
    return flops / (devices * peak * fraction) / 86_400


def evenly_cut(parameters: int, devices: int) -> dict[str, float]:
    """Bytes a device of mixed-precision Adam's state, sharded evenly (ZeRO stage 3, arXiv 1910.02054): 16 a parameter.

    bf16 parameters 2, bf16 gradients 2, fp32 master copy 4, fp32 moments 8 bytes each parameter.
    """
    sizes = {"parameters, bf16": 2, "gradients, bf16": 2, "master copy, fp32": 4, "Adam's moments, fp32": 8}
    return {name: size * parameters / devices for name, size in sizes.items()}


def _local_bytes(tree: Any) -> int:
    def local(leaf: Any) -> int:
        sharding = cast(NamedSharding, leaf.sharding)
        return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(map(local, cast(Iterable[Any], jax.tree.leaves(tree))))


def _itemsize(spec: ParamSpec) -> int:
    return jnp.dtype(spec.compute or spec.dtype).itemsize


def _bytes(spec: ParamSpec) -> int:
    return math.prod(spec.shape) * _itemsize(spec)


def _copied(spec: ParamSpec, layout: str, mesh: Mesh) -> bool:
    cast_down = jnp.dtype(spec.compute or spec.dtype) != jnp.dtype(spec.dtype)
    return cast_down or (mesh.shape["data"] > 1 and sharded_dim(partition(spec, layout, mesh)) is not None)


def _kept_for_backward(spec: ParamSpec) -> int:
    """Bytes a token that the backward pass through ``spec`` needs."""
    if "vocab" in spec.axes:
        return _itemsize(spec) * (2 * spec.shape[spec.axes.index("vocab")] + math.prod(spec.shape[-1:]))
    stacked = math.prod(
        n for n, axis in zip(spec.shape, spec.axes, strict=True) if axis in ("layer", "matrix", "table")
    )
    if "token" in spec.axes:
        return _itemsize(spec) * stacked * spec.shape[-1]
    return _itemsize(spec) * (stacked - spec.padding) * sum(spec.shape[-2:]) if is_matrix(spec) else 0
