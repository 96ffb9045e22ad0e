"""Bytes pass the proxy both ways, and its near end stays open when its far end closes."""

import socket
import threading

import pytest

from jspeed.cluster.coordinator_proxy import start_proxy
from jspeed.cluster.rendezvous import free_port


def test_bytes_both_ways_then_silence():
    port = free_port()
    near = socket.create_connection(("127.0.0.1", start_proxy("127.0.0.1", port)))
    threading.Event().wait(0.5)  # the far end comes late
    with socket.create_server(("127.0.0.1", port)) as service, near:
        far = service.accept()[0]
        near.settimeout(5)
        with far:
            for source, sink in ((near, far), (far, near)):
                data = bytes(range(256)) * 4096
                threading.Thread(target=source.sendall, args=(data,), daemon=True).start()
                heard = b""
                while len(heard) < len(data):
                    heard += sink.recv(1 << 20)
                assert heard == data
        near.settimeout(0.3)
        with pytest.raises(TimeoutError):
            near.recv(1)


def test_the_far_end_hears_that_the_near_one_has_ended():
    with socket.create_server(("127.0.0.1", 0)) as service:
        with socket.create_connection(("127.0.0.1", start_proxy("127.0.0.1", service.getsockname()[1]))) as near:
            far = service.accept()[0]
            near.sendall(b"last words")
        far.settimeout(5)
        with far:
            assert far.recv(100) == b"last words" and far.recv(1) == b""
