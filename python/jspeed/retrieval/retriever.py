"""Batches with an n-gram look-up over the steps before, made while
devices compute."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from jspeed._dataloader import Batch, ContextIndex
from jspeed.data import TokenLoader
from jspeed.retrieval.rows import Matches, packed


class Rows(NamedTuple):
    """A batch as the devices get it: ``tokens`` are rows that :func:`jspeed.retrieval.rows.packed`
    made."""

    tokens: NDArray[Any]


class Retriever:
    """A loader of the same batches, each row with its matches in the steps before.

    One thread works a step ahead: once batch s is handed out it adds all tokens of s to the index,
    and looks up those of s + 1. So an evaluation after step s sees the tokens of all steps so far,
    and of none that comes.

    ``loader`` gives all lanes, on each of several processes, because each has an index of its own;
    ``lanes`` are those of this process. ``capacity`` is the tokens of all rows of the run.

    Raises :class:`BadInput` where the machine has not the memory
    (:class:`~jspeed.retrieval.ContextIndex`).
    """

    def __init__(
        self,
        loader: TokenLoader,
        *,
        lengths: tuple[int, ...],
        recent: int,
        top: int,
        capacity: int,
        bos_id: int,
        dtype: np.dtype[Any],
        lanes: slice,
    ) -> None:
        self._loader, self._dtype, self._lanes = loader, dtype, lanes
        self._asked: dict[str, Any] = {"lengths": list(lengths), "recent": recent, "top": top}
        self._index = ContextIndex(capacity, lengths=lengths, recent=recent, top=top, bos_id=bos_id)
        self._thread = ThreadPoolExecutor(1, "retriever")
        self._state = loader.state_dict()  # after the batches that were handed out
        self._coming: Future[tuple[Batch, Rows, dict[str, Any]] | None] | None = None

    def __next__(self) -> Rows:
        """Return the next batch; raises what :class:`~jspeed.data.TokenLoader` does."""
        coming = (self._coming or self._thread.submit(self._advance, None)).result()
        if coming is None:
            raise StopIteration
        batch, rows, self._state = coming
        self._coming = self._thread.submit(self._advance, batch)
        return rows

    def _advance(self, before: Batch | None) -> tuple[Batch, Rows, dict[str, Any]] | None:
        if before is not None:
            self._index.push(before.step, before.tokens)
        batch = next(self._loader, None)
        if batch is None:
            return None
        rows = self._looked_up(batch.tokens[self._lanes])
        return batch, Rows(rows), self._loader.state_dict()

    def _looked_up(self, tokens: NDArray[Any]) -> NDArray[Any]:
        found = self._index.query(self._index.steps, tokens[:, :-1])
        return packed(
            tokens,
            Matches(found.tokens, found.counts, found.lengths, found.occurrences),
            self._dtype,
        )

    def wait(self) -> None:
        """Wait until the index holds the batches that were handed out."""
        if self._coming:
            wait([self._coming])

    def looked_up(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """Return rows of ``tokens`` (ids ``[B, T + 1]``) with their matches in all steps so far;
        adds nothing."""
        self.wait()
        return self._looked_up(tokens)

    def section(self) -> dict[str, Any]:
        """Return what was asked, and the tokens of the batches that were handed out, all of them in
        the index."""
        self.wait()
        return self._asked | {"tokens": self._index.num_tokens}

    def opening(self) -> tuple[str, str, str]:
        """Return what a run says of the index: contexts, and bytes, empty or full."""
        lengths = ", ".join(map(str, self._asked["lengths"]))
        what = (
            f"index of what this run trains on, contexts of {lengths} tokens; memory of each"
            " process's host"
        )
        return "retrieval", what, f"{self._index.nbytes / 1e9:.1f} GB"

    def state_dict(self) -> dict[str, int | str]:
        """Return where the stream stands after the batches handed out so far."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches of ``state``, which are read again, for the index. Before the
        first batch.

        Raises StateMismatchError for a state of other data or settings.
        """
        start = self._loader.state_dict()
        self._loader.load_state_dict(state)
        self._loader.load_state_dict(start)
        self.read(int(state["step"]))

    def read(self, steps: int) -> None:
        """Read so many batches for the index alone, before the first one is handed out."""
        for _ in range(steps):
            batch = next(self._loader)
            self._index.push(batch.step, batch.tokens)
        self._state = self._loader.state_dict()

    def stats(self) -> dict[str, float]:
        """Return the loader's counters: of the thread's reads, one batch ahead."""
        return self._loader.stats()

    def close(self) -> None:
        """Stop the thread and close the loader."""
        self._thread.shutdown()
        self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        self.close()
