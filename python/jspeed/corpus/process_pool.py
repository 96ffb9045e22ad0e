"""A function called in several processes, in order; none of them outlives the process that started it.

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

from jspeed.errors import BadInput

WAITING = 2  # items that wait for each worker
MOST = 1024  # workers
SERVE = "from jspeed.corpus.process_pool import serve; serve()"

Item = TypeVar("Item")
Result = TypeVar("Result")
Worker = subprocess.Popen[bytes]
Task = tuple[Any, "Future[Any]"]


class NoRoom(BadInput):
    """There is too little disk or memory; what was done before is kept."""


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], processes: int
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` of each item in order; what raises first in that order is raised, on any number.

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
            while trouble is None and len(waiting) < (1 + WAITING) * processes:
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
    """Say how a worker ended that gives no answer any more."""
    if (code := worker.wait()) > 0:
        return NoRoom(f"a tokenising process ended with exit code {code}, for the reason above; nothing done is lost")
    return NoRoom(
        "a tokenising process was killed, most likely for want of memory; run the same command again with fewer "
        "--processes, which goes on where this ended"
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
    """End this process when nobody can write to its standard input any more."""
    hung_up = select.poll()
    hung_up.register(0, 0)
    hung_up.poll()
    os._exit(0)
