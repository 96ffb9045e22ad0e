"""The division of a global batch over devices, into micro-batches, and of lanes (rows of packed
documents) into pieces.

Where a device cannot hold a lane it is cut at document borders; the batch stays the same.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jspeed.errors import BadInput
from jspeed.parallel.layout import check_layout
from jspeed.parallel.mesh import row_shards
from jspeed.recipe import Recipe, Stage
from jspeed.run.compute.device import Device, Placement

MOST = 32  # pieces of a lane
# tokens on either side of a piece, which primitives see: model/ngrams.py looks back order - 1
MARGIN = 8
TILE = 128  # lengths of pieces are a multiple of it in long lanes whose own length is


def place(
    recipe: Recipe, mesh: Mesh, layout: str, device: Device, micro_batch: int | None = None
) -> Placement:
    """Return the placement of the programs of ``recipe``; ``micro_batch``: tokens that a device
    takes at once.

    Raises :class:`BadInput` for a layout that the mesh does not fit, and a batch or micro-batch
    that does not divide.
    """
    check_layout(layout, mesh, recipe)
    numbers = tuple(
        micro_batches(recipe, stage, mesh, device, micro_batch) for stage in recipe.stages
    )
    return Placement(mesh, layout, device, micro_batches=numbers)


def lanes_of_device(recipe: Recipe, stage: Stage, mesh: Mesh) -> int:
    """Return the lanes of one device. Raises :class:`BadInput` when the lanes cannot be divided
    over the devices."""
    devices = row_shards(mesh)
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

    Up to one lane each, then, where documents have a bound and there is no pipeline, pieces of a
    lane.
    """
    lanes = lanes_of_device(recipe, stage, mesh)
    whole = [parts for parts in range(1, lanes + 1) if lanes % parts == 0]
    if mesh.shape.get("pipe", 1) > 1:
        return whole
    return whole + [lanes * pieces for pieces in numbers_of_pieces(recipe, stage)]


def micro_batches(
    recipe: Recipe, stage: Stage, mesh: Mesh, device: Device, micro_batch: int | None
) -> tuple[int, ...]:
    """Return the numbers of micro-batches of a device that a step is tried with, fewest first.

    With ``micro_batch``, the tokens that a device takes at once, it is one number. Without, a
    device first takes as many whole lanes as ``device.micro_batch`` tokens hold, with at least one
    micro-batch per pipeline stage. Raises :class:`BadInput` with the numbers when the batch does
    not divide.
    """
    choices = divisions(recipe, stage, mesh)
    lanes = lanes_of_device(recipe, stage, mesh)
    if micro_batch is None:
        most = max(1, min(lanes // mesh.shape.get("pipe", 1), device.micro_batch // stage.lane_len))
        return tuple(parts for parts in choices if lanes // parts <= most)
    own = lanes * stage.lane_len
    if micro_batch < 1 or own % micro_batch or own // micro_batch not in choices:
        sizes = ", ".join(str(own // parts) for parts in reversed(choices) if own % parts == 0)
        raise BadInput(
            f"--micro-batch {micro_batch}: the global batch of {recipe.tokens_per_step(stage)}"
            f" tokens ({recipe.lanes} lanes of {stage.lane_len}) is not a multiple of"
            f" {mesh.shape['data']} devices x {micro_batch} tokens in whole lanes, or in pieces"
            f" that document borders allow; give one of {sizes}"
        )
    return (own // micro_batch,)


def numbers_of_pieces(recipe: Recipe, stage: Stage) -> list[int]:
    """Numbers of pieces into which a lane may be cut, each making them shorter; none where
    documents have no bound, or tokens have matches beside them."""
    if (
        recipe.retrieval
        or recipe.data.align != "bos"
        or not stage.max_doc_len
        or not stage.max_docs
    ):
        return []
    numbers, longest = [], stage.lane_len
    for pieces in (2**n for n in range(1, MOST.bit_length())):
        if stage.lane_len % pieces == 0 and piece_length(stage, pieces) < longest:
            numbers.append(pieces)
            longest = piece_length(stage, pieces)
    return numbers


def piece_length(stage: Stage, pieces: int) -> int:
    """Tokens of a piece: its share of the lane, one document more, and the margins; at most the
    lane."""
    tile = 1 if stage.lane_len % TILE or stage.lane_len < 16 * TILE else TILE
    needed = -(-stage.lane_len // pieces) + (stage.max_doc_len or 0) + 2 * MARGIN
    return min(stage.lane_len, -(-needed // tile) * tile)


def cut(
    recipe: Recipe, stage: Stage, pieces: int, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cut rows ``[B, T + 1]`` into ``[B x pieces, P + 1]``; also return the mask of the tokens that
    each piece scores, fp32 ``[B x pieces, P]``.

    The n-th piece begins with the last document that starts at or before n / ``pieces`` of the
    lane, and every token is scored in one piece: 1, or 0. A lane with a document longer than
    ``stage.max_doc_len``, which the loader never gives, has NaN instead, so that a lost token shows
    in the loss.
    """
    length, rows = piece_length(stage, pieces), tokens.shape[0]
    lane = tokens.shape[1] - 1
    position_T = jnp.arange(lane, dtype=jnp.int32)
    last_BT = jax.lax.cummax(
        jnp.where(tokens[:, :lane] == recipe.data.bos_id, position_T[None], 0), axis=1
    )
    inner_BN = last_BT[:, jnp.array([n * lane // pieces for n in range(1, pieces)])]
    start_BN = jnp.concatenate([jnp.zeros((rows, 1), jnp.int32), inner_BN], axis=1)
    stop_BN = jnp.concatenate([inner_BN, jnp.full((rows, 1), lane, jnp.int32)], axis=1)
    first_BN = jnp.clip(start_BN - MARGIN, 0, lane - length)

    def slices(row: jax.Array, firsts_N: jax.Array) -> jax.Array:
        return jax.vmap(lambda first: jax.lax.dynamic_slice_in_dim(row, first, length + 1))(
            firsts_N
        )

    cut_BNP = jax.vmap(slices)(tokens, first_BN)
    position_BNP = first_BN[..., None] + jnp.arange(length, dtype=jnp.int32)[None, None]
    counts_BNP = (
        (position_BNP >= start_BN[..., None]) & (position_BNP < stop_BN[..., None])
    ).astype(jnp.float32)
    fits_BN = stop_BN <= first_BN + length
    counts_BNP *= jnp.where(fits_BN, 1.0, jnp.nan)[..., None]
    return cut_BNP.reshape(rows * pieces, length + 1), counts_BNP.reshape(rows * pieces, length)
