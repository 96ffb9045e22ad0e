"""Where process 0 is: hosts, ports, HOST:PORT, and the first host of Slurm's node list. No jax here."""

import re
import subprocess
from contextlib import suppress
from ipaddress import IPv6Address

from jspeed.errors import BadInput

HOST = "a host's name or address, such as node0, 10.0.0.1 or fd00::1"


def host(text: str) -> str | None:
    """Return the host in ``text``, an IPv6 address without its brackets; None for what no socket accepts as a host."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        if ":" in bare:
            IPv6Address(bare)  # also with a zone: fe80::1%eth0
        elif bare != text or not re.fullmatch(r"[\w.-]+", bare):
            return None
        else:
            bare.encode("idna")
    except ValueError:  # UnicodeError, of a name that IDNA refuses, is one
        return None
    return bare


def port(text: str) -> int | None:
    """Return the port in ``text``; None for anything else."""
    return int(text) if re.fullmatch("[0-9]{1,5}", text) and 0 < int(text) < 65_536 else None


def joined(host_name: str, host_text: str, port_name: str, port_text: str) -> str:
    """Return HOST:PORT, an IPv6 address in brackets. Raises :class:`BadInput` naming what is no host or no port."""
    found = host(host_text)
    if found is None:
        raise BadInput(f"{host_name} is {host_text!r}; expected {HOST}, without a port")
    if port(port_text) is None:
        raise BadInput(f"{port_name} is {port_text!r}; expected a port from 1 to 65535")
    return f"[{found}]:{port_text}" if ":" in found else f"{found}:{port_text}"


def host_and_port(name: str, text: str) -> str:
    """Return ``text``, the value of ``name``. Raises :class:`BadInput` when it is not HOST:PORT or [IPv6]:PORT."""
    where, _, number = text.rpartition(":")
    if host(where) is None or port(number) is None or (":" in where and where[0] != "["):
        raise BadInput(
            f"{name} {text!r} is not HOST:PORT; write for example 10.0.0.1:29500, and brackets around an IPv6 address, "
            "whose end could be the port: [::1]:29500"
        )
    return text


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's ``nodes``, such as n[08-11,3]b[0-1],c: n08b0.

    ``scontrol`` expands it; where it is missing or refuses, the first choice in every bracket is the first host.
    """
    with suppress(OSError, subprocess.SubprocessError):
        command = ["scontrol", "show", "hostnames", nodes]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
        if shown:
            return shown[0]
    first = re.fullmatch(r",*((?:[^][,]|\[[^][]+\])+)(?:,.*)?", nodes)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[1]) if first else nodes
