"""Rendezvous: all processes connect, or each gets one error message with the reason. Threads stand
for processes."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from jspeed.cluster.rendezvous import free_port, is_open, proxy, rendezvous, reserved_port
from jspeed.errors import BadInput

from ..multi_process import said


def port_of(meeting):
    port, lines = meeting
    for line in lines.values():
        line.close()
    return port


def meeting(port, *guests, seconds=10, late=0.0):
    """The port or the error message that each of ``guests``, (index, count), gets; process 0 comes
    ``late``."""

    def visit(guest):
        if not guest[0]:
            time.sleep(late)
        try:
            return port_of(rendezvous("127.0.0.1", port, *guest, seconds, 10 + guest[0]))
        except BadInput as error:
            return str(error)

    with ThreadPoolExecutor(len(guests)) as pool:
        return list(pool.map(visit, guests))


@pytest.mark.parametrize("late", [0.0, 1.0])
def test_all_get_process_0_s_port_and_the_agreed_one_is_free(late):
    agreed = free_port()
    for _ in range(2):
        assert meeting(agreed, (0, 3), (1, 3), (2, 3), late=late) == [10] * 3


def test_only_reuse_port_can_listen_on_a_reserved_port():
    with reserved_port() as port:
        for family, host in [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]:
            with pytest.raises(OSError, match="already in use"):
                socket.create_server((host, port), family=family)
        with socket.create_server(("", port), reuse_port=True) as service:
            with socket.create_connection(("127.0.0.1", port), timeout=5), service.accept()[0]:
                pass
    with socket.create_server(("", port)):
        pass


def test_the_connections_end_with_the_process():
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        guests = [pool.submit(rendezvous, "127.0.0.1", port, index, 3, 10, 9) for index in (1, 2)]
        _, lines = rendezvous("127.0.0.1", port, 0, 3, 10, 9)
        (_, one), (_, two) = (guest.result() for guest in guests)
    assert sorted(lines) == [1, 2] and all(map(is_open, (*lines.values(), one[0], two[0])))
    two[0].close()
    assert is_open(lines[1]) and not is_open(lines[2])
    lines[1].close()
    assert not is_open(one[0])
    one[0].close()
    lines[2].close()


def test_missing_processes_are_named():
    port = free_port()
    first, second = meeting(port, (0, 4), (2, 4), seconds=0.5)
    assert first == second and "these are missing: 1, 3;" in first and str(port) in first
    (alone,) = meeting(port, (1, 2), seconds=0.5)
    assert (
        f"process 1 of 2 waited 0.5 s for process 0 at 127.0.0.1:{port} (Connection refused)"
        in alone
    )


def test_a_wrong_world_size_is_an_error_for_all():
    first, second = meeting(free_port(), (0, 2), (1, 3))
    assert first == second
    assert "process 1 was started as one of 3 but process 0 as one of 2" in first


def test_a_duplicate_rank_is_refused_and_the_others_connect():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        two = pool.submit(meeting, port, (0, 3), (1, 3))
        time.sleep(1)
        assert "another process is process 1 of 3 already" in said(
            lambda: rendezvous("127.0.0.1", port, 1, 3, 10, 9)
        )
        third = port_of(rendezvous("127.0.0.1", port, 2, 3, 10, 9))
        assert two.result() == [third, third]


def test_a_process_that_died_while_waiting_is_replaced():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(rendezvous, "127.0.0.1", port, 0, 3, 20, 9)
        time.sleep(0.5)
        with socket.create_connection(("127.0.0.1", port)) as dead:
            dead.sendall(b'{"greeting": "jspeed 1", "index": 1, "count": 3}\n')
        assert meeting(port, (1, 3), (2, 3)) == [port_of(first.result())] * 2


def test_a_port_that_is_taken_or_serves_something_else():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"cannot listen on port {port} (Address already in use)" in said(
            lambda: rendezvous("", port, 0, 2, 5, 9)
        )

        def answer():
            with suppress(OSError):  # when the test is over
                for _ in range(50):
                    with other.accept()[0] as guest:
                        guest.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        threading.Thread(target=answer, daemon=True).start()
        assert "(another service answers there)" in said(
            lambda: rendezvous("127.0.0.1", port, 1, 2, 0.5, 9)
        )


def test_a_proxy_passes_bytes_and_outlives_its_far_end():
    port = free_port()
    near = socket.create_connection(("127.0.0.1", proxy("127.0.0.1", port)))
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


def test_the_far_end_of_a_proxy_hears_the_near_one_end():
    with socket.create_server(("127.0.0.1", 0)) as service:
        with socket.create_connection(
            ("127.0.0.1", proxy("127.0.0.1", service.getsockname()[1]))
        ) as near:
            far = service.accept()[0]
            near.sendall(b"last words")
        far.settimeout(5)
        with far:
            assert far.recv(100) == b"last words" and far.recv(1) == b""


HOSTILE = {
    "4,000 brackets": b"[" * 4000 + b"\n",
    "a rank below 0": b'{"greeting": "jspeed 1", "token": "", "index": -5, "count": 2}\n',
    "a rank of 31 digits": b'{"greeting": "jspeed 1", "token": "", "index": 1%s, "count": 2}\n'
    % (b"0" * 30),
    "a rank that is none": b'{"greeting": "jspeed 1", "token": "", "index": true, "count": 2}\n',
    "rank 0": b'{"greeting": "jspeed 1", "token": "", "index": 0, "count": 2}\n',
    "no end": b"a" * 9000,
    "other text": b"GET / HTTP/1.1\r\n\r\n",
    "no rank": b'{"greeting": "jspeed 1"}\n',
    "nothing": b"",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_client_is_no_peer_and_ends_nothing(what):
    agreed = free_port()
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(rendezvous, "127.0.0.1", agreed, 0, 2, 20, 10)
        for _ in range(50):
            with suppress(OSError), socket.create_connection(("127.0.0.1", agreed), 1) as client:
                client.sendall(HOSTILE[what])
                break
            time.sleep(0.1)
        one = pool.submit(rendezvous, "127.0.0.1", agreed, 1, 2, 20, 11)
        assert port_of(zero.result()) == port_of(one.result()) == 10


def test_clients_that_say_little_do_not_keep_others_waiting():
    agreed = free_port()
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(rendezvous, "127.0.0.1", agreed, 0, 2, 20, 10)
        time.sleep(0.5)
        slow = [socket.create_connection(("127.0.0.1", agreed), 5) for _ in range(30)]
        for client in slow:
            client.sendall(b"{")
        began = time.monotonic()
        port_of(rendezvous("127.0.0.1", agreed, 1, 2, 20, 11))
        assert time.monotonic() - began < 4
        port_of(zero.result())
        for client in slow:
            client.close()


def test_a_process_with_another_token_is_no_peer(monkeypatch):
    agreed, port = free_port(), "127.0.0.1"
    monkeypatch.setenv("JSPEED_RENDEZVOUS_TOKEN", "secret")
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(rendezvous, port, agreed, 0, 2, 20, 10)
        time.sleep(0.5)
        with socket.create_connection((port, agreed), 5) as impostor:
            impostor.sendall(b'{"greeting": "jspeed 1", "token": "", "index": 1, "count": 2}\n')
            assert impostor.recv(10) == b""
        one = pool.submit(rendezvous, port, agreed, 1, 2, 20, 11)
        assert port_of(zero.result()) == port_of(one.result()) == 10


def test_where_all_are_on_one_machine_nobody_else_can_ask():
    agreed = free_port()
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(rendezvous, "127.0.0.1", agreed, 0, 2, 2, 10)
        time.sleep(0.5)
        own = socket.gethostbyname(socket.gethostname())
        if not own.startswith("127."):
            with pytest.raises(OSError):
                socket.create_connection((own, agreed), 1)
        with pytest.raises(BadInput):
            zero.result()
