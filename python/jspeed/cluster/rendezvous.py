"""Rendezvous before JAX starts: every process registers its rank with process 0 and receives the
port of JAX's service.

JAX's own service accepts any client: a second run on the same port kills the first. A duplicate
rank or a wrong world size aborts or hangs all processes with a C++ stack trace. So JAX's service
gets a reserved port, known only to registered processes, and the agreed port is free again
afterwards. The connections stay open: they close when a process exits. No jax in here.

Then JAX connects to its service through a proxy of this process (:func:`proxy`): where that
connection breaks, JAX aborts at once. Through the proxy it only stops answering, which leaves
:mod:`jspeed.cluster.failure` time to report the error and exit.
"""

import errno
import hmac
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from jspeed.cluster.timeout import WAIT_SECONDS
from jspeed.errors import BadInput, say

_GREETING = "jspeed 1"
_LONGEST = 4096  # bytes of one message
TOKEN = "JSPEED_RENDEZVOUS_TOKEN"  # what the processes of a run know and nobody else
SAY_AFTER = 10.0  # seconds of waiting without a word: processes do not start at the same moment
PATIENCE = 5.0  # seconds that a client has for its whole message
STRANGERS = 64  # clients heard at a time besides the processes of the run

Peers = dict[int, socket.socket]  # open connections by the rank of the peer


@dataclass
class Stranger:
    """What a client has said so far, and until when it may."""

    until: float
    said: bytearray = field(default_factory=bytearray)


Strangers = dict[socket.socket, Stranger]


def token() -> str:
    """The secret of this run, which a launcher gives all of its processes; empty without one."""
    return os.environ.get(TOKEN, "")


def rendezvous(
    host: str, port: int, index: int, count: int, seconds: float, service_port: int
) -> tuple[int, Peers]:
    """Register with process 0 at ``host``:``port``; return once all ``count`` processes have called
    this.

    Returns the port of process 0's service, and the connections: process 0 has one to each of the
    others, they have one to process 0.

    Raises :class:`BadInput` when they have not after ``seconds``, two give one ``index`` or another
    ``count``, or process 0 cannot listen on ``port``. Only process 0's ``service_port`` counts.
    """
    return (
        _register(host, port, index, count, seconds)
        if index
        else _serve(host, port, count, seconds, service_port)
    )


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that the kernel gives to nobody else meanwhile; only what sets SO_REUSEPORT, as
    JAX's service does, can listen on it."""
    with socket.socket(_family()) as holder:
        if socket.has_dualstack_ipv6():
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def free_port() -> int:
    """A port of this machine that nothing has now."""
    with reserved_port() as port:
        return port


def proxy(host: str, port: int) -> int:
    """Forward a local port to ``host``:``port`` with daemon threads until the program ends; return
    the local port.

    The local end stays open when the far one closes.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            _start(_forward, listener.accept()[0], host, port)

    _start(serve)
    return listener.getsockname()[1]


def is_open(connection: socket.socket) -> bool:
    """Whether the peer lives: it never sends, so readable means end of file. Makes ``connection``
    non-blocking."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _serve(
    host: str, port: int, count: int, seconds: float, service_port: int
) -> tuple[int, Peers]:
    peers: Peers = {}
    with ExitStack() as open_sockets:
        try:
            listener = open_sockets.enter_context(_listener(host, port, count))
        except OSError as error:
            taken = (
                "another program, or another run, has it: "
                if error.errno == errno.EADDRINUSE
                else ""
            )
            reason = os.strerror(error.errno or 0)
            raise BadInput(
                f"process 0 cannot listen on port {port} ({reason}); {taken}choose another port"
            ) from None

        until = time.monotonic() + seconds
        strangers: Strangers = {}
        try:
            while len(peers) < count - 1:
                if time.monotonic() > until:
                    missing = ", ".join(
                        str(index) for index in range(1, count) if index not in peers
                    )
                    raise BadInput(
                        f"process 0 waited {seconds:g} s at port {port}; of {count} processes these"
                        f" are missing: {missing}; start them, check address, port and firewall, or"
                        f" wait longer ({WAIT_SECONDS})"
                    )
                _hear(listener, strangers, peers, count)
                for index in [index for index, peer in peers.items() if not is_open(peer)]:
                    peers.pop(index).close()  # it died, and may be restarted
        except BaseException as error:
            if isinstance(error, BadInput):
                _send_to_all(peers, {"error": str(error)})
            for peer in peers.values():
                peer.close()
            raise
        finally:
            for stranger in strangers:
                stranger.close()
        _send_to_all(peers, {"port": service_port})
        listener.close()
    return service_port, peers


def _listener(host: str, port: int, count: int) -> socket.socket:
    """Listen where process 0 is expected: where all are on this machine, for this machine alone."""
    local = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "::1": "::1"}.get(host.strip("[]"))
    if local:
        family = socket.AF_INET6 if ":" in local else socket.AF_INET
        listener = socket.create_server((local, port), family=family, backlog=count)
    else:
        both = socket.has_dualstack_ipv6()
        listener = socket.create_server(
            ("", port), family=_family(), dualstack_ipv6=both, backlog=count
        )
    listener.setblocking(False)
    return listener


