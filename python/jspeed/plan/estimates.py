"""Estimates for a recipe without a compiler or a device: published sizes, and the memory of a step.

Memory that persists between steps (parameters, optimizer state) is exact: it follows from the
shapes and shardings of training. What a step adds is an estimate by formula; a plan that compiles
the step has the compiler's own figure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jspeed.errors import BadInput
from jspeed.parallel.layout import gathered_per_layer, partition, sharded_dim
from jspeed.parallel.mesh import lane_shards
from jspeed.recipe import ParamSpec, Recipe, Stage, leaves, without_sparse
from jspeed.record.sizes import is_matrix
from jspeed.run.compute.device import Placement
from jspeed.run.compute.division import lanes_of_device
from jspeed.run.compute.program import local_bytes, state_shardings
from jspeed.run.find_recipe import LoadedRecipe, find

# Fields of the recipe llmc, which is the GPT-2 of llm.c. Sizes: Radford et al. 2019, table 2;
# GPT-3: Brown et al. 2020, table 2.1, its batch of 3.2 M tokens as 1,536 lanes so that 512 devices
# divide it, its 300 G tokens.
PUBLISHED = {
    "gpt2": "LAYERS=12 WIDTH=768 HEADS=12 MLP_WIDTH=3072",
    "gpt2-medium": "LAYERS=24 WIDTH=1024 HEADS=16 MLP_WIDTH=4096",
    "gpt2-large": "LAYERS=36 WIDTH=1280 HEADS=20 MLP_WIDTH=5120",
    "gpt2-xl": "LAYERS=48 WIDTH=1600 HEADS=25 MLP_WIDTH=6400",
    "gpt3": (
        "LAYERS=96 WIDTH=12288 HEADS=96 MLP_WIDTH=49152 LANE_LEN=2048 EVAL_LEN=2048 LANES=1536"
        " STEPS=95367"
    ),
}
# GPT-2's without the padding of llmc, so that counts are the published ones
VOCABULARY = "VOCAB=50257"


class Memory(NamedTuple):
    """Bytes of one device. The first three are exact and persist; the others are added by a step at
    its peak."""

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

    def fits(self, limit: int) -> str:
        """Whether a step fits into ``limit`` bytes: ``no`` if persistent state plus gathered
        parameters exceed it."""
        if self.kept + self.gathered > limit:
            return "no"
        return "likely" if sum(self) <= limit else "perhaps not"


def published(name: str, sets: Sequence[str] = ()) -> LoadedRecipe:
    """Return the recipe llmc with the fields of a published size, then ``sets``. Its functions are
    not traced here."""
    loaded = find("llmc", [VOCABULARY, *PUBLISHED[name].split(), *sets], trace=False)
    return replace(loaded, recipe=replace(loaded.recipe, name=name))


def abstract_mesh(axes: Mapping[str, int], devices: int | None = None) -> Mesh:
    """An abstract mesh: enough for shapes and shardings. One size may be -1: the remaining of
    ``devices``.

    Raises :class:`BadInput` when the sizes do not multiply to ``devices``.
    """
    known = math.prod(size for size in axes.values() if size != -1)
    sizes = [(devices or known) // known if size == -1 else size for size in axes.values()]
    if devices and math.prod(sizes) != devices:
        asked = ",".join(f"{name}={size}" for name, size in axes.items())
        raise BadInput(
            f"--mesh {asked} does not make {devices} devices; give sizes whose product is {devices}"
        )
    return cast(
        Mesh, AbstractMesh(tuple(sizes), tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))
    )


def memory(recipe: Recipe, stage: Stage, placement: Placement) -> Memory:
    """Bytes of one device in a step of ``stage``, with as many micro-batches as are tried first.

    The state under the layout is exact, lists of rows for sparse tables included, which are
    then left out. Gathered: every parameter that is cast or sharded over ``data``, gathered over it
    in its compute dtype; of those that are gathered layer by layer one layer, and the device's
    shard of all. Gradients: as gathered in that dtype, then the device's shard in the stored dtype;
    with several micro-batches also an fp32 sum as gathered, or of such layers of the shard.
    Activations: :func:`activation_bytes`, not divided over ``model``.
    """
    mesh, layout = placement.mesh, placement.layout
    parts = placement.parts[recipe.stages.index(stage)]
    tokens = tokens_at_once(recipe, stage, placement)
    state, _ = state_shardings(recipe, layout, mesh)
    later = dict(leaves(gathered_per_layer(recipe, layout)))
    gathered = gradients = 0
    for path, spec in leaves(recipe.parameters):
        if spec.sparse_rows:
            continue
        cut = partition(spec, layout, mesh)
        whole = math.prod(spec.shape) // math.prod(
            mesh.shape[axis] for axis in cut if axis not in (None, "data")
        )
        shard = math.prod(NamedSharding(mesh, cut).shard_shape(spec.shape))
        at_once, summed = (whole // recipe.layers + shard, shard) if later[path] else (whole, whole)
        if sharded_dim(cut) is not None or jnp.dtype(spec.compute or spec.dtype) != jnp.dtype(
            spec.dtype
        ):
            gathered += at_once * _itemsize(spec)
        gradients += at_once * _itemsize(spec) + (4 * summed if parts > 1 else 0)
    return Memory(
        parameters=local_bytes(state["params"]),
        optimizer=local_bytes({name: part for name, part in state.items() if name != "params"}),
        batch=recipe.lanes
        // lane_shards(mesh)
        * recipe.lane_words(stage.lane_len)
        * recipe.data.dtype.itemsize,
        gathered=gathered,
        gradients=gradients + local_bytes(without_sparse(recipe, state["params"])),
        activations=activation_bytes(recipe, tokens),
    )


def tokens_at_once(recipe: Recipe, stage: Stage, placement: Placement) -> int:
    """Return the tokens that a device takes at once in a step of ``stage``."""
    lanes = lanes_of_device(recipe, stage, placement.mesh)
    return lanes * stage.lane_len // placement.parts[recipe.stages.index(stage)]


def activation_bytes(recipe: Recipe, tokens: int) -> int:
    """Bytes of activations saved for the backward pass of ``tokens``: an estimate from the table of
    parameters.

    Input and output of every matrix, one looked-up row of every table, and twice the logits (they
    and their gradient exist at once). For a GPT-2 that is 32 bytes x width x layers a token in
    bf16, as in Korthikanti et al. 2022 (arXiv 2205.05198, equation 1) without dropout masks.
    :func:`memory` with it lies 14 % below to 1 % above what XLA needs for steps of llmc, r29 and
    track3 on eight H100s.
    """
    return sum(_kept_for_backward(spec) for _, spec in leaves(recipe.parameters)) * tokens


def _itemsize(spec: ParamSpec) -> int:
    return jnp.dtype(spec.compute or spec.dtype).itemsize


def _kept_for_backward(spec: ParamSpec) -> int:
    """Bytes a token that the backward pass through ``spec`` needs."""
    if "vocab" in spec.axes:
        return _itemsize(spec) * (
            2 * spec.shape[spec.axes.index("vocab")] + math.prod(spec.shape[-1:])
        )
    sizes = list(zip(spec.shape, spec.axes, strict=True))
    stacked = math.prod(n for n, axis in sizes if axis in ("layer", "matrix", "table"))
    if "token" in spec.axes:
        return _itemsize(spec) * stacked * spec.shape[-1]
    if not is_matrix(spec):
        return 0
    inputs, *outputs = (n for n, axis in sizes if axis not in ("layer", "matrix", "table"))
    return _itemsize(spec) * (stacked - spec.padding) * (inputs + math.prod(outputs))
