"""Numbers beside the tokens of a lane: what a recipe may ask for, and the loader that gives them.

A lane of a batch is then its tokens, and behind them what is known of each input: one array, whose
lanes are divided over devices and micro-batches as ever. Imports no jax.
"""

import sys
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray


@runtime_checkable
class Knowing(Protocol):
    """A loader that knows something of tokens, from the batches that it has handed out."""

    def looked_up(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """Return lanes of ``tokens`` (ids ``[B, T + 1]``) with what is known of them so far."""
        ...

    def wait(self) -> None:
        """Wait until it knows the batches that were handed out."""
        ...

    def read(self, steps: int) -> None:
        """Read so many batches for what they tell alone, before the first one is handed out."""
        ...

    def section(self) -> dict[str, Any]:
        """Return what run.json says of it."""
        ...

    def opening(self) -> tuple[str, str, str]:
        """Return what a run says of it at its start: a word, what it is, its size."""
        ...


class Beside(Protocol):
    """A recipe's field ``beside``: what its lanes carry. ``name`` is that of its section in
    run.json."""

    name: str

    @property
    def words(self) -> int:
        """How many numbers a position has."""
        ...

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with it."""
        ...

    def unpack(self, words_BTW: Any) -> Any:
        """Return what ``Context.beside`` is, of the numbers of each position (NumPy's or JAX's)."""
        ...

    def open(self, loader: Any, recipe: Any, steps: int | None, lanes: slice) -> Any:
        """Return a :class:`Knowing` loader of the same batches for ``steps`` of ``recipe`` (None:
        all). ``loader`` gives all lanes; ``lanes`` are those of this process."""
        ...

    def warning(self, recipe: Any, tokens: int) -> str | None:
        """Return what to say of a run that trains on ``tokens``."""
        ...


def defined_as(beside: Beside) -> str | None:
    """Return where the class of ``beside`` is defined, as ``module.Class``; None where no module
    that was imported has it, as that of a recipe's own file."""
    kind = type(beside)
    module = sys.modules.get(kind.__module__)
    if getattr(module, kind.__name__, None) is not kind:
        return None
    return f"{kind.__module__}.{kind.__name__}"


def split(beside: Beside | None, lanes: Any) -> tuple[Any, Any]:
    """Return the tokens ``[B, T + 1]`` of ``lanes`` (NumPy's or JAX's), and what is beside them;
    None where a recipe asks for nothing."""
    if beside is None:
        return lanes, None
    length = (lanes.shape[1] - 1) // (1 + beside.words)
    words_BTW = lanes[:, length + 1 :].reshape(lanes.shape[0], length, beside.words)
    return lanes[:, : length + 1], beside.unpack(words_BTW)


def looked_up(loader: Any, tokens: NDArray[Any]) -> NDArray[Any]:
    """Return ``tokens`` (ids ``[B, T + 1]``) with what a :class:`Knowing` loader says of them; of
    another loader as they are."""
    return loader.looked_up(tokens) if isinstance(loader, Knowing) else tokens
