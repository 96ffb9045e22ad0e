"""Tokens that cost a step what text does: ids as often as words (Zipf's law), in documents as long
as FineWeb's.

Uniform ids would be another program's work. A lane of 49,152 of them has 31,000 different targets,
more than recipes that score a part of the vocabulary have room for, so that loss and gradients are
NaN; and no two tokens would add to the same row of a table, the best case of every scatter.
"""

import math

import numpy as np

from jspeed.recipe import Recipe, Stage, leaves

# Zipf-Mandelbrot: the token of rank r is drawn in proportion to (r + SHIFT)^-EXPONENT. A lane of
# 16,384 then has at most 5,500 different tokens, one of 49,152 at most 12,000.
EXPONENT, SHIFT = 1.07, 2.7
# FineWeb's documents are log-normal: median and mean in tokens, and no shorter than SHORTEST.
MEDIAN, MEAN, SHORTEST = 403, 690, 32


def lanes_of(recipe: Recipe, stage: Stage, seed: int = 0) -> np.ndarray:
    """Return tokens [lanes, lane_len + 1] of the recipe's dtype; a document starts each lane."""
    rng = np.random.default_rng(seed)
    data = recipe.data
    shape = recipe.lanes, stage.lane_len + 1
    tokens = zipf_ids(rng, vocabulary(recipe), shape, data.bos_id).astype(data.dtype)
    for lane in tokens:
        starts = document_starts(rng, stage.lane_len, stage.max_doc_len)[: stage.max_docs]
        lane[starts] = data.bos_id
    return tokens


def zipf_ids(
    rng: np.random.Generator, vocab: int, shape: tuple[int, ...], bos_id: int | None = None
) -> np.ndarray:
    """Draw ids below ``vocab``, int64 of ``shape``; frequent ones are spread over all of them, and
    none is ``bos_id``."""
    chances = np.cumsum((np.arange(1, vocab + 1) + SHIFT) ** -EXPONENT)
    by_rank = np.random.default_rng(0).permutation(vocab)
    ids = by_rank[np.searchsorted(chances, chances[-1] * rng.random(shape), side="right")]
    if bos_id is not None:
        ids[ids == bos_id] = (bos_id + 1) % vocab
    return ids


def document_starts(rng: np.random.Generator, length: int, longest: int | None) -> np.ndarray:
    """Return where documents of a lane of ``length`` tokens start, int64; none has more than
    ``longest`` tokens."""
    sigma = math.sqrt(2 * math.log(MEAN / MEDIAN))
    drawn = rng.lognormal(math.log(MEDIAN), sigma, length // SHORTEST + 1)
    lengths = np.clip(drawn, SHORTEST, longest).astype(int)
    starts = np.append(0, np.cumsum(lengths))
    return starts[starts < length]


def vocabulary(recipe: Recipe) -> int:
    """Return how many ids both the recipe's data and its tables have."""
    sizes = [
        spec.shape[spec.axes.index(axis)]
        for _, spec in leaves(recipe.parameters)
        for axis in ("token", "vocab")
        if axis in spec.axes
    ]
    return min(recipe.data.vocab_size, *sizes)
