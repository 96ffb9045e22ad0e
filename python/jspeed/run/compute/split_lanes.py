"""Split lanes (rows of packed documents) at document borders where a device cannot hold one; the batch is the same."""

import jax
import jax.numpy as jnp

from jspeed.recipe import Recipe, Stage

MOST = 32  # pieces of a lane
MARGIN = 8  # tokens on either side of a piece, which primitives see: model/ngrams.py looks back order - 1
TILE = 128  # lengths of pieces are a multiple of it in long lanes whose own length is


def numbers_of_pieces(recipe: Recipe, stage: Stage) -> list[int]:
    """Numbers of pieces into which a lane may be cut, each making them shorter; none where documents have no bound."""
    if recipe.data.align != "bos" or not stage.max_doc_len or not stage.max_docs:
        return []
    found, longest = [], stage.lane_len
    for pieces in (2**n for n in range(1, MOST.bit_length())):
        if stage.lane_len % pieces == 0 and piece_length(stage, pieces) < longest:
            found.append(pieces)
            longest = piece_length(stage, pieces)
    return found


def piece_length(stage: Stage, pieces: int) -> int:
    """Tokens of a piece: its share of the lane, one document more, and the margins; at most the lane."""
    tile = 1 if stage.lane_len % TILE or stage.lane_len < 16 * TILE else TILE
    needed = -(-stage.lane_len // pieces) + (stage.max_doc_len or 0) + 2 * MARGIN
    return min(stage.lane_len, -(-needed // tile) * tile)


def cut(recipe: Recipe, stage: Stage, pieces: int, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cut rows ``[B, T + 1]`` into ``[B x pieces, P + 1]``; also return the mask of the tokens that each piece
    scores, fp32 ``[B x pieces, P]``.

    The n-th piece begins with the last document that starts at or before n / ``pieces`` of the lane, and every token
    is scored in one piece: 1, or 0. A lane with a document longer than ``stage.max_doc_len``, which the loader never
    gives, has NaN instead, so that a lost token shows in the loss.
    """
    length, rows = piece_length(stage, pieces), tokens.shape[0]
    lane = tokens.shape[1] - 1
    position_T = jnp.arange(lane, dtype=jnp.int32)
    last_BT = jax.lax.cummax(jnp.where(tokens[:, :lane] == recipe.data.bos_id, position_T[None], 0), axis=1)
    inner_BN = last_BT[:, jnp.array([n * lane // pieces for n in range(1, pieces)])]
    start_BN = jnp.concatenate([jnp.zeros((rows, 1), jnp.int32), inner_BN], axis=1)
    stop_BN = jnp.concatenate([inner_BN, jnp.full((rows, 1), lane, jnp.int32)], axis=1)
    first_BN = jnp.clip(start_BN - MARGIN, 0, lane - length)

    def slices(row: jax.Array, firsts_N: jax.Array) -> jax.Array:
        return jax.vmap(lambda first: jax.lax.dynamic_slice_in_dim(row, first, length + 1))(firsts_N)

    cut_BNP = jax.vmap(slices)(tokens, first_BN)
    position_BNP = first_BN[..., None] + jnp.arange(length, dtype=jnp.int32)[None, None]
    counts_BNP = ((position_BNP >= start_BN[..., None]) & (position_BNP < stop_BN[..., None])).astype(jnp.float32)
    fits_BN = stop_BN <= first_BN + length
    counts_BNP *= jnp.where(fits_BN, 1.0, jnp.nan)[..., None]
    return cut_BNP.reshape(rows * pieces, length + 1), counts_BNP.reshape(rows * pieces, length)
