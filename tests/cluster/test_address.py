"""Hosts, ports and HOST:PORT as users and launchers write them; the first host of a Slurm node
list."""

import os

import pytest

from jspeed.cluster.rank import address, first_host, host_and_port, valid_host

from ..multi_process import said

NOT_HOSTS = [
    "",
    ".",
    "node..1",
    "a" * 64,
    "a b",
    "node0\n",
    "node0:1",
    "http://node0",
    "[node0]",
    "::1::",
    "[::1",
    "\udcff",
]


@pytest.mark.parametrize(
    ("text", "host"),
    [
        *(
            (name, name)
            for name in ("node0", "node_1.svc", "10.0.0.1", "bücher", "a" * 63, "node0.")
        ),
        *((form, "::1") for form in ("::1", "[::1]")),
        *((form, "fe80::1%eth0") for form in ("fe80::1%eth0", "[fe80::1%eth0]")),
        *((text, None) for text in NOT_HOSTS),
    ],
)
def test_what_is_a_host(text, host):
    assert valid_host(text) == host


@pytest.mark.parametrize(
    "text", ["10.0.0.1:29500", "node0:1", "[::1]:29500", "[fe80::1%eth0]:65535"]
)
def test_host_and_port(text):
    assert host_and_port("--coordinator", text) == text


@pytest.mark.parametrize(
    "text",
    [
        "::1:29500",
        "::1",
        "[::1]",
        "node0",
        ":29500",
        "node..1:29500",
        "[node0]:1",
        "http://node0:80",
        "",
        "node0:29500\n",
    ]
    + [f"node0:{port}" for port in ("", "²", "0", "65536", "http", "-1", "9" * 5000)],
)
def test_what_is_no_address_shows_how_to_write_ipv6(text):
    message = said(lambda: host_and_port("--coordinator", text))
    assert message.startswith(f"--coordinator {text!r} is not HOST:PORT")
    assert "[::1]:29500" in message


@pytest.mark.parametrize(
    ("host", "both"), [("::1", "[::1]:29500"), ("[::1]", "[::1]:29500"), ("node0", "node0:29500")]
)
def test_a_host_and_a_port_are_joined(host, both):
    assert address("MASTER_ADDR", host, "MASTER_PORT", "29500") == both


@pytest.mark.parametrize("host", NOT_HOSTS)
def test_a_pair_without_a_host_is_an_error(host):
    message = said(lambda: address("MASTER_ADDR", host, "MASTER_PORT", "29500"))
    assert message.startswith(f"MASTER_ADDR is {host!r}; expected a host's name or address")


@pytest.mark.parametrize("port", ["0", "65536", "tcp://10.0.0.1:1", ""])
def test_a_pair_without_a_port_is_an_error(port):
    message = said(lambda: address("MASTER_ADDR", "node0", "MASTER_PORT", port))
    assert message == f"MASTER_PORT is {port!r}; expected a port from 1 to 65535"


# What scontrol of Slurm 22.05 shows, but for text after the last bracket, which it refuses.
LISTS = {
    "node7": "node7",
    "node7,other[1-2]": "node7",
    "n[08-11,3]": "n08",
    "n[3,08-11]": "n3",
    "[1-2]": "1",
    "x1000c0s[0-3]b0n[0-1]": "x1000c0s0b0n0",
    "a[1,3-4]b[02-03],c": "a1b02",
    "a[1-2][3-4]": "a13",
    "tux[5,1-2]x[4,3]": "tux5x4",
    ",n1": "n1",
    "n[1-2],": "n1",
    "node[1-2]-ib": "node1-ib",
    "n[0-1]-[5-6]-ib0.site": "n0-5-ib0.site",
}


@pytest.mark.parametrize("nodes", LISTS)
def test_the_first_host_of_a_node_list(nodes, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert first_host(nodes) == LISTS[nodes]


@pytest.mark.parametrize("nodes", ["", ",", "n[]", "n[1", "n[[1-2]]", "n[]x]"])
def test_what_is_no_node_list_is_no_host(nodes, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert valid_host(first_host(nodes)) is None


@pytest.mark.parametrize(
    ("ends", "host"), [("echo base36x0; echo more", "base36x0"), ("exit 1", "n1"), ("true", "n1")]
)
def test_scontrol_expands_a_list_where_it_is(ends, host, monkeypatch, tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] || exit 1\n{ends}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + "/bin")
    assert first_host("n[1-2]") == host
