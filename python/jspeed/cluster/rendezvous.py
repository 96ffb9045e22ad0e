"""Rendezvous before JAX starts: every process registers its rank with process 0 and receives the port of JAX's service.

JAX's own service accepts any client: a second run on the same port kills the first, and a duplicate rank or a wrong
world size aborts or hangs all processes with a C++ stack trace. So JAX's service gets a reserved port, known only to
registered processes, and the agreed port is free again afterwards. The connections stay open: they close when a process
exits. No jax in here.
"""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from jspeed.cluster.timeout import with_timeout
from jspeed.errors import BadInput

WAIT_SECONDS = "JSPEED_WAIT_SECONDS"  # the environment variable for how long processes wait for each other
_GREETING = "jspeed 1"
_LONGEST = 4096  # bytes of one message


def meet(
    host: str, port: int, index: int, count: int, seconds: float, service_port: int
) -> tuple[int, dict[int, socket.socket]]:
    """Return process 0's ``service_port``, once all ``count`` processes have called this; and the open connections:
    process 0's to every other, another's to process 0, each under the index of its far end.

    Raises :class:`BadInput` when they have not after ``seconds``, when two give one ``index`` or another ``count``,
    and on process 0 when it cannot listen on ``port``.
    """
    return _visit(host, port, index, count, seconds) if index else _host(port, count, seconds, service_port)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that the kernel gives to nobody else meanwhile; only what sets SO_REUSEPORT, as JAX's service does,
    can listen on it."""
    both = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if both else socket.AF_INET) as holder:
        if both:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def free_port() -> int:
    """A port of this machine that nothing has now."""
    with reserved_port() as port:
        return port


def is_open(connection: socket.socket) -> bool:
    """Whether the process at the far end lives: it sends nothing more, so all there is to read is the end of file."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _host(port: int, count: int, seconds: float, service_port: int) -> tuple[int, dict[int, socket.socket]]:
    guests: dict[int, socket.socket] = {}
    with ExitStack() as open_sockets:
        try:
            listener = open_sockets.enter_context(_listener(port, count))
        except OSError as error:
            raise BadInput(
                f"process 0 cannot listen on port {port} ({os.strerror(error.errno or 0)}); another program, or "
                "another run, has it: choose another port"
            ) from None

        enough = threading.Event()

        def gather() -> None:
            while len(guests) < count - 1 and not enough.is_set():
                with suppress(TimeoutError):
                    _admit(open_sockets.enter_context(listener.accept()[0]), guests, count)
                for index in [index for index, guest in guests.items() if not is_open(guest)]:
                    guests.pop(index).close()  # it died; it may be started again

        try:
            with_timeout(seconds, gather)
        except (BadInput, TimeoutError) as error:
            enough.set()
            absent = ", ".join(str(index) for index in range(1, count) if index not in guests)
            text = str(error) or (
                f"process 0 waited {seconds:g} s at port {port}, and of {count} processes these have not come: "
                f"{absent}; start them, check address, port and firewall, or wait longer ({WAIT_SECONDS})"
            )
            _send_to_all(guests, {"error": text})
            raise BadInput(text) from None
        _send_to_all(guests, {"port": service_port})
        open_sockets.pop_all()
        listener.close()
    return service_port, guests


def _listener(port: int, count: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    listener = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=count)
    listener.settimeout(0.2)
    return listener


def _admit(guest: socket.socket, guests: dict[int, socket.socket], count: int) -> None:
    """Add ``guest`` to ``guests`` if it is one of this run; any other client is ignored."""
    guest.settimeout(5)
    try:
        said = _receive(guest)
    except (OSError, ValueError):
        guest.close()
        return
    index = said["index"]
    if said["count"] != count:
        guests[index] = guest  # gets the error with the others
        raise BadInput(
            f"process {index} was started as one of {said['count']} but process 0 as one of {count}; "
            "start all with the same number of processes"
        )
    if index in guests:
        text = (
            f"another process is process {index} of {count} already; give each its own rank, and each run its own port"
        )
        _send_to_all({index: guest}, {"error": text})
        guest.close()
    else:
        guests[index] = guest


def _visit(host: str, port: int, index: int, count: int, seconds: float) -> tuple[int, dict[int, socket.socket]]:
    state = "it does not answer"
    enough = threading.Event()

    def visit() -> tuple[dict[str, Any], socket.socket]:
        nonlocal state
        while not enough.wait(0.2):
            try:
                connection = socket.create_connection((host.strip("[]"), port), timeout=5)
            except OSError as error:
                state = error.strerror or str(error)
                continue
            try:
                connection.settimeout(seconds)
                connection.sendall(_message({"index": index, "count": count}))
                state = "somebody listens there, but has not answered yet"
                return _receive(connection), connection
            except ValueError:
                state = "something else answers there"
            except OSError as error:
                state = error.strerror or str(error)
            connection.close()
        raise TimeoutError

    try:
        answer, connection = with_timeout(seconds + 2, visit)  # process 0 times out first and knows who is absent
    except TimeoutError:
        enough.set()
        raise BadInput(
            f"process {index} of {count} waited {seconds:g} s for process 0 at {host}:{port} ({state}); start all "
            f"processes, check address, port and firewall, or wait longer ({WAIT_SECONDS})"
        ) from None
    if "error" in answer:
        connection.close()
        raise BadInput(answer["error"])
    return answer["port"], {0: connection}


def _message(content: dict[str, Any]) -> bytes:
    return json.dumps({"greeting": _GREETING} | content).encode() + b"\n"


def _send_to_all(guests: dict[int, socket.socket], content: dict[str, Any]) -> None:
    for guest in guests.values():
        with suppress(OSError):  # that it is gone will be noticed when JAX starts
            guest.sendall(_message(content))


def _receive(connection: socket.socket) -> dict[str, Any]:
    """Read one message. Raises :class:`ValueError` for anything else, :class:`ConnectionError` for an end."""
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(_LONGEST)
        if not part:
            raise ConnectionError("it ended")
        data += part
        if len(data) > _LONGEST:
            raise ValueError("too long")
    content = json.loads(data)
    if not isinstance(content, dict) or content.get("greeting") != _GREETING:
        raise ValueError("not one of us")
    return content
