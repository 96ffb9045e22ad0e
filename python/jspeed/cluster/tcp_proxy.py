"""JAX's way to its service on process 0, through a socket of ours that stays when process 0 does not.

JAX ends a process with a stack trace in C++ at the moment when its connection to that service breaks, before anything
can be said or done. Behind a relay the connection only falls silent, and :mod:`jspeed.cluster.failure` has its say.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress


def start_proxy(host: str, port: int) -> int:
    """Return a port of this machine that leads to ``host`` at ``port``, by daemon threads, until the program ends."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            _start(_join, listener.accept()[0], host, port)

    _start(serve)
    return listener.getsockname()[1]


def _join(near: socket.socket, host: str, port: int) -> None:
    for _ in range(25):  # process 0 may not have started its service yet; JAX asks again
        with suppress(OSError):
            far = socket.create_connection((host.strip("[]"), port), timeout=5)
            break
        threading.Event().wait(0.2)
    else:
        near.close()
        return
    far.settimeout(None)
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _start(_pump, far, near)  # when this one ends, the silence begins
    _pump(near, far)
    with near, far, suppress(OSError):  # JAX has closed its end
        far.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Until ``source`` ends; what ``sink`` takes no more is lost."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            with suppress(OSError):
                sink.sendall(data)


def _start(function: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()
