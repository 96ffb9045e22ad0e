"""What ``jspeed doctor`` says of the host, of files of a machine that is made up."""

import pytest

from jspeed.doctor import host


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def link(number, now, most="32.0 GT/s PCIe", kind="0x030200"):
    folder = f"sys/bus/pci/devices/0000:{number:02x}:00.0"
    return {
        f"{folder}/class": kind,
        f"{folder}/current_link_speed": now,
        f"{folder}/current_link_width": "16",
        f"{folder}/max_link_speed": most,
        f"{folder}/max_link_width": "16",
    }


def test_each_thing_that_the_system_says_is_a_line(tmp_path):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/all/own",
            "sys/fs/cgroup/all/own/memory.max": "max",
            "sys/fs/cgroup/all/memory.max": "128000000000",
            "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:       250000000 kB",
            "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       125000000 kB",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "7",
            "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "0",
            **link(1, "32.0 GT/s PCIe"),
            **link(2, "32.0 GT/s PCIe"),
            **link(3, "2.5 GT/s PCIe"),
            **link(4, "8.0 GT/s PCIe", kind="0x020000"),  # a network adapter
            **link(5, "Unknown"),
        },
    )
    assert [text for label, text in host.rows(host.facts(tmp_path)) if not label] == [
        "128.00 GB of memory by its control group",
        "2 NUMA nodes: 128.00 GB, 256.00 GB",
        "transparent large pages: madvise; reserved: 7 of 2.1 MB",
        "2 x PCI Express to a device: 32 GT/s x16, 63.0 GB/s each way",
        "PCI Express to a device: 2.5 GT/s x16, 4.0 GB/s each way; at most 32 GT/s x16, 63.0 GB/s"
        " each way",
    ]


def test_nothing_is_said_where_the_system_says_nothing(tmp_path):
    assert host.rows(host.facts(tmp_path)) == []


@pytest.mark.parametrize(("limit", "found"), [("9000", 9000), (str(2**63 - 4096), None)])
def test_the_limit_of_a_control_group_of_version_1(tmp_path, limit, found):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/1\n3:cpuset:/docker/1\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": limit,
        },
    )
    assert host.facts(tmp_path)["memory_limit"] == found
