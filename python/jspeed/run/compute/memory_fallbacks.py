"""Settings tried, in order, until a step fits in device memory: smaller micro-batches, chunked head
loss, split lanes, remat. A lane is a row of a batch: documents packed one after another."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jspeed.recipe import Recipe, Stage, leaves
from jspeed.record.sizes import scored_heads
from jspeed.run.compute.division import divisions, lanes_of_device, piece_length

# tokens: 0.8 GB of logits and gradients in bf16 for GPT-2's vocabulary; need not divide a row
HEAD_CHUNK = 4096


class Attempt(NamedTuple):
    """A step over ``parts`` micro-batches and the bytes of a device that it needs; ``step`` is None
    if the compiler refused it. The head's loss takes ``head_chunk`` tokens of a row at a time;
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

    One that does not fit in ``limit`` bytes is followed by the same with the head's loss in chunks,
    unless they free too little (:func:`bytes_freed_by_chunks`) or the recipe's loss takes none, so
    that the program would be the same. For the smallest micro-batch layers are recomputed then:
    more expensive than pieces, so it comes last.
    """

    def attempt(
        parts: int, head_chunk: int | None, remat: bool, lowered: jax.stages.Lowered
    ) -> Attempt:
        need, step = measure(lowered)
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
    taken at once, of which fewer need less at no cost, where a row is no longer than a chunk, and
    in a pipeline.
    """
    lanes = lanes_of_device(recipe, stage, mesh)
    if parts < lanes or mesh.shape.get("pipe", 1) > 1:
        return 0
    logits = [rows * size for rows, size in scored_heads(recipe, stage)]
    return 2 * max(0, piece_length(stage, parts // lanes) - HEAD_CHUNK) * max(logits, default=0)


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
    if micro_tokens < (lane := stage.lane_len):
        pieces = lane // micro_tokens
        longest = f"pieces of at most {piece_length(stage, pieces):,}, one at a time"
        yield f"a lane of {lane:,} tokens is cut at document borders into {pieces} {longest}"
    if head_chunk:
        yield (
            f"the head's loss is computed in chunks, from logits of {head_chunk:,} tokens at a time"
        )
    if remat:
        yield "layers are recomputed for their gradients instead of stored"
