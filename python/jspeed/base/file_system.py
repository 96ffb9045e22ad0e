"""Whether a file system has the calls that checkpoints are written with, asked before a run
begins."""

import os
import re
import tempfile
from pathlib import Path

# TensorStore's error: the call that failed, of several nested ones the last, and what the system
# said of it
FAILED = re.compile(r'.*Failed to ([^:"]+?)(?: fd)?: (?:"?[^:]*: )*([^:\[]+) \[os_error_code', re.S)
NO_SPACE = "RESOURCE_EXHAUSTED"  # of a full disk, which may have room when a checkpoint comes


def failed_call(error: Exception) -> str | None:
    """Return the call of TensorStore that ``error`` is of, and the system's reason; None for
    another error."""
    found = FAILED.match(str(error))
    return f"{found[1]}: {found[2]}" if found else None


def refused_call(folder: Path) -> str | None:
    """Return the call that the file system of ``folder`` refuses, and its reason; None where
    checkpoints can be written.

    TensorStore locks files, syncs them and renames them over others, and Orbax renames folders:
    some network and FUSE file systems have not all of these.
    """
    import tensorstore  # what Orbax writes with; only runs with checkpoints need it

    with tempfile.TemporaryDirectory(prefix=".checkpoint-", dir=folder) as hidden:
        store = tensorstore.KvStore.open({"driver": "file", "path": f"{hidden}/part/"}).result()
        try:
            for content in (b"first", b"second, in its place"):
                store.write("file", content).result()
            os.rename(f"{hidden}/part", f"{hidden}/whole")
        except OSError as error:
            return f"rename a folder: {error.strerror}"
        except (ValueError, NotImplementedError) as error:
            return None if NO_SPACE in str(error) else failed_call(error) or str(error)
    return None
