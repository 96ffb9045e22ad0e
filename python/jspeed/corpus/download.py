"""Verified downloads: single files by URL, many from the Hugging Face Hub."""

import http.client
import logging
import os
import shutil
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from jspeed.corpus import Progress, no_progress
from jspeed.errors import BadInput, NoRoom, writable_folder
from jspeed.files import cache_folder, sha256_of
from jspeed.output_folder import locked
from jspeed.standard_streams import interruptible

CHUNK = 1 << 20  # bytes read at once
ATTEMPTS = 4  # for one file
TIMEOUT = 30  # seconds without a byte
WORKERS = 8  # files at once
REVISIONS = ("main", "refs/convert/parquet")  # the second is the hub's own conversion
ADVICE = "completed files are kept: run the command again when online (HF_ENDPOINT names a mirror)"


class Remote(NamedTuple):
    """A file of a Hugging Face data set, as the hub describes it; ``sha256`` is None for a file not in LFS."""

    name: str
    size: int
    sha256: str | None


def fetch(
    url: str,
    path: Path,
    expected: str,
    progress: Progress = no_progress,
    digest: Callable[[Path], str] = sha256_of,
    instead: str = "fetch it yourself and give the file",
) -> Path:
    """Fetch ``url`` to ``path`` unless a file with the ``expected`` ``digest`` is there, and return ``path``.

    Raises BadInput, which says what to do ``instead``, when it cannot be fetched, or twice is not what was expected.
    """
    writable_folder(path.parent, "the folder for downloads")
    if path.is_file() and digest(path) == expected:
        return path
    wrong = failures = 0
    with interruptible(), TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        part = Path(folder) / path.name
        while True:
            try:
                _get(url, part, progress)
            except (OSError, http.client.HTTPException) as error:
                failures += 1
                if failures == ATTEMPTS or _permanent(error):
                    raise BadInput(f"{url} cannot be fetched ({_reason(error)}); {instead}") from None
                progress(-part.stat().st_size if part.exists() else 0, None)
                threading.Event().wait(0.25 * failures)
                continue
            if (found := digest(part)) == expected:
                os.replace(part, path)
                return path
            wrong += 1
            if wrong == 2:
                raise BadInput(
                    f"{url} should have hash {expected} but has {found}; it changed, or a proxy alters it: {instead}"
                )


def _get(url: str, path: Path, progress: Progress) -> None:
    path.unlink(missing_ok=True)
    with urllib.request.urlopen(url, timeout=TIMEOUT) as answer, open(path, "wb") as file:
        while chunk := answer.read(CHUNK):
            file.write(chunk)
            progress(len(chunk), None)
        if answer.length:  # what is left of Content-Length
            raise OSError("the connection was cut")


def _permanent(error: Exception) -> bool:
    """Whether another attempt would be answered alike."""
    if not isinstance(error, urllib.error.HTTPError):
        return False
    error.close()
    return error.code < 500 and error.code not in (408, 429)


def describe_hub(repository: str, names: Sequence[str], revision: str = "main") -> tuple[str, list[Remote]]:
    """Return the commit of ``revision`` and what the hub says of the files ``names`` in it.

    Mirrors (HF_ENDPOINT), offline mode (HF_HUB_OFFLINE) and tokens (HF_TOKEN) are huggingface_hub's own. Raises
    BadInput when the hub cannot be asked, or lacks one of them.
    """
    _home_of_hub()
    from huggingface_hub import HfApi, RepoFile

    _silence_logs()
    try:
        api = HfApi()
        commit = str(api.repo_info(repository, repo_type="dataset", revision=revision).sha)
        known = api.get_paths_info(repository, list(names), repo_type="dataset", revision=commit)
    except Exception as error:
        raise BadInput(f"{_where(repository)} cannot be asked for its files ({_reason(error)}); {ADVICE}") from None
    remote = {
        file.path: Remote(file.path, file.size, file.lfs.sha256 if file.lfs else None)
        for file in known
        if isinstance(file, RepoFile)
    }
    for name in names:
        if name not in remote:
            raise BadInput(f"{_where(repository)} has no file {name}; ask for fewer shards")
    return commit, [remote[name] for name in names]


def list_hub(repository: str, ending: str) -> tuple[str, list[str]]:
    """Return (revision, sorted file names) of the first of ``REVISIONS`` that has ``ending`` files.

    The hub's conversion is used only if complete. Raises BadInput where none has any, or the hub cannot be asked.
    """
    _home_of_hub()
    from huggingface_hub import HfApi

    _silence_logs()
    for revision in REVISIONS:
        try:
            names = HfApi().list_repo_files(repository, repo_type="dataset", revision=revision)
        except Exception as error:
            raise BadInput(f"{_where(repository)} cannot be asked for its files ({_reason(error)}); {ADVICE}") from None
        found = sorted(name for name in names if name.endswith(ending))
        if found and not any("partial" in name for name in found):
            return revision, found
    raise BadInput(f"{_where(repository)} holds no complete set of {ending} files")


