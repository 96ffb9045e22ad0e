"""Files from the network, whole and with the right hash: one from a URL, or many from Hugging Face at once."""

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
from typing import Any, NamedTuple

from jspeed.data.folder import lock_folder
from jspeed.errors import BadInput, writable_folder
from jspeed.files import sha256_of

CHUNK = 1 << 20
ATTEMPTS = 4  # in a row that bring nothing new
PATIENCE = 30  # seconds without a byte
WORKERS = 8  # files at once

Progress = Callable[[int], None]
"""Is called, from any thread, with the bytes that have just arrived."""


class Remote(NamedTuple):
    """A file of a Hugging Face data set, as the hub describes it; ``sha256`` is None for a file not in LFS."""

    name: str
    size: int
    sha256: str | None


def fetch(
    url: str,
    path: Path,
    expected: str,
    progress: Progress = lambda count: None,
    digest: Callable[[Path], str] = sha256_of,
    instead: str = "fetch it yourself and give the file",
) -> Path:
    """Fetch ``url`` to ``path`` unless a file with the ``expected`` ``digest`` is there, and return ``path``.

    Raises BadInput, which says what to do ``instead``, when it cannot be fetched, or twice is not what was expected.
    """
    writable_folder(path.parent, "the folder for downloads")
    part = path.with_name(f"{path.name}.part")
    if path.is_file() and digest(path) == expected:
        return path
    found = ""
    for _ in range(2):
        try:
            _resume(url, part, progress)
            found = digest(part)
            if found == expected:
                os.replace(part, path)
                return path
            part.unlink()
        except OSError as error:
            raise BadInput(f"{url} cannot be fetched ({reason(error)}); {instead}") from None
    raise BadInput(
        f"{url} should have hash {expected} but has {found}; it has changed, or something on the way changes it: "
        f"{instead}"
    )


def _resume(url: str, part: Path, progress: Progress) -> None:
    """Fetch what ``part`` lacks, going on after every cut that brought something; raises the last OSError."""
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            return _append(url, part, progress)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and before:
                part.unlink()  # longer than the file: of another version
            elif error.code < 500 and error.code not in (408, 429):
                raise
            trouble: OSError = error
        except (OSError, http.client.HTTPException) as error:
            trouble = error if isinstance(error, OSError) else OSError(str(error) or "the connection was cut")
        failures = 0 if part.exists() and part.stat().st_size > before else failures + 1
        if failures == ATTEMPTS:
            raise trouble
        threading.Event().wait(0.25 * failures)