def _family() -> socket.AddressFamily:
    return socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET


def _hear(listener: socket.socket, strangers: Strangers, peers: Peers, count: int) -> None:
    """Wait at most 0.2 s for clients, of which none keeps the others waiting, and add those of this
    run to ``peers``."""
    with selectors.DefaultSelector() as ready:
        for each in (listener, *strangers):
            ready.register(each, selectors.EVENT_READ)
        for key, _ in ready.select(0.2):
            if key.fileobj is listener:
                with suppress(OSError):
                    strangers[listener.accept()[0]] = Stranger(time.monotonic() + PATIENCE)
                continue
            peer: Any = key.fileobj
            try:
                part = peer.recv(_LONGEST)
                strangers[peer].said += part
                if part and not strangers[peer].said.endswith(b"\n"):
                    if len(strangers[peer].said) > _LONGEST:
                        raise ValueError("too long")
                    continue
                said = strangers.pop(peer).said
                _accept(peer, _read(bytes(said)), peers, count)
            except (OSError, ValueError, TypeError, KeyError):
                strangers.pop(peer, None)
                peer.close()
    late = [peer for peer, each in strangers.items() if time.monotonic() > each.until]
    for peer in [*late, *list(strangers)[count + STRANGERS :]]:
        strangers.pop(peer, None)
        peer.close()


def _accept(peer: socket.socket, hello: dict[str, Any], peers: Peers, count: int) -> None:
    """Add ``peer`` to ``peers`` if it is one of this run. Raises :class:`ValueError` for any other
    client."""
    if not hmac.compare_digest(str(hello.get("token", "")).encode(), token().encode()):
        raise ValueError("another run's token")
    index, its_count = hello["index"], hello["count"]
    if type(index) is not int or type(its_count) is not int or not 0 < index < its_count < 2**31:
        raise ValueError("no rank")
    peer.settimeout(5)
    if its_count != count:
        peers[index] = peer  # gets the error with the others
        raise BadInput(
            f"process {index} was started as one of {its_count} but process 0 as one of {count}; "
            "start all with the same number of processes"
        )
    if index in peers:
        text = (
            f"another process is process {index} of {count} already; give each its own rank, and"
            " each run its own port"
        )
        _send_to_all({index: peer}, {"error": text})
        peer.close()
    else:
        peers[index] = peer


def _register(host: str, port: int, index: int, count: int, seconds: float) -> tuple[int, Peers]:
    status, said = "no connection", None
    began = time.monotonic()
    until = began + seconds + 2  # process 0 times out first and knows who is missing
    while (left := until - time.monotonic()) > 0:
        with ExitStack() as failed:
            try:
                connection = failed.enter_context(
                    socket.create_connection((host.strip("[]"), port), min(5, left))
                )
                status = "connected, no reply yet"
                connection.settimeout(left)
                connection.sendall(_message({"index": index, "count": count}))
                answer = _receive(connection)
                if not hmac.compare_digest(str(answer.get("token", "")).encode(), token().encode()):
                    raise ValueError("another run's token")
                failed.pop_all()
                break
            except ValueError:
                status = "another service answers there"
            except OSError as error:
                if not isinstance(error, TimeoutError):
                    status = error.strerror or str(error)
                overdue = said is None and time.monotonic() - began > SAY_AFTER
                if overdue or (said != status and isinstance(error, socket.gaierror)):
                    said = status
                    say(f"waiting for process 0 at {host}:{port} ({said}), at most {seconds:g} s")
        time.sleep(0.2)
    else:
        raise BadInput(
            f"process {index} of {count} waited {seconds:g} s for process 0 at {host}:{port}"
            f" ({status}); start all processes, check address, port and firewall, or wait longer"
            f" ({WAIT_SECONDS})"
        )
    if "error" in answer:
        connection.close()
        raise BadInput(answer["error"])
    return answer["port"], {0: connection}


def _message(content: dict[str, Any]) -> bytes:
    return json.dumps({"greeting": _GREETING, "token": token()} | content).encode() + b"\n"


def _send_to_all(peers: Peers, content: dict[str, Any]) -> None:
    for peer in peers.values():
        with suppress(OSError):  # a dead peer is detected when JAX connects
            peer.sendall(_message(content))


def _receive(connection: socket.socket) -> dict[str, Any]:
    """Read one message. Raises :class:`ValueError` for anything else, :class:`ConnectionError` at
    the end of file."""
    data = b""
    until = time.monotonic() + (connection.gettimeout() or 0.0)  # for all of it
    while not data.endswith(b"\n"):
        connection.settimeout(max(until - time.monotonic(), 0.001))
        part = connection.recv(_LONGEST)
        if not part:
            raise ConnectionError("connection closed")
        data += part
        if len(data) > _LONGEST:
            raise ValueError("too long")
    return _read(data)


def _read(data: bytes) -> dict[str, Any]:
    """Return the message in ``data``. Raises :class:`ValueError` for anything else."""
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError("no message") from None
    if not isinstance(content, dict) or content.get("greeting") != _GREETING:
        raise ValueError("not a jspeed message")
    return content


def _forward(near: socket.socket, host: str, port: int) -> None:
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
