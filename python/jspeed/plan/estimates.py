"""Estimates for a recipe without a compiler or a device: parameters, memory, FLOPs.

Memory that persists between steps (parameters, optimizer state) is exact: it follows from the shapes and shardings of
training. What a step adds is an estimate by formula; ``plan.py`` without ``--no-compile`` compiles the step instead.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jspeed.errors import BadInput, nearest
from jspeed.parallel.layout import check_layout, gathered_per_layer, partition, sharded_dim
from jspeed.parallel.mesh import row_shards
from jspeed.recipe import ParamSpec, Recipe, Stage, leaves, without_lazy
from jspeed.run.compute.device import GPU_MICRO_BATCH, Device, lanes_of_device, micro_batches
from jspeed.run.compute.program import state_shardings
from jspeed.run.find_recipe import find
from jspeed.sizes import active_matmul_parameters, attention_widths, is_matrix

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

    Its functions are not traced here.
    """
    fields = {"LAYERS": layers, "WIDTH": width, "HEADS": heads, "MLP_WIDTH": 4 * width, "VOCAB": vocab}
    fields |= {"LANE_LEN": context, "EVAL_LEN": context, "LANES": lanes} | ({"STEPS": steps} if steps else {})
    recipe = find("llmc", [f"{name}={value}" for name, value in fields.items()], trace=False).recipe
    return replace(recipe, name=f"gpt-{layers}x{width}")


def preset(name: str) -> Recipe:
    """Return :func:`gpt` of a published size. Raises :class:`BadInput` with the names there are."""
    if name not in PRESETS:
        raise BadInput(f"model {name} is unknown{nearest(name, PRESETS)}; known models: {', '.join(PRESETS)}")
    return replace(gpt(**PRESETS[name]), name=name)


def abstract_mesh(axes: Mapping[str, int], devices: int | None = None) -> Mesh:
    """An abstract mesh: enough for shapes and shardings. One size may be -1: the remaining of ``devices``.

    Raises :class:`BadInput` when the sizes do not multiply to ``devices``.
    """
    known = math.prod(size for size in axes.values() if size != -1)
    sizes = [(devices or known) // known if size == -1 else size for size in axes.values()]
    if devices and math.prod(sizes) != devices:
        asked = ",".join(f"{name}={size}" for name, size in axes.items())
        raise BadInput(f"--mesh {asked} does not make {devices} devices; give sizes whose product is {devices}")
    return cast(Mesh, AbstractMesh(tuple(sizes), tuple(axes), axis_types=(AxisType.Auto,) * len(sizes)))


def memory(recipe: Recipe, stage: Stage, layout: str, mesh: Mesh, micro_batch: int | None = None) -> Memory:
    """Bytes of one device of ``mesh`` in a step of ``stage`` with micro-batches of ``micro_batch`` tokens.

    The state under ``layout`` is exact, lists of rows for lazily updated tables included, which are then left out.
    Gathered: every parameter that is cast or sharded over ``data``, gathered over it in its compute dtype; of those
    that are gathered layer by layer one layer, and the device's shard of all. Gradients: as gathered in that dtype,
    then the device's shard in the stored dtype; with several micro-batches also an fp32 sum as gathered, or of such
    layers of the shard. Activations: :func:`activation_bytes`, not divided over ``model``. Raises :class:`BadInput` for
    a layout that is unknown, or lanes that do not divide over the devices.
    """
    check_layout(layout, mesh, recipe)
    parts, at_once = micro_batching(recipe, stage, mesh, micro_batch)
    state, _ = state_shardings(recipe, layout, mesh)
    later = dict(leaves(gathered_per_layer(recipe, layout)))
    own = _local_bytes(state["params"])
    gathered = []  # (parameter, sharding, elements that are gathered at once, elements that stay for the sum)
    for path, spec in leaves(recipe.parameters):
        if not spec.lookups:
            cut = partition(spec, layout, mesh)
            whole = math.prod(spec.shape) // _not_gathered(cut, mesh)
            shard = math.prod(NamedSharding(mesh, cut).shard_shape(spec.shape))
            gathered.append(
                (spec, cut, whole // recipe.layers + shard, shard) if later[path] else (spec, cut, whole, whole)
            )
    return Memory(
        parameters=own,
        optimizer=_local_bytes({name: part for name, part in state.items() if name != "params"}),
        batch=recipe.lanes // row_shards(mesh) * (stage.lane_len + 1) * recipe.data.dtype.itemsize,
        gathered=sum(size * _itemsize(spec) for spec, cut, size, _ in gathered if _copied(spec, cut)),
        gradients=sum(size * _itemsize(spec) for spec, _, size, _ in gathered)
        + _local_bytes(without_lazy(recipe, state["params"]))
        + (4 * sum(size for *_, size in gathered) if parts > 1 else 0),
        activations=activation_bytes(recipe, at_once),
    )


def longest_stage(recipe: Recipe) -> Stage:
    """Return the stage with the longest lanes."""
    return max(recipe.stages, key=lambda stage: stage.lane_len)


def verdict(found: Memory, limit: int) -> str:
    """Whether a step fits into ``limit`` bytes: ``no`` if persistent state plus gathered parameters exceed it."""
    if found.kept + found.gathered > limit:
        return "no"
    return "likely" if sum(found) <= limit else "perhaps not"


def micro_batching(recipe: Recipe, stage: Stage, mesh: Mesh, micro_batch: int | None = None) -> tuple[int, int]:
    """Return (micro-batches in a step, tokens of each on a device), as training on GPUs would without measuring."""
    gpu = Device("gpu", "cudnn", "native", GPU_MICRO_BATCH)
    parts = micro_batches(recipe, stage, mesh, gpu, micro_batch)
    return parts, lanes_of_device(recipe, stage, mesh) * stage.lane_len // parts


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
    return 6 * active_matmul_parameters(recipe, stage) + 12 * sum(attention_widths(recipe)) * stage.lane_len


def zero3_bytes(parameters: int, devices: int) -> dict[str, float]:
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


def _not_gathered(cut: PartitionSpec, mesh: Mesh) -> int:
    """Into how many parts a parameter stays sharded when it is gathered over ``data``."""
    return math.prod(mesh.shape[axis] for axis in cut if axis not in (None, "data"))


def _copied(spec: ParamSpec, cut: PartitionSpec) -> bool:
    return jnp.dtype(spec.compute or spec.dtype) != jnp.dtype(spec.dtype) or sharded_dim(cut) is not None


def _kept_for_backward(spec: ParamSpec) -> int:
    """Bytes a token that the backward pass through ``spec`` needs."""
    if "vocab" in spec.axes:
        return _itemsize(spec) * (2 * spec.shape[spec.axes.index("vocab")] + math.prod(spec.shape[-1:]))
    sizes = list(zip(spec.shape, spec.axes, strict=True))
    stacked = math.prod(n for n, axis in sizes if axis in ("layer", "matrix", "table"))
    if "token" in spec.axes:
        return _itemsize(spec) * stacked * spec.shape[-1]
    if not is_matrix(spec):
        return 0
    inputs, *outputs = (n for n, axis in sizes if axis not in ("layer", "matrix", "table"))
    return _itemsize(spec) * (stacked - spec.padding) * (inputs + math.prod(outputs))
