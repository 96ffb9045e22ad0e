"""What a recipe asks of the index of earlier steps: the value of its field ``beside``. Imports no
jax."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from jspeed.data import TokenLoader
from jspeed.fields import Count, integer, misfits
from jspeed.retrieval.retriever import Retriever
from jspeed.retrieval.rows import Matches


@dataclass(frozen=True)
class Retrieval:
    """A recipe's ``beside``: it is told which tokens followed the context up to each position, in
    the documents that this run has trained on so far.

    The longest context of ``lengths`` (tokens, ascending) that occurred counts, by its ``recent``
    last occurrences; of the tokens that followed, the ``top`` most frequent are told.
    """

    lengths: tuple[Annotated[int, integer(1, 255)], ...] = (6, 10, 20)
    name: ClassVar[str] = "retrieval"
    recent: Annotated[int, integer(1, 255)] = 96
    top: Count = 4

    @property
    def words(self) -> int:
        """How many numbers a position is told: :class:`Matches`, one after the other."""
        return 2 * self.top + 2

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the fields."""
        for where, expected, found in misfits(self, Retrieval, "retrieval"):
            yield f"{where} is {found}; expected {expected}"
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            yield (
                f"retrieval looks for contexts of {self.lengths} tokens; give at least one length,"
                " ascending"
            )
        if self.top > self.recent:
            yield (
                f"retrieval tells {self.top} tokens of {self.recent} occurrences; give at most as"
                " many"
            )

    def unpack(self, words_BTW: Any) -> Matches:
        """Return what is told of positions, of their numbers (NumPy's or JAX's)."""
        top = self.top
        tokens_BTK, counts_BTK = words_BTW[..., :top], words_BTW[..., top : 2 * top]
        return Matches(tokens_BTK, counts_BTK, words_BTW[..., -2], words_BTW[..., -1])

    def open(self, loader: TokenLoader, recipe: Any, steps: int | None, lanes: slice) -> Retriever:
        """Return the stream of ``loader``, all lanes, with an index that has room for ``steps`` of
        ``recipe``, or for all; ``lanes`` are those of this process.

        Raises BadInput where there is no memory for it."""
        lengths = [stage.lane_len for stage in recipe.stages for _ in range(stage.steps)]
        return Retriever(
            loader,
            lengths=self.lengths,
            recent=self.recent,
            top=self.top,
            capacity=recipe.lanes * sum(length + 1 for length in lengths[:steps]),
            bos_id=recipe.data.bos_id,
            dtype=recipe.data.dtype,
            lanes=lanes,
        )

    def warning(self, recipe: Any, tokens: int) -> str | None:
        """Say so where a run reads its ``tokens`` more than once."""
        if tokens >= recipe.tokens:
            return None
        return "text is read more than once, whose index knows what comes next: take fewer steps"
