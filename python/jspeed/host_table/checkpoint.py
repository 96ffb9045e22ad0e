"""A table's rows in use as a safetensors file: written and read piece by piece, with hashes.

A table may be larger than what memory has left, so never more than a piece is copied.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jspeed._dataloader import RowTable
from jspeed.base.files import atomic_path
from jspeed.errors import BadInput

PIECE = 2**26  # bytes of weights that are in memory at a time
LARGEST_HEADER = 2**16  # bytes
# name: dtype there, dtype of NumPy
OF_ROWS = {
    "rows": ("U32", "<u4"),
    "weights": ("BF16", "<u2"),
    "squares": ("F32", "<f4"),
    "updates": ("U32", "<u4"),
}
OF_UPDATES = {"betas": ("F32", "<f4")}


def save(table: RowTable, path: Path, *, begin: int = 0, of: int | None = None) -> None:
    """Write ``table`` to ``path``, which has the old file or the new one, never a part.

    The table may be the rows from ``begin`` on ``of`` a larger one, None: a whole one.

    The file holds ``rows`` ``[n]``, ``weights`` ``[n, width]``, ``squares`` and ``updates`` ``[n]``
    of the rows in use, in the order in which they came. It holds ``betas`` ``[updates]`` too.

    Raises :class:`BadInput` where the file cannot be written, or another thread updated the table
    meanwhile.
    """
    updates, used = table.updates, table.used
    shapes = {name: [used] for name in OF_ROWS}
    shapes |= {"weights": [used, table.width], "betas": [updates]}
    digests = {name: hashlib.sha256() for name in shapes}
    metadata = {"num_rows": str(of or table.num_rows), "capacity": str(table.capacity)}
    metadata |= {"share": str(table.num_rows)}
    metadata |= {f"sha256 of {name}": each.hexdigest() for name, each in digests.items()}
    starts = _offsets(shapes, len(_header(shapes, metadata)))
    with atomic_path(path) as temporary, open(temporary, "wb") as file:

        def write(name: str, first: int, values: np.ndarray) -> None:
            content = np.ascontiguousarray(values).view(np.uint8).reshape(-1).data
            file.seek(starts[name] + first)
            file.write(content)
            digests[name].update(content)

        at = dict.fromkeys(OF_ROWS, 0)
        for first, count in _pieces(used, table.width):
            part = table.read(first, count)
            for name in OF_ROWS:
                values = getattr(part, name)
                if name == "rows":
                    values = values + np.uint32(begin)
                write(name, at[name], values)
                at[name] += values.nbytes
        write("betas", 0, table.betas)
        # hashes are as long as those of nothing, which held their place
        metadata |= {f"sha256 of {name}": each.hexdigest() for name, each in digests.items()}
        file.seek(0)
        file.write(_header(shapes, metadata))
        if table.updates != updates:
            raise BadInput(
                f"the table had update {table.updates} while it was saved after {updates}; save it"
                " between two updates"
            )


def load(path: Path, *, capacity: int | None = None, threads: int | None = None) -> RowTable:
    """Return the table that :func:`save` wrote to ``path``: the same bits from then on.

    ``capacity`` None is that of the table which was saved; ``threads`` as of :class:`RowTable`.

    Raises :class:`BadInput` for another file, one that is cut off or was changed, and where memory
    is too small.
    """
    try:
        with open(path, "rb") as file:
            shapes, metadata, _ = _read_header(file, path)
    except OSError as error:
        raise _unreadable(path, error) from None
    table = RowTable(
        int(metadata["num_rows"]),
        shapes["weights"][1],
        capacity=capacity or int(metadata["capacity"]),
        threads=threads,
    )
    load_share(table, [path])
    return table


def load_share(table: RowTable, paths: Sequence[Path], *, begin: int = 0) -> None:
    """Fill a new ``table``, the rows from ``begin`` on of a larger one, with those of them that
    ``paths`` hold: the shares of all processes. Raises :class:`BadInput` as :func:`load`, and where
    a share is missing."""
    rows, there = 0, 0
    for path in paths:
        try:
            with open(path, "rb") as file:
                metadata = _fill(table, path, file, begin, first=path == paths[0])
        except OSError as error:
            raise _unreadable(path, error) from None
        rows, there = int(metadata["num_rows"]), there + int(metadata["share"])
    if there < rows:
        raise BadInput(
            f"{paths[0].parent} has {there} of the {rows} rows of a table, whose other rows other"
            " processes have saved; put their files beside it"
        )


def _fill(table: RowTable, path: Path, file: Any, begin: int, first: bool) -> dict[str, str]:
    """Put what the file at ``path`` has of ``table``, and if it is the ``first`` the betas of all
    updates, into it. Returns its metadata."""
    shapes, metadata, first_byte = _read_header(file, path)
    used, width = shapes["weights"]
    starts = _offsets(shapes, first_byte)
    digests = {name: hashlib.sha256() for name in shapes}

    def read(name: str, first: int, shape: tuple[int, ...]) -> np.ndarray:
        dtype = np.dtype((OF_ROWS | OF_UPDATES)[name][1])
        file.seek(starts[name] + first * dtype.itemsize)
        values = np.fromfile(file, dtype, int(np.prod(shape))).reshape(shape)
        digests[name].update(values.view(np.uint8).reshape(-1).data)
        return values

    betas = read("betas", 0, tuple(shapes["betas"]))
    if first:
        table.resume(betas)
    for at, count in _pieces(used, width):
        weights = read("weights", at * width, (count, width)).view(ml_dtypes.bfloat16)
        rows, squares, updates = (
            read(name, at, (count,)) for name in ("rows", "squares", "updates")
        )
        own = (rows >= begin) & (rows - begin < table.num_rows)
        table.append(rows[own] - np.uint32(begin), weights[own], squares[own], updates[own])
    for name, digest in digests.items():
        if digest.hexdigest() != metadata[f"sha256 of {name}"]:
            raise BadInput(
                f"{path} was changed after it was saved: the hash of its {name} is another one; go"
                " back to an earlier checkpoint"
            )
    return metadata


def _unreadable(path: Path, error: OSError) -> BadInput:
    return BadInput(f"{path} cannot be read ({error.strerror}); name a saved table")


def _pieces(used: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of rows whose weights are a piece."""
    count = max(1, PIECE // (2 * width))
    for first in range(0, used, count):
        yield first, min(count, used - first)


def _sizes(shapes: dict[str, list[int]]) -> dict[str, int]:
    """Bytes of each array, in the order in which they lie in the file."""
    dtypes = OF_ROWS | OF_UPDATES
    return {
        name: int(np.prod(shapes[name], dtype=np.int64)) * np.dtype(dtype).itemsize
        for name, (_, dtype) in dtypes.items()
    }


def _offsets(shapes: dict[str, list[int]], begin: int) -> dict[str, int]:
    """Where each array begins in the file, of which the first begins at ``begin``."""
    found = {}
    for name, size in _sizes(shapes).items():
        found[name] = begin
        begin += size
    return found


def _header(shapes: dict[str, list[int]], metadata: dict[str, str]) -> bytes:
    """The first bytes of the file: the length of a JSON text, and the text."""
    starts, sizes = _offsets(shapes, 0), _sizes(shapes)
    entries: dict[str, Any] = {"__metadata__": metadata}
    for name, (dtype, _) in (OF_ROWS | OF_UPDATES).items():
        where = [starts[name], starts[name] + sizes[name]]
        entries[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": where}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 64)
    return len(text).to_bytes(8, "little") + text


def _read_header(file: Any, path: Path) -> tuple[dict[str, list[int]], dict[str, str], int]:
    """Return shapes, metadata and where the arrays begin; refuses what :func:`save` did not
    write."""
    length = int.from_bytes(file.read(8), "little")
    try:
        entries = json.loads(file.read(length)) if length <= LARGEST_HEADER else {}
        shapes = {name: entries[name]["shape"] for name in OF_ROWS | OF_UPDATES}
        metadata = entries["__metadata__"]
        written = _header(shapes, metadata)
        same = json.loads(written[8:]) == entries
    except (ValueError, KeyError, TypeError, AttributeError):
        same = False
    if not same:
        raise BadInput(f"{path} is no table that was saved by jspeed.host_table.save; name one")
    expected = 8 + length + sum(_sizes(shapes).values())
    if (found := os.fstat(file.fileno()).st_size) != expected:
        raise BadInput(
            f"{path} should have {expected:,} bytes but has {found:,}; go back to an earlier"
            " checkpoint"
        )
    return shapes, metadata, 8 + length
