"""A local TCP proxy to JAX's coordination service, which stays open when process 0 dies.

When its connection to that service breaks, JAX aborts the process at once with a C++ stack trace. Through the proxy the
connection only stops answering, which leaves :mod:`jspeed.cluster.failure` time to report the error and exit.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress


def start_proxy(host: str, port: int) -> int:
    """Forward a local port to ``host``:``port`` with daemon threads until the program ends; return the local port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            _start(_join, listener.accept()[0], host, port)

    _start(serve)
    return listener.getsockname()[1]


def _join(near: socket.socket, host: str, port: int) -> None:
    for _ in range(25):  # process 0 may not have started its service yet; JAX retries
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
    _start(_pump, far, near)  # end of file is not forwarded to JAX
    _pump(near, far)
    with near, far, suppress(OSError):  # JAX has closed its end
        far.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copy until ``source`` ends; discard data once ``sink`` is closed."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            with suppress(OSError):
                sink.sendall(data)


def _start(function: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()
