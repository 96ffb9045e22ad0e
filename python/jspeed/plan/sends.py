"""What a plan says of every exchange between devices: what it sends along which axis, and what hides it."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jspeed.plan import hlo, predict
from jspeed.plan.compile import Rented
from jspeed.plan.cost import Kernel


def describe_sends(
    kernels: Sequence[Kernel], sends: Mapping[int, tuple[float, float]], rented: Rented
) -> list[dict[str, Any]]:
    """Every exchange between devices, in order."""
    found = []
    for place, (takes, late) in sends.items():
        kernel = kernels[place]
        exchange = kernel.collective
        assert exchange
        beside = [k for k in kernels[place + 1 : kernel.until] if not k.collective]
        found.append(
            {
                "kind": exchange.kind,
                "bytes": exchange.bytes,
                "axis": axis_of(exchange, dict(rented.mesh.shape)),
                "group": exchange.group,
                "async": exchange.overlaps,
                "count": kernel.times,
                "dtype": exchange.arrays[0].dtype,
                "ms": 1e3 * takes / kernel.times,
                "compute_ms_between": 1e3 * sum(max(predict.kernel_seconds(k, rented.cluster.facts)) for k in beside),
                "exposed_ms": 1e3 * late / kernel.times,
                "source": hlo.short(exchange.instruction.source),
            }
        )
    return found


def axis_of(exchange: hlo.Collective, mesh: Mapping[str, int]) -> str:
    """Name the mesh axis (or axes, with a comma) that an exchange goes along, by its size and its stride."""
    if exchange.group == math.prod(mesh.values()):
        return ",".join(axis for axis, size in mesh.items() if size > 1) or next(iter(mesh))
    named = [axis for axis, size in mesh.items() if size == exchange.group]
    members = re.search(r"\{\{(\d+),(\d+)", exchange.instruction.attributes)
    if len(named) > 1 and members:
        stride, axes = int(members[2]) - int(members[1]), list(mesh)
        named = [axis for axis in named if math.prod(list(mesh.values())[axes.index(axis) + 1 :]) == stride] or named
    return named[0] if named else "unknown"
