"""The Rust token loader: shards in, batches out. A lane is one row of a batch, packed documents or
a window."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self, final

import numpy as np
from numpy.typing import NDArray

from jspeed.data.shuffle import Shuffle

__all__ = [
    "HEADER_BYTES",
    "Batch",
    "ContextIndex",
    "Matches",
    "RowPart",
    "RowTable",
    "Shards",
    "TokenLoader",
    "available_memory",
    "canonical_mask",
    "header",
]

HEADER_BYTES: Final[int]
"""Size of a shard's header: its tokens begin there."""

def header(tokens: int, wide: bool = False) -> bytes:
    """Return the header of a shard with so many uint16 tokens, or uint32 ones if ``wide``."""

def available_memory() -> int | None:
    """Return the bytes of memory that this process may still use: what Linux calls available, and
    no more than its control groups (version 2) have left; None on other systems."""

def canonical_mask(tokens: Sequence[bytes], size: int) -> NDArray[np.uint8]:
    """Return which token can never be directly after which other one in what GPT-2's tokenizer
    writes.

    Bit x of row p, uint8 ``[size, size / 8]``, the least significant bit first, is set where token
    x never follows token p, whatever surrounds them: encoding their text would merge across the
    border between them, or between parts of them. ``tokens`` are byte pairs by id, in the order of
    their merges; an empty one stands for a special token, which anything can follow and which can
    follow anything, as ids from ``len(tokens)`` on can. As in record 91, a token that ends inside a
    character is taken for one that the pretokenizer does not cut after; after rare spaces and signs
    it may.

    Raises:
        BadInput: ``size`` is not a multiple of 8, below the number of tokens or more than memory
            allows, or a token is not made of two earlier ones.
    """

_Tokens = NDArray[np.uint16] | NDArray[np.uint32]

class _Stage(Protocol):
    @property
    def steps(self) -> int: ...
    @property
    def lane_len(self) -> int: ...
    @property
    def max_doc_len(self) -> int | None: ...
    @property
    def max_docs(self) -> int | None: ...

