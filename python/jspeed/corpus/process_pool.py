"""An ordered process pool whose workers never outlive their parent.

Why not ``concurrent.futures``: the workers of ProcessPoolExecutor outlive a killed parent, get
Ctrl-C too, and are waited for at the end. They import the user's script again, which fails without
``if __name__ == "__main__"``. Threads would run one at a time in ``encode`` of tokenizers, which
holds Python's lock (tiktoken's does not), and in the reading of JSON.

A worker here is a plain child process with a pipe in each direction, served by a thread. Ctrl-C
does not reach it (a session of its own), and it ends when its input pipe closes, whatever it is
doing.
"""

import os
import pickle
import select
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

from jspeed.errors import BadInput, NoRoom

QUEUED_PER_WORKER = 2  # items, so that none waits for this process
MAX_WORKERS = 1024
SERVE = "from jspeed.corpus.process_pool import serve; serve()"

Item = TypeVar("Item")
Result = TypeVar("Result")
Worker = subprocess.Popen[bytes]


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], processes: int
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` of each item in order; the first exception in input order is raised.

    ``function``, items and results cross pipes as pickles; a worker is started when there is an
    item for it.
    """
    if processes == 1:
        yield from map(function, items)
        return
    workers: list[Worker] = []
    threads = ThreadPoolExecutor(processes)
    own, ended = threading.local(), threading.Event()

    def call(item: Item) -> Result:
        if not hasattr(own, "worker"):
            own.worker = _started()
            workers.append(own.worker)
            if ended.is_set():
                own.worker.kill()
        return _answer(own.worker, (function, item))

    def futures() -> Iterator[Future[Result]]:
        try:
            for item in items:
                yield threads.submit(call, item)
        except BadInput as error:  # in its place, after the results of the items before it
            failed: Future[Result] = Future()
            failed.set_exception(error)
            yield failed

    coming = futures()
    try:
        waiting = deque(islice(coming, (1 + QUEUED_PER_WORKER) * processes))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(islice(coming, 1))
    finally:
        ended.set()
        for worker in workers:
            worker.kill()
        threads.shutdown(cancel_futures=True)
        for worker in workers:
            # leaving it writes what its input still holds, and waits for it
            with suppress(BrokenPipeError), worker:
                pass


def _started() -> Worker:
    # -P: the current folder may hold a module of a name that Python imports.
    command = [sys.executable, "-P", "-c", SERVE]
    # as this process finds modules
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True
        )
    except OSError as error:
        raise NoRoom(
            f"another process cannot be started ({error.strerror}); give fewer --processes"
        ) from None


def _answer(worker: Worker, request: tuple[Callable[[Any], Any], Any]) -> Any:
    """Return or raise what ``worker`` answers. Raises NoRoom when it is gone."""
    assert worker.stdin and worker.stdout
    try:
        pickle.dump(request, worker.stdin, pickle.HIGHEST_PROTOCOL)
        worker.stdin.flush()
        answer = pickle.load(worker.stdout)
    except (OSError, EOFError, pickle.UnpicklingError):
        raise _gone(worker) from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _gone(worker: Worker) -> NoRoom:
    """Return the error for a worker that died."""
    if (code := worker.wait()) > 0:
        return NoRoom(
            f"a tokenising process ended with exit code {code} (see above); finished work is kept"
        )
    return NoRoom(
        "a tokenising process was killed, probably out of memory; run the same command with fewer"
        " --processes to resume"
    )


def serve() -> None:
    """Read (function, item) from the standard input, and write what the function returns or raises,
    again and again."""
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what something prints is not an answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, pickle.UnpicklingError):
        while True:
            function, item = pickle.load(source)
            try:
                answer = function(item)
            except Exception as error:
                answer = error
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
    os._exit(0)  # what could not be written stays unwritten


def _end_with_parent() -> None:
    """End this process when its standard input is closed."""
    hung_up = select.poll()
    hung_up.register(0, 0)
    hung_up.poll()
    os._exit(0)