def fetch_set(
    repository: str, names: Sequence[str], folder: Path, progress: Progress, revision: str = "main"
) -> list[Path]:
    """Fetch the files ``names`` of a data set into ``folder`` as :func:`fetch_hub` does, and return their paths."""
    commit, files = describe_hub(repository, names, revision)
    writable_folder(folder, "the folder for downloads")
    with locked(folder, wait=True):
        fetch_hub(repository, commit, files, folder, progress)
    return [folder / name for name in names]


def fetch_hub(repository: str, commit: str, files: Sequence[Remote], folder: Path, progress: Progress) -> None:
    """Fetch ``files`` of a data set at ``commit`` into ``folder``, several at a time; those already there stay.

    Interrupted downloads resume. After a kill, only completed files are kept, because huggingface_hub does not resume
    partial ones across processes. Only one process at a time may fetch to ``folder``. Raises BadInput when a file
    cannot be fetched, or twice has another size or hash than the hub says, and NoRoom on a full disk.
    """
    missing = [file for file in files if not is_intact(folder / file.name, file)]
    for part in (folder / ".cache").rglob("*.incomplete"):
        part.unlink(missing_ok=True)
    need, free = sum(file.size for file in missing), shutil.disk_usage(folder).free
    if need > free:
        raise NoRoom(f"{folder} has room for {free / 1e9:.1f} GB but needs {need / 1e9:.1f} GB; free disk space")
    stop = threading.Event()
    waiting = deque(missing)
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def arrived(count: int) -> None:
        if stop.is_set():
            raise SystemExit  # of this thread, whatever is caught on the way
        progress(count, need)

    def work() -> None:
        while waiting and not stop.is_set():
            with suppress(IndexError):
                file = waiting.popleft()
                try:
                    _fetch_checked(repository, commit, file, folder, arrived)
                    ended.put(None)
                except BaseException as error:
                    ended.put(error)

    # Daemons: an interrupted process does not wait for a silent network.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(WORKERS, len(missing)))]
    for thread in threads:
        thread.start()
    try:
        for _ in missing:
            if trouble := ended.get():
                raise trouble
    except Exception:
        stop.set()
        for thread in threads:
            thread.join()
        raise
    finally:
        stop.set()


def is_intact(path: Path, file: Remote) -> bool:
    """Whether ``path`` is there, with the size and the hash that the hub gives."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    return file.sha256 is None or sha256_of(path) == file.sha256


def _fetch_checked(repository: str, commit: str, file: Remote, folder: Path, count: Callable[[int], None]) -> None:
    from huggingface_hub import hf_hub_download

    path = folder / file.name
    path.unlink(missing_ok=True)
    facts: dict[str, Any] = {"repo_type": "dataset", "revision": commit, "local_dir": folder}
    failures, wrong = 0, ""
    while True:
        try:
            hf_hub_download(repository, file.name, **facts, tqdm_class=_counter(count))
        except Exception as error:
            failures += 1
            if failures == ATTEMPTS:
                raise BadInput(
                    f"{file.name} of {_where(repository)} cannot be fetched ({_reason(error)}); {ADVICE}"
                ) from None
            threading.Event().wait(0.25 * failures)
            continue
        if is_intact(path, file):
            return
        size, digest = path.stat().st_size, sha256_of(path)
        path.unlink()
        if wrong:
            raise BadInput(
                f"{file.name} of {_where(repository)} was downloaded twice with {wrong}; run again, or with another "
                "HF_ENDPOINT"
            )
        wrong = (
            f"{size} bytes, expected {file.size}" if size != file.size else f"SHA-256 {digest}, expected {file.sha256}"
        )


def _counter(count: Callable[[int], None]) -> Any:
    from tqdm import tqdm

    class Counter(tqdm):
        """Counts bytes, shows nothing."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})
            count(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            count(int(n or 0))

    return Counter


def _home_of_hub() -> None:
    """Give huggingface_hub, which fails without a home folder, a place in jspeed's cache. Call before its import."""
    if not os.path.isdir(os.path.expanduser("~")):
        os.environ.setdefault("HF_HOME", str(cache_folder() / "huggingface"))


def _silence_logs() -> None:
    """Keep huggingface_hub from logging every attempt; the last one's failure is raised."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _where(repository: str) -> str:
    """Name a data set and its server."""
    from huggingface_hub import constants

    return f"{repository} at {constants.ENDPOINT}"


def _reason(error: BaseException) -> str:
    """Return an error's type and text in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