@final
class Shards:
    """Validated token shards, sorted by file name; make them with
    :func:`jspeed.data.open_shards`."""

    def __new__(cls, paths: Sequence[str | PathLike[str]]) -> Self: ...
    def __len__(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
    @property
    def fingerprint(self) -> str:
        """Hexadecimal hash of every shard's file name, size and header; the folder does not
        matter."""
    @property
    def paths(self) -> list[Path]:
        """The files, in stream order."""
    @property
    def dtype(self) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
        """How tokens are stored: uint16 or uint32."""

@final
class Batch:
    """The lanes of this process in one step; its arrays are read-only and stay valid while they are
    kept."""

    @property
    def tokens(self) -> _Tokens:
        """(local_lanes, lane_len + 1), uint16 or uint32 as stored, C-contiguous, aligned to 64
        bytes."""
    @property
    def inputs(self) -> _Tokens:
        """(local_lanes, lane_len), a view of ``tokens[:, :-1]``."""
    @property
    def targets(self) -> _Tokens:
        """(local_lanes, lane_len), a view of ``tokens[:, 1:]``: the token after each input."""
    @property
    def doc_offsets(self) -> NDArray[np.int32] | None:
        """(local_lanes, max_docs + 1) int32: where each document starts, then ``lane_len`` to the
        end.

        Starts with 0 and strictly increases up to index ``num_docs``. None when ``max_docs`` was
        not given.
        """
    @property
    def num_docs(self) -> NDArray[np.int32] | None:
        """(local_lanes,) int32: documents in each lane. None when ``max_docs`` was not given."""
    @property
    def step(self) -> int:
        """Index of this batch in the stream, from 0."""
    @property
    def epoch(self) -> int:
        """Pass over the data, from 0."""
    @property
    def dropped_tokens(self) -> int:
        """Tokens that were passed over since the batch before and that no lane of any process
        holds."""

@final
class TokenLoader:
    """An iterator of batches, made ahead by one thread. All methods may be called from any thread.

    The stream depends on the shards, ``lanes``, ``align``, ``bos_id``, the stages and ``shuffle``,
    and on nothing else: process ``p`` of ``P`` gets lanes ``[p * lanes / P, (p + 1) * lanes / P)``
    of the same global batches.

    Args:
        shards: What :func:`jspeed.data.open_shards` returned.
        lanes: Lanes of the global batch; a multiple of ``process_count``.
        lane_len: Inputs of a lane in tokens; 16384 when neither it nor a schedule is given.
        align: ``"bos"`` follows modded-nanogpt: a lane is packed with documents, each from its
            ``bos_id`` and cut after ``max_doc_len`` tokens or at the end of the lane, and the
            cut-off part is dropped; a batch that a shard cannot complete is dropped with the rest
            of the shard. None: lanes are consecutive windows of ``lane_len`` tokens and one more,
            which the next window starts with.
        max_doc_len: Longest document in tokens, for ``align="bos"``; None never cuts.
        max_docs: Size of the table of document offsets; None makes no table.
        bos_id: The token that starts a document; by default GPT-2's <|endoftext|>.
        schedule: Stages with ``steps``, ``lane_len``, ``max_doc_len`` and ``max_docs``, in place of
            the arguments of those names; the stream ends after the last stage.
        process_index: Which process this is, from 0.
        process_count: How many processes share the global batch.
        shuffle: Take blocks or windows in a seeded random order.
        epochs: Passes over the data, after which the stream ends; None for no end.
        vocab_size: Ids at or above it raise :class:`TokenRangeError`; None checks nothing.
        prefetch: Batches made ahead by the thread, by default one in use and one ready; 0 makes
            each when it is asked for. A consumer that does nothing between small batches, of
            256 KiB or less, is given up to eight times as many at once.
        backend: ``"mmap"`` maps at most two shards. On Linux a shard that another process truncates
            meanwhile raises ShardTruncatedError, by a handler of SIGBUS that leaves every other
            fault to the handler before it. Elsewhere, and once another handler was put over it,
            shards are read. ``"pread"`` reads always.

    Raises:
        BadInput: Arguments that contradict each other or do not fit the shards.
    """

    def __new__(
        cls,
        shards: Shards,
        *,
        lanes: int = 8,
        lane_len: int | None = None,
        align: Literal["bos"] | None = None,
        max_doc_len: int | None = None,
        max_docs: int | None = None,
        bos_id: int = 50_256,
        schedule: Sequence[_Stage] | None = None,
        process_index: int = 0,
        process_count: int = 1,
        shuffle: Shuffle | None = None,
        epochs: int | None = 1,
        vocab_size: int | None = None,
        prefetch: int = 2,
        backend: Literal["mmap", "pread"] = "mmap",
    ) -> Self: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            StopIteration: The epochs or the schedule are over, on every process at the same step.
            ShardTruncatedError: A shard shrank or was written to while it was read.
            ShardError: A shard cannot be read.
            TokenRangeError: A lane of this process holds an id outside the vocabulary.
            DocOverflowError: A lane has more documents than ``max_docs``; without ``align="bos"``
                only the process that owns the lane notices.
            LoaderForkedError: This process is a fork of the one that made the loader.
            BadInput: No batch fits into any shard or into memory, or the loader is closed.
        """
    def start(self) -> None:
        """Begin to make batches now, for instance before compiling, rather than at the first
        ``next``."""
    def state_dict(self) -> dict[str, int | str]:
        """Return where the stream stands after the batches delivered so far; the same on all
        processes.

        The values are integers and strings, ready for JSON.
        """
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches of ``state``.

        Process count and index, prefetch, backend, epochs, max_docs and vocab_size may
        differ from when it was saved.

        Raises:
            StateMismatchError: The state belongs to other data or settings; its text names the
                field.
        """
    def stats(self) -> dict[str, float]:
        """Return counters over the batches delivered so far.

        ``batches``; ``bytes_read`` from shards by this process; ``wait_seconds`` in ``next`` in
        total, ``wait_max`` of a batch, and ``wait_p50`` and ``wait_p99`` of one of the last 4096,
        in seconds; ``queue_empty``, how often no batch was ready; ``shard_switches``;
        ``dropped_tokens``, as in Batch.
        """
    def close(self) -> None:
        """Stop the thread and wait for its end; batches already delivered stay valid."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class Matches:
    """What :meth:`ContextIndex.query` found for each position of its rows; read-only arrays."""

    @property
    def lengths(self) -> NDArray[np.uint8]:
        """(rows, tokens): length of the longest context that occurred earlier, in tokens; 0 where
        none did."""
    @property
    def occurrences(self) -> NDArray[np.uint8]:
        """(rows, tokens): how often it did; ``recent`` stands for that or more."""
    @property
    def tokens(self) -> NDArray[np.uint32]:
        """(rows, tokens, top): what followed its latest ``recent`` occurrences, each token once.

        The most frequent comes first, of equally frequent ones the latest; 0 where there are fewer.
        """
    @property
    def counts(self) -> NDArray[np.uint8]:
        """(rows, tokens, top): how often each of ``tokens`` followed; 0 where there are fewer."""

@final
class ContextIndex:
    """What followed this context earlier: an index of the documents of the steps so far.

    A context is the last tokens of a document up to a position; it never reaches into the document
    before, which ends where ``bos_id`` or a row of the batch begins, and what followed it is in the
    same document too. Answers are exact: contexts are compared token by token. They do not depend
    on the number of threads.

    The index holds what was pushed and nothing else, and says so: ``push`` and ``query`` name the
    step that they belong to, and fail unless exactly the steps before it were pushed. So a step
    sees earlier steps only, and a validation between steps sees all trained tokens when its rows
    are queried and never pushed:

        index = ContextIndex(capacity=steps * tokens_a_step)
        for batch in loader:
            found = index.query(batch.step, batch.tokens[:, :-1])
            index.push(batch.step, batch.tokens)

    Where each of several processes has some of the lanes, each of their indices knows the documents
    of those alone. A run that resumes pushes the earlier batches again.

    Args:
        capacity: Tokens of all rows that are ever pushed. All memory is taken at once: 4 bytes a
            token, and 20 more for each length, for three lengths and 330 million tokens 21.1 GB.
        lengths: Tokens of the contexts to look for, each from 1 to 255; the longest that occurred
            is the one told.
        recent: How many occurrences of a context count, the latest ones; at most 255.
        top: How many different next tokens are told, at most ``recent``.
        bos_id: The token that starts a document; by default GPT-2's <|endoftext|>.
        threads: Threads of a call; None for as many as this process may use cores.

    Raises:
        BadInput: An argument is out of its range, or the memory is more than the machine has.
    """

    def __new__(
        cls,
        capacity: int,
        *,
        lengths: Sequence[int] = (6, 10, 20),
        recent: int = 96,
        top: int = 8,
        bos_id: int = 50_256,
        threads: int | None = None,
    ) -> Self: ...
    def push(self, step: int, rows: _Tokens) -> None:
        """Add the documents of a step: ``rows`` (rows, tokens) uint16 or uint32, with each row's
        last target.

        Other Python threads run meanwhile; queries of theirs wait. Until it returns it takes some
        100 bytes more for each token of the step.

        Raises:
            BadInput: ``step`` is not ``steps``, the rows do not fit into ``capacity``, or are no
                such array; then nothing has changed.
            LoaderForkedError: This process is a fork of the one that made the index.
        """
    def query(self, step: int, rows: _Tokens) -> Matches:
        """Look up the context up to and including each token of ``rows`` (rows, tokens) in the
        steps before ``step``.

        Other Python threads run meanwhile, and may query too.

        Raises:
            BadInput: ``step`` is not ``steps``, ``rows`` are no such array, or there is no memory
                for the answers.
            LoaderForkedError: As :meth:`push`.
        """
    @property
    def steps(self) -> int:
        """Steps that were pushed, which is the next one."""
    @property
    def num_tokens(self) -> int:
        """Tokens that were pushed."""
    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
    @property
    def nbytes(self) -> int:
        """Bytes of memory, however many tokens there are."""

@final
class RowPart:
    """Copies of some of a table's rows, as :meth:`RowTable.read` returns and
    :meth:`RowTable.append` takes them; read-only arrays."""

    @property
    def rows(self) -> NDArray[np.uint32]:
        """(rows,): their numbers."""
    @property
    def weights(self) -> NDArray[Any]:
        """(rows, width) bfloat16."""
    @property
    def squares(self) -> NDArray[np.float32]:
        """(rows,): each mean square after the row's last update."""
    @property
    def updates(self) -> NDArray[np.uint32]:
        """(rows,): how many updates the table had had after that one."""

@final
class RowTable:
    """A table of bf16 rows in the host's memory, updated row by row.

    Rows are zeros until an update names them. The rule is :func:`jspeed.optim.rows.row_adam`:
    Adam without momentum, with one mean square a row, which decays at every update. Gradients of
    equal rows are summed in fp32, in the order of the list, and the sum of each array of a list is
    rounded to its dtype, as a device rounds what it sends. Results do not depend on the number of
    threads.

    Memory follows the rows in use: ``2 width + 12`` bytes for each, and 4 bytes for each row of the
    table. A row moves to the next free place when it is first updated, so frequent rows lie
    together.

    All methods may be called from any thread, and other Python threads run meanwhile; ``update``
    and ``append`` wait until nobody reads. No other thread may write to an array that was given.

    Args:
        num_rows: Rows of the table, less than 2**32 - 1.
        width: Numbers of a row, at most 65,536.
        capacity: How many rows may ever be updated; None for all.
        threads: Threads of a call; None for as many as this process may use cores.

    Raises:
        BadInput: An argument is out of its range, or a full table needs more memory than the
            machine and the control groups of this process have left. Nothing is allocated then.
    """

    def __new__(
        cls,
        num_rows: int,
        width: int,
        *,
        capacity: int | None = None,
        threads: int | None = None,
    ) -> Self: ...
    def gather(
        self, rows: NDArray[np.integer[Any]], out: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """Copy ``rows`` (int32, int64 or uint32 ``[n]``) into ``out`` and return it; it stays as it
        is at the place of a row of -1.

        ``out`` is bfloat16 ``[n, width]``, contiguous; None makes one that begins on a cache line.
        Give the same one again: fresh memory costs more than the copy.

        Raises:
            BadInput: A row is not in the table, or is -1 and ``out`` was not given, or an array is
                none of these; ``out`` is unchanged.
            LoaderForkedError: This process is a fork of the one that made the table.
        """
    def update(
        self,
        step: int,
        rows: NDArray[np.integer[Any]],
        gradients: NDArray[Any] | list[NDArray[Any]],
        *,
        learning_rate: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ) -> None:
        """Change ``rows`` (``[n]``, some of them equal) by ``gradients``, bfloat16 or float32 ``[n,
        width]``, or a list of such arrays, one after the other, that are ``n`` rows together.

        A row of -1 is left out, and its gradient is not read. ``step`` is the number of updates so
        far; or one less, for rows that the last update has left out: two calls that have all
        gradients of each row in one of them are one update. The rates are those of this update, as
        ``row_adam``'s schedules return them.

        Raises:
            BadInput: A row is not in the table or had this update before, an array or a rate is
                none of these, ``step`` is another one, or more rows than ``capacity`` would be in
                use; then nothing has changed. Or a gradient is not finite; then all other rows
                have changed.
            LoaderForkedError: As :meth:`gather`.
        """
    def read(self, first: int, count: int) -> RowPart:
        """Return copies of ``count`` rows in use, or as many as there are, from the ``first`` on.

        They are in the order in which they came into use.
        """
    def append(
        self,
        rows: NDArray[np.integer[Any]],
        weights: NDArray[Any],
        squares: NDArray[np.float32],
        updates: NDArray[np.uint32],
    ) -> None:
        """Add rows of another table, as :meth:`read` returned them, after :meth:`resume`.

        Raises:
            BadInput: A row is in use already or not in the table, the arrays do not fit, a row is
                newer than the table, or there is no room; then nothing has changed.
        """
    def resume(self, betas: Sequence[float] | NDArray[np.float32]) -> None:
        """Go on after updates that had these ``betas``, in a table that has had none.

        Raises:
            BadInput: The table has had updates, or a beta is not between 0 and 1.
        """
    @property
    def betas(self) -> NDArray[np.float32]:
        """(updates,): the ``beta2`` of each update."""
    @property
    def num_rows(self) -> int:
        """Rows of the table."""
    @property
    def width(self) -> int:
        """Numbers of a row."""
    @property
    def capacity(self) -> int:
        """How many rows may be in use."""
    @property
    def used(self) -> int:
        """How many rows are in use."""
    @property
    def updates(self) -> int:
        """How many updates there were."""
    @property
    def nbytes(self) -> int:
        """Bytes of the rows in use and of the numbers of all rows."""