def _append(url: str, part: Path, progress: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        goes_on = answer.status == 206
        expected = int(answer.headers.get("Content-Length", -1))
        with open(part, "ab" if goes_on else "wb") as file:
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                progress(len(chunk))
                expected -= len(chunk)
    if expected > 0:
        raise OSError("the connection was cut")


def describe_hub(repository: str, names: Sequence[str], revision: str = "main") -> tuple[str, list[Remote]]:
    """Return the commit of ``revision`` and what the hub says of the files ``names`` in it.

    Mirrors (HF_ENDPOINT), offline mode (HF_HUB_OFFLINE) and tokens (HF_TOKEN) are huggingface_hub's own. Raises
    BadInput when the hub cannot be asked, or lacks one of them.
    """
    from huggingface_hub import HfApi, RepoFile

    _quieten()
    try:
        api = HfApi()
        commit = str(api.repo_info(repository, repo_type="dataset", revision=revision).sha)
        known = api.get_paths_info(repository, list(names), repo_type="dataset", revision=commit)
    except Exception as error:
        raise BadInput(f"{where(repository)} cannot be asked for its files ({reason(error)}); {ADVICE}") from None
    remote = {
        file.path: Remote(file.path, file.size, file.lfs.sha256 if file.lfs else None)
        for file in known
        if isinstance(file, RepoFile)
    }
    for name in names:
        if name not in remote:
            raise BadInput(f"{where(repository)} has no file {name}; ask for fewer shards")
    return commit, [remote[name] for name in names]


def list_hub(
    repository: str, ending: str, revisions: Sequence[str] = ("main", "refs/convert/parquet")
) -> tuple[str, list[str]]:
    """Return the first revision of a data set with files whose names end in ``ending``, and these, sorted.

    The second one is the hub's own conversion, taken only when it is not of a part. Raises BadInput for none.
    """
    from huggingface_hub import HfApi

    _quieten()
    for revision in revisions:
        try:
            names = HfApi().list_repo_files(repository, repo_type="dataset", revision=revision)
        except Exception as error:
            raise BadInput(f"{where(repository)} cannot be asked for its files ({reason(error)}); {ADVICE}") from None
        found = sorted(name for name in names if name.endswith(ending))
        if found and not any("partial" in name for name in found):
            return revision, found
    raise BadInput(f"{where(repository)} holds no complete set of {ending} files")


def fetch_set(
    repository: str, names: Sequence[str], folder: Path, progress: Progress, revision: str = "main"
) -> list[Path]:
    """Fetch files of a data set into ``folder`` as :func:`fetch_hub` does, and return their paths."""
    commit, files = describe_hub(repository, names, revision)
    writable_folder(folder, "the folder for downloads")
    lock = lock_folder(folder, wait=True)
    try:
        fetch_hub(repository, commit, files, folder, progress)
    finally:
        if lock is not None:
            os.close(lock)
    return [folder / name for name in names]


def fetch_hub(repository: str, commit: str, files: Sequence[Remote], folder: Path, progress: Progress) -> None:
    """Fetch ``files`` of a data set at ``commit`` into ``folder``, several at a time; those already there stay.

    A cut is gone on with; of a killed process, files that had come whole stay, which is as much as huggingface_hub
    takes up again. Only one process at a time may fetch to ``folder``. Raises BadInput when a file cannot be
    fetched, or twice has another size or hash than the hub says, or there is no room.
    """
    missing = [file for file in files if not is_right(folder / file.name, file)]
    for part in (folder / ".cache").rglob("*.incomplete"):
        part.unlink(missing_ok=True)
    need, free = sum(file.size for file in missing), shutil.disk_usage(folder).free
    if need > free:
        raise BadInput(f"{folder} has room for {free / 1e9:.1f} GB but {need / 1e9:.1f} GB are to come; make room")
    stop = threading.Event()
    waiting = deque(missing)
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def arrived(count: int) -> None:
        if stop.is_set():
            raise SystemExit  # of this thread, whatever is caught on the way
        progress(count)

    def work() -> None:
        while waiting and not stop.is_set():
            with suppress(IndexError):
                file = waiting.popleft()
                try:
                    _fetch_checked(repository, commit, file, folder, arrived)
                    ended.put(None)
                except BaseException as error:
                    ended.put(error)

    # Daemons: who is interrupted does not wait for a network that says nothing.
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


def is_right(path: Path, file: Remote) -> bool:
    """Whether ``path`` is there, of the size and with the hash that the hub says."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    return file.sha256 is None or sha256_of(path) == file.sha256


def _fetch_checked(repository: str, commit: str, file: Remote, folder: Path, progress: Progress) -> None:
    from huggingface_hub import hf_hub_download

    path = folder / file.name
    path.unlink(missing_ok=True)
    facts: dict[str, Any] = {"repo_type": "dataset", "revision": commit, "local_dir": folder}
    failures, wrong = 0, ""
    while True:
        try:
            hf_hub_download(repository, file.name, **facts, tqdm_class=_counter(progress))
        except Exception as error:
            failures += 1
            if failures == ATTEMPTS:
                raise BadInput(
                    f"{file.name} of {where(repository)} cannot be fetched ({reason(error)}); {ADVICE}"
                ) from None
            threading.Event().wait(0.25 * failures)
            continue
        if is_right(path, file):
            return
        size, digest = path.stat().st_size, sha256_of(path)
        path.unlink()
        if wrong:
            raise BadInput(
                f"{file.name} of {where(repository)} twice came with {wrong}; run again, or with another HF_ENDPOINT"
            )
        wrong = f"{size} bytes, not {file.size}" if size != file.size else f"SHA-256 {digest}, not {file.sha256}"


def summed(progress: Callable[[int, int | None], None] | None, total: int | None = None) -> Progress:
    """Return what adds up the bytes of all threads and tells ``progress`` the sum and ``total``."""
    lock, arrived = threading.Lock(), 0

    def count(more: int) -> None:
        nonlocal arrived
        with lock:
            arrived += more
            if progress:
                progress(arrived, total)

    return count


def _counter(progress: Progress) -> Any:
    from tqdm import tqdm

    class Counter(tqdm):
        """Counts bytes, shows nothing."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})
            progress(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            progress(int(n or 0))

    return Counter


ADVICE = (
    "files that have come whole are kept: run the command again when the network is there (HF_ENDPOINT names a mirror)"
)


def _quieten() -> None:
    """Keep huggingface_hub from telling of every attempt; the last one's failure is said."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def where(repository: str) -> str:
    """Name a data set and the server it is asked of."""
    from huggingface_hub import constants

    return f"{repository} at {constants.ENDPOINT}"


def reason(error: BaseException) -> str:
    """Say an error in a few words on one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
