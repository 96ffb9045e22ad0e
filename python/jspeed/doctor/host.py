"""The host of the devices by Linux's files: memory that its control groups allow, NUMA nodes, large
pages, links to the devices. What the system does not say is left out."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jspeed.base.accelerators import text_of
from jspeed.base.cores import control_groups
from jspeed.base.numbers import size

DEVICES = ("0x03", "0x12")  # PCI classes: displays, and accelerators of other kinds
# bits of a transfer that carry data: 8 of 10 up to 5 GT/s, then 128 of 130; 6.0 counts as before
SLOW_LINKS = 5.0  # GT/s


def facts(root: Path = Path("/")) -> dict[str, Any]:
    """Return what is known of the host whose files are under ``root``; sizes in bytes, speeds in
    GT/s, None and empty lists where the system says nothing."""
    return {
        "memory_limit": min(limits(root), default=None),
        "numa_nodes": numa_nodes(root),
        "pages": pages(root),
        "links": links(root),
    }


def limits(root: Path) -> Iterator[int]:
    """Yield the limit on memory of each control group of this process, version 2 or 1."""
    for kind, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        for group in control_groups(root, kind):
            limit = text_of(group / name)
            # without a limit version 2 says "max", and version 1 almost 2**63
            if limit.isdecimal() and int(limit) < 2**62:
                yield int(limit)


def numa_nodes(root: Path) -> list[int]:
    """Return the memory of each NUMA node."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    found = []
    for folder in sorted(folders, key=lambda one: int(one.name.removeprefix("node"))):
        if total := re.search(r"MemTotal:\s+(\d+) kB", text_of(folder / "meminfo")):
            found.append(1024 * int(total[1]))
    return found


def pages(root: Path) -> dict[str, Any] | None:
    """Return how the kernel gives large pages by itself, and how many are reserved by size."""
    offered = text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if not (chosen := re.search(r"\[(\w+)\]", offered)):
        return None
    reserved = {}
    for folder in sorted((root / "sys/kernel/mm/hugepages").glob("hugepages-*kB")):
        count = text_of(folder / "nr_hugepages")
        if count.isdecimal() and int(count):
            reserved[1024 * int(folder.name[len("hugepages-") : -len("kB")])] = int(count)
    return {"transparent": chosen[1], "reserved": reserved}


def links(root: Path) -> list[dict[str, Any]]:
    """Return the PCI Express link of each display or accelerator: speed and lanes, now and at
    most."""
    found = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if not text_of(folder / "class").startswith(DEVICES):
            continue
        link: dict[str, Any] = {"device": folder.name}
        for when, key in (("current", "now"), ("max", "most")):
            speed = re.match(r"([\d.]+) GT/s", text_of(folder / f"{when}_link_speed"))
            lanes = text_of(folder / f"{when}_link_width")
            if speed and lanes.isdecimal() and int(lanes):
                link[key] = {"speed": float(speed[1]), "lanes": int(lanes)}
        if "now" in link:
            found.append(link)
    return found


def bytes_per_second(speed: float, lanes: int) -> float:
    """Return what a link carries each way: data bits of all transfers, without packets' headers."""
    return speed * 1e9 / 8 * lanes * (0.8 if speed <= SLOW_LINKS else 128 / 130)


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a label and a text for each line on ``found``, the facts of a host."""
    listed = []
    if found["memory_limit"]:
        listed.append(("", f"{size(found['memory_limit'])} of memory by its control group"))
    if nodes := found["numa_nodes"]:
        each = ", ".join(map(size, nodes))
        listed.append(("", f"{len(nodes)} NUMA node{'s' if len(nodes) > 1 else ''}: {each}"))
    if kinds := found["pages"]:
        reserved = (f"{count} of {size(each)}" for each, count in kinds["reserved"].items())
        text = f"transparent large pages: {kinds['transparent']}"
        listed.append(("", f"{text}; reserved: {', '.join(reserved) or 'none'}"))
    for words, count in Counter(map(link_words, found["links"])).items():
        listed.append(("", f"{count} x {words}" if count > 1 else words))
    return listed


def link_words(link: dict[str, Any]) -> str:
    """Return a link in words; at most is said where it is more, as of a GPU that saves power."""

    def words(speed: float, lanes: int) -> str:
        return f"{speed:g} GT/s x{lanes}, {bytes_per_second(speed, lanes) / 1e9:.1f} GB/s each way"

    most = link.get("most", link["now"])
    more = f"; at most {words(**most)}" if most != link["now"] else ""
    return f"PCI Express to a device: {words(**link['now'])}{more}"
