"""Files that are whole or not there at all, their hashes, and the folder where jspeed keeps what it prepared."""

import hashlib
import os
import tempfile
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """Return the folder for prepared data and compiled programs: ``$JSPEED_CACHE`` or the user's cache."""
    return Path(os.environ.get("JSPEED_CACHE") or platformdirs.user_cache_dir("jspeed", appauthor=False))


def write_whole(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` so that a reader sees the old file or the new one, never a part."""
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of the file at ``path`` as lower-case hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
