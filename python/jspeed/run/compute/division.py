"""The division of a global batch over devices, into micro-batches, and of lanes (rows of a batch,
of packed documents) into sub-lanes; and what is tried, in order, until a step fits in memory.

Where a device cannot hold a lane it is cut at document borders; the batch stays the same. Further
settings are the head's loss in chunks, and layers that are recomputed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jspeed.base.cores import cores
from jspeed.errors import BadInput
from jspeed.parallel.layout import check_layout
from jspeed.parallel.mesh import lane_shards
from jspeed.recipe import Recipe, Stage, leaves
from jspeed.record.sizes import scored_heads
from jspeed.run.compute.device import Device, Placement
from jspeed.run.compute.host_tables import owners_of, rows_of_device

MOST = 32  # sub-lanes of a lane
# Numbers of a layer's activations that a CPU evaluates at once: with fewer, an operation takes
# longer to begin than to compute. shakespeare-char, 64 wide, 111,488 tokens: 753 ms of processor
# time by 512 tokens, 591 by 2,048, with the same bits; stdlib, 192 wide, took the same.
CPU_EVALUATION = 2**17
# Numbers of a layer's activations that a CPU trains on at once, where that is the whole batch. An
# update of nanoGPT's CPU setting, 768 tokens of 128: 69 ms of one core in two parts, 64 in one.
CPU_STEP = 512 * 192
CPU_DEVICES = 8  # of one CPU at most: more cores than two were not measured
CPU_REPLICAS = 2**30  # bytes of parameters at most that all of them hold; two of GPT-2's 124M
# tokens on either side of a sub-lane, which primitives see: model/ngrams.py looks back order - 1
MARGIN = 8
# tokens: 0.8 GB of logits and gradients in bf16 for GPT-2's vocabulary; need not divide a lane
HEAD_CHUNK = 4096
TILE = 128  # lengths of sub-lanes are a multiple of it in long lanes whose own length is


def devices_of_cpu(recipe: Recipe, micro_batch: int | None) -> int:
    """Return as how many devices the cores of a CPU train ``recipe``: the most that divide its
    lanes, with whole micro-batches where one was asked for.

    Cores that share one device wait for each other at every operation, devices only where they sum
    gradients: on two cores as two devices stdlib's steps take 0.85 of their time, those of nanogpt
    in nanoGPT's setting 0.8 (lab/2026-11-30-cores-as-devices.md).
    """

    def divides(devices: int) -> bool:
        own = [recipe.tokens_per_step(stage) // devices for stage in recipe.stages]
        return (
            recipe.lanes % devices == 0
            and replicas_fit(recipe, devices)
            and not any(tokens % (micro_batch or 1) for tokens in own)
        )

    most = min(cores(), CPU_DEVICES)
    return next((devices for devices in range(most, 1, -1) if divides(devices)), 1)


def replicas_fit(recipe: Recipe, devices: int) -> bool:
    """Whether so many devices of a CPU may hold all parameters each, in fp32."""
    held = sum(spec.size for _, spec in leaves(recipe.parameters)) * 4
    return devices * held <= CPU_REPLICAS


def place(recipe: Recipe, mesh: Mesh, layout: str, device: Device) -> Placement:
    """Return the placement of the programs of ``recipe``.

    Raises :class:`BadInput` for a layout that the mesh does not fit, and a batch or micro-batch
    that does not divide.
    """
    check_layout(layout, mesh, recipe)
    numbers = tuple(micro_batches(recipe, stage, mesh, device) for stage in recipe.stages)
    return Placement(mesh, layout, device, micro_batches=numbers)


def lanes_of_device(recipe: Recipe, stage: Stage, mesh: Mesh) -> int:
    """Return the lanes of one device. Raises :class:`BadInput` when the lanes cannot be divided
    over the devices."""
    devices = lane_shards(mesh)
    if recipe.lanes % devices:
        raise BadInput(
            f"global batch of {recipe.tokens_per_step(stage)} tokens ({recipe.lanes} lanes of"
            f" {stage.lane_len}) cannot be divided over {devices} devices on the data axis; use a"
            f" number of devices that divides {recipe.lanes}, or --set"
            f" LANES={-(-recipe.lanes // devices) * devices}"
        )
    return recipe.lanes // mesh.shape["data"]


def divisions(recipe: Recipe, stage: Stage, mesh: Mesh) -> list[int]:
    """Return into how many micro-batches one device may divide its lanes, fewest first.

    Up to one lane each, then, where documents have a bound and there is no pipeline, sub-lanes of a
    lane.
    """
    lanes = lanes_of_device(recipe, stage, mesh)
    whole = [parts for parts in range(1, lanes + 1) if lanes % parts == 0]
    if mesh.shape.get("pipe", 1) > 1:
        return whole
    return whole + [lanes * sub_lanes for sub_lanes in numbers_of_sub_lanes(recipe, stage)]


def micro_batches(recipe: Recipe, stage: Stage, mesh: Mesh, device: Device) -> tuple[int, ...]:
    """Return the numbers of micro-batches of a device that a step is tried with, fewest first.

    Where a micro-batch was asked for, it is one number. Else a device first takes as many whole
    lanes as ``device.at_once`` tokens hold, with at least one micro-batch per pipeline stage; a CPU
    takes a small batch whole. Raises :class:`BadInput` with the numbers when the batch does not
    divide.
    """
    choices = divisions(recipe, stage, mesh)
    lanes = lanes_of_device(recipe, stage, mesh)
    own, micro_batch = lanes * stage.lane_len, device.asked.micro_batch
    if micro_batch is None:
        narrow = device.platform == "cpu" and own * recipe.attention_width <= CPU_STEP
        at_once = max(device.at_once, own) if narrow else device.at_once
        most = max(1, min(lanes // mesh.shape.get("pipe", 1), at_once // stage.lane_len))
        return tuple(parts for parts in choices if lanes // parts <= most)
    if micro_batch < 1 or own % micro_batch or own // micro_batch not in choices:
        sizes = ", ".join(str(own // parts) for parts in reversed(choices) if own % parts == 0)
        raise BadInput(
            f"--micro-batch {micro_batch}: the global batch of {recipe.tokens_per_step(stage)}"
            f" tokens ({recipe.lanes} lanes of {stage.lane_len}) is not a multiple of"
            f" {mesh.shape['data']} devices x {micro_batch} tokens; whole lanes, or sub-lanes that"
            f" document borders allow, need one of {sizes}"
        )
    return (own // micro_batch,)


def evaluated_at_once(recipe: Recipe, placement: Placement, micro_tokens: int, lanes: int) -> int:
    """Return how many tokens a device evaluates at once of so many lanes: ``micro_tokens``, and on
    a CPU more where they are narrow, in equal parts. Not with tables on the host, whose rows are
    fetched for so many."""
    if placement.device.platform != "cpu" or placement.device.memory or recipe.on_host:
        return micro_tokens
    own = -(-lanes // lane_shards(placement.mesh))
    most = max(1, CPU_EVALUATION // recipe.attention_width // recipe.eval_len)
    return max(micro_tokens, -(-own // -(-own // most)) * recipe.eval_len)


def numbers_of_sub_lanes(recipe: Recipe, stage: Stage) -> list[int]:
    """Numbers of sub-lanes into which a lane may be cut, each making them shorter; none where
    documents have no bound, or tokens have numbers beside them."""
    if recipe.beside or recipe.data.align != "bos" or not stage.max_doc_len or not stage.max_docs:
        return []
    numbers, longest = [], stage.lane_len
    for sub_lanes in (2**n for n in range(1, MOST.bit_length())):
        if stage.lane_len % sub_lanes == 0 and sub_lane_length(stage, sub_lanes) < longest:
            numbers.append(sub_lanes)
            longest = sub_lane_length(stage, sub_lanes)
    return numbers


def sub_lane_length(stage: Stage, sub_lanes: int) -> int:
    """Tokens of a sub-lane: its share of the lane, one document more, and the margins; at most the
    lane."""
    tile = 1 if stage.lane_len % TILE or stage.lane_len < 16 * TILE else TILE
    needed = -(-stage.lane_len // sub_lanes) + (stage.max_doc_len or 0) + 2 * MARGIN
    return min(stage.lane_len, -(-needed // tile) * tile)


def sub_lanes_of(recipe: Recipe, stage: Stage, mesh: Mesh, parts: int) -> int:
    """Return into how many sub-lanes a lane is cut where a device has ``parts`` micro-batches."""
    return max(1, parts // lanes_of_device(recipe, stage, mesh))


def looked_up(recipe: Recipe, stage: Stage, mesh: Mesh, parts: int) -> int:
    """Return the tokens of a step that rows are looked up for: of lanes, or of all their sub-lanes,
    which overlap."""
    sub_lanes = sub_lanes_of(recipe, stage, mesh, parts)
    return recipe.lanes * sub_lanes * sub_lane_length(stage, sub_lanes)


def in_flight_bytes(recipe: Recipe, stage: Stage, mesh: Mesh, parts: int) -> int:
    """Bytes of a device beside a step's own, where tables lie on the host: the next step's rows,
    and gradients that still go back."""
    tokens, owners = looked_up(recipe, stage, mesh, parts) // lane_shards(mesh), owners_of(mesh)
    return 2 * sum(
        rows_of_device(spec, spec.sparse_rows * tokens, owners)
        * spec.shape[1]
        * np.dtype(spec.dtype).itemsize
        for spec in recipe.on_host.values()
    )


def cut(
    recipe: Recipe, stage: Stage, sub_lanes: int, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cut lanes ``[B, T + 1]`` into ``[B x sub-lanes, P + 1]``; also return the mask of the tokens
    that each sub-lane scores, fp32 ``[B x sub-lanes, P]``.

    The n-th sub-lane begins with the last document that starts at or before n / ``sub_lanes`` of
    the lane. Every token is scored in one sub-lane: 1, or 0. A lane with a document longer than
    ``stage.max_doc_len``, which the loader never gives, has NaN instead, so that a lost token shows
    in the loss.
    """
    length, lanes = sub_lane_length(stage, sub_lanes), tokens.shape[0]
    lane = tokens.shape[1] - 1
    position_T = jnp.arange(lane, dtype=jnp.int32)
    last_BT = jax.lax.cummax(
        jnp.where(tokens[:, :lane] == recipe.data.bos_id, position_T[None], 0), axis=1
    )
    inner_BN = last_BT[:, jnp.array([n * lane // sub_lanes for n in range(1, sub_lanes)])]
    start_BN = jnp.concatenate([jnp.zeros((lanes, 1), jnp.int32), inner_BN], axis=1)
    stop_BN = jnp.concatenate([inner_BN, jnp.full((lanes, 1), lane, jnp.int32)], axis=1)
    first_BN = jnp.clip(start_BN - MARGIN, 0, lane - length)

    def slices(tokens_T: jax.Array, firsts_N: jax.Array) -> jax.Array:
        return jax.vmap(lambda first: jax.lax.dynamic_slice_in_dim(tokens_T, first, length + 1))(
            firsts_N
        )

    cut_BNP = jax.vmap(slices)(tokens, first_BN)
    position_BNP = first_BN[..., None] + jnp.arange(length, dtype=jnp.int32)[None, None]
    counts_BNP = (
        (position_BNP >= start_BN[..., None]) & (position_BNP < stop_BN[..., None])
    ).astype(jnp.float32)
    fits_BN = stop_BN <= first_BN + length
    counts_BNP *= jnp.where(fits_BN, 1.0, jnp.nan)[..., None]
    lanes = lanes * sub_lanes
    return cut_BNP.reshape(lanes, length + 1), counts_BNP.reshape(lanes, length)


class Attempt(NamedTuple):
    """A step over ``parts`` micro-batches and the bytes of a device that it needs; ``step`` is None
    if the compiler refused it. The head's loss takes ``head_chunk`` tokens of a lane at a time;
    None: all. ``remat``: layers are recomputed for their gradients."""

    step: jax.stages.Compiled | None
    parts: int
    head_chunk: int | None
    remat: bool
    lowered: jax.stages.Lowered
    need: int

    def fits(self, limit: float) -> bool:
        """Whether it can run in ``limit`` bytes."""
        return self.step is not None and self.need <= limit

    @property
    def program(self) -> jax.stages.Compiled:
        """The compiled step of an attempt that fits."""
        assert self.step is not None
        return self.step


def attempts(
    recipe: Recipe,
    stage: Stage,
    mesh: Mesh,
    numbers: Iterable[int],
    limit: float,
    lower: Callable[[int, int | None, bool], jax.stages.Lowered],
    measure: Callable[[jax.stages.Lowered], tuple[int, jax.stages.Compiled | None]],
) -> Iterator[Attempt]:
    """Compile the step of ``stage`` over each of ``numbers`` of micro-batches, fewest first.

    One that does not fit in ``limit`` bytes is followed by the same with the head's loss in chunks.
    This is left out where they free too little (:func:`bytes_freed_by_chunks`), or the recipe's
    loss takes none, so that the program would be the same. For the smallest micro-batch layers are
    recomputed then: more expensive than sub-lanes, so it comes last.
    """

    def attempt(
        parts: int, head_chunk: int | None, remat: bool, lowered: jax.stages.Lowered
    ) -> Attempt:
        need, step = measure(lowered)
        need += in_flight_bytes(recipe, stage, mesh, parts)
        return Attempt(step, parts, head_chunk, remat, lowered, need)

    most = divisions(recipe, stage, mesh)[-1]
    for parts in numbers:
        yield (tried := attempt(parts, None, False, lowered := lower(parts, None, False)))
        if tried.fits(limit):
            continue
        frees = bytes_freed_by_chunks(recipe, stage, mesh, parts)
        if max(0, tried.need - limit) < frees:
            chunked = lower(parts, HEAD_CHUNK, False)
            if chunked.as_text() != lowered.as_text():
                yield (tried := attempt(parts, HEAD_CHUNK, False, chunked))
        if parts == most and not tried.fits(limit):
            chunk = HEAD_CHUNK if frees else None
            recomputed = lower(parts, chunk, True)
            if recomputed.as_text() != lower(parts, chunk, False).as_text():
                yield attempt(parts, chunk, True, recomputed)


def bytes_freed_by_chunks(recipe: Recipe, stage: Stage, mesh: Mesh, parts: int) -> int:
    """Bytes that chunks can free at most, where a device takes one of ``parts`` micro-batches at
    once.

    They are the logits and their gradient of all tokens but a chunk's. 0 where several lanes are
    taken at once, as fewer need less at no cost; where a lane is no longer than a chunk; and in a
    pipeline.
    """
    lanes = lanes_of_device(recipe, stage, mesh)
    if parts < lanes or mesh.shape.get("pipe", 1) > 1:
        return 0
    logits = [rows * size for rows, size in scored_heads(recipe, stage)]
    return 2 * max(0, sub_lane_length(stage, parts // lanes) - HEAD_CHUNK) * max(logits, default=0)


def without_room(
    recipe: Recipe,
    state: int,
    sizes: Mapping[str, int],
    limit: float,
    fields: Mapping[str, Any],
) -> str | None:
    """Return why a recipe cannot run whatever its micro-batch: its ``state`` is more than ``limit``
    bytes of a device. None if it is not.

    ``sizes``: bytes of each parameter by its path. A table of hashed rows may have any number of
    them: where the largest is one, and its rows are one of the ``fields``, that field's largest
    half, quarter, ... is named that leaves half of the memory to a step.
    """
    if state <= limit:
        return None
    largest = max(sizes, key=lambda path: sizes[path])
    spec = dict(leaves(recipe.parameters))[largest]
    less = "use more or larger devices"
    rows = spec.shape[spec.axes.index("row")] if "row" in spec.axes else 0
    field = next((name for name, value in fields.items() if value == rows), None)
    if rows and field:
        parts = 2
        while rows % (2 * parts) == 0 and state - sizes[largest] * (1 - 1 / parts) > limit / 2:
            parts *= 2
        less += f", or --set {field}={rows // parts}, which is another model"
    return (
        f"recipe {recipe.name} keeps {state / 1e9:.1f} GB of parameters and optimizer state on a"
        f" device and there are {limit / 1e9:.1f} GB; the largest parameter is {largest},"
        f" {sizes[largest] / 1e9:.1f} GB; {less}"
    )


def memory_notes(
    stage: Stage, micro_tokens: int, head_chunk: int | None, remat: bool
) -> Iterator[str]:
    """Yield a note on each setting that makes a step of ``stage`` fit; none if a device takes whole
    lanes and all of their logits at once."""
    same = ": the same training in less memory"
    if micro_tokens < (lane := stage.lane_len):
        sub_lanes = lane // micro_tokens
        longest = f"sub-lanes of at most {sub_lane_length(stage, sub_lanes):,}, one at a time{same}"
        yield f"a lane of {lane:,} tokens is cut at document borders into {sub_lanes} {longest}"
    if head_chunk:
        yield f"the head's loss is computed from logits of {head_chunk:,} tokens at a time{same}"
    if remat:
        yield f"layers are recomputed for their gradients instead of stored{same}"
