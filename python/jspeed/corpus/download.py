"""Verified downloads: single files by URL, many from the Hugging Face Hub."""

import logging
import os
import shutil
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from jspeed.base.files import cache_folder, sha256_of
from jspeed.base.standard_streams import interruptible
from jspeed.corpus import Progress, no_progress
from jspeed.errors import BadInput, NoRoom, type_and_line, writable_folder

CHUNK = 1 << 20  # bytes read at once
ATTEMPTS = 4  # for one file
TIMEOUT = 30  # seconds without a byte
WORKERS = 8  # files at once
REVISIONS = ("main", "refs/convert/parquet")  # the second is the hub's own conversion
ADVICE = "completed files are kept: run the command again when online (HF_ENDPOINT names a mirror)"


class Download(NamedTuple):
    """A file on a web server, kept as ``name`` in :func:`downloads`."""

    name: str
    url: str
    sha256: str


class Remote(NamedTuple):
    """A file of a Hugging Face data set, as the hub describes it; ``sha256`` is None for a file not
    in LFS."""

    name: str
    size: int
    sha256: str | None


def downloads() -> Path:
    """Return the folder of the cache where fetched files stay."""
    return cache_folder() / "downloads"


def fetch(
    file: Download,
    folder: Path | None = None,
    progress: Progress = no_progress,
    instead: str = "fetch it yourself and give the file",
) -> Path:
    """Fetch ``file`` into ``folder`` (:func:`downloads`) unless it is there, with its hash, and
    return its path.

    Raises BadInput, which says what to do ``instead``, when it cannot be fetched, or is never what
    was expected.
    """
    path = (folder or downloads()) / file.name
    writable_folder(path.parent, "the folder for downloads")
    if path.is_file() and sha256_of(path) == file.sha256:
        return path
    with interruptible(), TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as hidden:
        part = Path(hidden) / path.name

        def fault() -> str | None:
            came = sha256_of(part)
            wrong = (
                f"should have SHA-256 {file.sha256} but has {came}; it changed, or a proxy"
                " alters it"
            )
            return wrong if came != file.sha256 else None

        _persist(file.url, partial(_get, file.url, part, progress), fault, instead)
        os.replace(part, path)
    return path


def _persist(
    what: str, get: Callable[[], object], fault: Callable[[], str | None], advice: str
) -> None:
    """Call ``get`` until ``fault`` finds nothing wrong with what came, ``ATTEMPTS`` times at most.

    Raises BadInput, which names ``what`` and ends in ``advice``.
    """
    trouble: str | None = None
    for attempt in range(ATTEMPTS):
        threading.Event().wait(0.25 * attempt)
        try:
            get()
            if not (trouble := fault()):
                return
        except Exception as error:
            trouble = f"cannot be fetched ({type_and_line(error)})"
            if isinstance(error, urllib.error.HTTPError):
                error.close()
                # another attempt would be answered alike
                if error.code < 500 and error.code not in (408, 429):
                    break
    raise BadInput(f"{what} {trouble}; {advice}")


def _get(url: str, path: Path, progress: Progress) -> None:
    if path.exists():  # of the attempt before
        progress(-path.stat().st_size, None)
    with urllib.request.urlopen(url, timeout=TIMEOUT) as answer, open(path, "wb") as file:
        while chunk := answer.read(CHUNK):
            file.write(chunk)
            progress(len(chunk), None)
        if answer.length:  # what is left of Content-Length
            raise OSError("the connection was cut")


def describe_hub(repository: str, names: Sequence[str]) -> tuple[str, list[Remote]]:
    """Return the present commit of a data set and what the hub says of its files ``names``.

    Raises BadInput when the hub cannot be asked, or lacks one of them.
    """
    commit, remote = _files_of_hub(repository, "main")
    for name in names:
        if name not in remote:
            raise BadInput(f"{_where(repository)} has no file {name}; ask for fewer shards")
    return commit, [remote[name] for name in names]


