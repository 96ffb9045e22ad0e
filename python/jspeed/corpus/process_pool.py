"""An ordered process pool whose workers never outlive their parent.

A worker is a plain child process with a pipe in each direction. Ctrl-C does not reach it (a session of its own), it
ends when its input pipe closes, whatever it is doing, and the threads that talk to workers are daemons: so this process
can be interrupted or killed at any moment, and nothing has to be waited for.
"""

import os
import pickle
import select
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from jspeed.errors import BadInput, NoRoom

QUEUED_PER_WORKER = 2  # items, so that none waits for this process
MAX_WORKERS = 1024
SERVE = "from jspeed.corpus.process_pool import serve; serve()"

Item = TypeVar("Item")
Result = TypeVar("Result")
Worker = subprocess.Popen[bytes]
Task = tuple[Any, "Future[Any]"]


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], processes: int
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` of each item in order; the first exception in input order is raised.

    ``function``, items and results cross pipes as pickles; a worker is started when there is an item for it.
    """
    if processes == 1:
        yield from map(function, items)
        return
    workers: list[Worker] = []
    threads: list[threading.Thread] = []
    tasks: SimpleQueue[Task | None] = SimpleQueue()
    waiting: deque[Future[Any]] = deque()
    trouble: BaseException | None = None
    iterator = iter(items)
    try:
        while trouble is None or waiting:
            while trouble is None and len(waiting) < (1 + QUEUED_PER_WORKER) * processes:
                try:
                    item = next(iterator)
                except (StopIteration, BadInput) as error:
                    trouble = error
                    break
                if len(workers) < processes:
                    workers.append(_started())
                    thread = threading.Thread(target=_feed, args=(workers[-1], function, tasks), daemon=True)
                    thread.start()  # Ctrl-C may come between any two lines, and only what has started can be joined
                    threads.append(thread)
                waiting.append(Future())
                tasks.put((item, waiting[-1]))
            if waiting:
                yield waiting.popleft().result()
    finally:
        for worker in workers:
            worker.kill()
            tasks.put(None)
        for thread in threads:
            thread.join(timeout=1)
        for worker in workers[len(threads) :]:
            with worker:  # as its thread would have
                pass
    if isinstance(trouble, BadInput):
        raise trouble


def _started() -> Worker:
    # -P: the current folder may hold a module of a name that Python imports.
    command = [sys.executable, "-P", "-c", SERVE]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # as this process finds modules
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
    except OSError as error:
        raise NoRoom(f"another process cannot be started ({error.strerror}); give fewer --processes") from None


def _feed(worker: Worker, function: Callable[[Any], Any], tasks: "SimpleQueue[Task | None]") -> None:
    """Have ``worker`` do tasks until there are no more (None) or it is gone."""
    assert worker.stdin and worker.stdout
    with suppress(BrokenPipeError), worker:  # leaving ``worker`` writes what its input still holds
        first = [function]
        while task := tasks.get():
            item, future = task
            try:
                for each in (*first, item):
                    pickle.dump(each, worker.stdin, pickle.HIGHEST_PROTOCOL)
                first.clear()
                worker.stdin.flush()
                result = pickle.load(worker.stdout)
            except (OSError, EOFError, pickle.UnpicklingError):
                future.set_exception(_gone(worker))
                return
            except BaseException as error:
                future.set_exception(error)
                return
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)


def _gone(worker: Worker) -> NoRoom:
    """Return the error for a worker that died."""
    if (code := worker.wait()) > 0:
        return NoRoom(f"a tokenising process ended with exit code {code} (see above); finished work is kept")
    return NoRoom(
        "a tokenising process was killed, probably out of memory; run the same command with fewer --processes to resume"
    )


def serve() -> None:
    """Read a function and then items from the standard input, and write what it returns or raises of each."""
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what something prints is not an answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, pickle.UnpicklingError):
        function = pickle.load(source)
        while True:
            item = pickle.load(source)
            try:
                result = function(item)
            except Exception as error:
                result = error
            pickle.dump(result, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
    os._exit(0)  # what could not be written stays unwritten


def _end_with_parent() -> None:
    """End this process when its standard input is closed."""
    hung_up = select.poll()
    hung_up.register(0, 0)
    hung_up.poll()
    os._exit(0)