def list_hub(repository: str, ending: str) -> tuple[str, list[Remote]]:
    """Return commit and files, sorted by name, of the first of ``REVISIONS`` that has files with
    this ``ending``.

    The hub's conversion is used only if complete. Raises BadInput where none has any, or the hub
    cannot be asked.
    """
    for revision in REVISIONS:
        commit, remote = _files_of_hub(repository, revision)
        names = sorted(name for name in remote if name.endswith(ending))
        if names and not any("partial" in name for name in names):
            return commit, [remote[name] for name in names]
    raise BadInput(f"{_where(repository)} holds no complete set of {ending} files; try again later")


def _files_of_hub(repository: str, revision: str) -> tuple[str, dict[str, Remote]]:
    """Return the commit of ``revision`` and its files by name. Raises BadInput when the hub cannot
    be asked.

    Mirrors (HF_ENDPOINT), offline mode (HF_HUB_OFFLINE) and tokens (HF_TOKEN) are huggingface_hub's
    own.
    """
    if not os.path.isdir(os.path.expanduser("~")):  # without a home folder its import would fail
        os.environ.setdefault("HF_HOME", str(cache_folder() / "huggingface"))
    from huggingface_hub import HfApi, RepoFile

    # it logs every attempt; the last failure is raised
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    api = HfApi()
    try:
        commit = str(api.repo_info(repository, repo_type="dataset", revision=revision).sha)
        known = list(
            api.list_repo_tree(repository, recursive=True, revision=commit, repo_type="dataset")
        )
    except Exception as error:
        raise BadInput(
            f"{_where(repository)} cannot be asked for its files ({type_and_line(error)}); {ADVICE}"
        ) from None
    return commit, {
        file.path: Remote(file.path, file.size, file.lfs.sha256 if file.lfs else None)
        for file in known
        if isinstance(file, RepoFile)
    }


def fetch_hub(
    repository: str, commit: str, files: Sequence[Remote], folder: Path, progress: Progress
) -> None:
    """Fetch ``files`` of a data set at ``commit`` into ``folder``, several at a time; those already
    there stay.

    Interrupted downloads resume. After a kill, only completed files are kept, because
    huggingface_hub does not resume partial ones across processes. Only one process at a time may
    fetch to ``folder``. Raises BadInput when a file cannot be fetched, or always has another size
    or hash than the hub says, and NoRoom on a full disk.
    """
    missing = [file for file in files if not is_intact(folder / file.name, file)]
    for part in (folder / ".cache").rglob("*.incomplete"):
        part.unlink(missing_ok=True)
    need, free = sum(file.size for file in missing), shutil.disk_usage(folder).free
    if need > free:
        raise NoRoom(
            f"{folder} has room for {free / 1e9:.1f} GB but needs {need / 1e9:.1f} GB; free disk"
            " space"
        )
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
    threads = [
        threading.Thread(target=work, daemon=True) for _ in range(min(WORKERS, len(missing)))
    ]
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


def _fetch_checked(
    repository: str, commit: str, file: Remote, folder: Path, count: Callable[[int], None]
) -> None:
    from huggingface_hub import hf_hub_download

    path = folder / file.name
    path.unlink(missing_ok=True)
    facts: dict[str, Any] = {"repo_type": "dataset", "revision": commit, "local_dir": folder}

    def fault() -> str | None:
        if is_intact(path, file):
            return None
        size, digest = path.stat().st_size, sha256_of(path)
        path.unlink()
        if size != file.size:
            return f"came with {size} bytes, expected {file.size}"
        return f"came with SHA-256 {digest}, expected {file.sha256}"

    get = partial(hf_hub_download, repository, file.name, **facts, tqdm_class=_counter(count))
    _persist(f"{file.name} of {_where(repository)}", get, fault, ADVICE)


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


def _where(repository: str) -> str:
    """Name a data set and its server."""
    from huggingface_hub import constants

    return f"{repository} at {constants.ENDPOINT}"
