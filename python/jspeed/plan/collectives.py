"""What a plan says of every collective: bytes, mesh axis, and the compute that hides it."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jspeed.plan import hlo, predict
from jspeed.plan.compile import Hardware
from jspeed.plan.cost import Kernel


def describe_collectives(
    kernels: Sequence[Kernel], times: Mapping[int, tuple[float, float]], hardware: Hardware
) -> list[dict[str, Any]]:
    """Every collective, in schedule order; ``times`` as :func:`jspeed.plan.predict.times` returns it."""
    found = []
    for index, (takes, exposed) in times.items():
        kernel = kernels[index]
        collective = kernel.collective
        assert collective
        beside = [k for k in kernels[index + 1 : kernel.until] if not k.collective]
        found.append(
            {
                "kind": collective.kind,
                "bytes": collective.bytes,
                "axis": axis_of(collective, dict(hardware.mesh.shape)),
                "group": collective.group,
                "async": collective.overlaps,
                "count": kernel.times,
                "dtype": collective.arrays[0].dtype,
                "ms": 1e3 * takes / kernel.times,
                "compute_ms_between": 1e3 * sum(max(predict.kernel_seconds(k, hardware.cluster.facts)) for k in beside),
                "exposed_ms": 1e3 * exposed / kernel.times,
                "source": hlo.short(collective.instruction.source),
            }
        )
    return found


def axis_of(collective: hlo.Collective, mesh: Mapping[str, int]) -> str:
    """Name the mesh axis (or axes, with a comma) of a collective, by the size and stride of its replica groups."""
    if collective.group == math.prod(mesh.values()):
        return ",".join(axis for axis, size in mesh.items() if size > 1) or next(iter(mesh))
    named = [axis for axis, size in mesh.items() if size == collective.group]
    members = re.search(r"\{\{(\d+),(\d+)", collective.instruction.attributes)
    if len(named) > 1 and members:
        stride, axes = int(members[2]) - int(members[1]), list(mesh)
        named = [axis for axis in named if math.prod(list(mesh.values())[axes.index(axis) + 1 :]) == stride] or named
    return named[0] if named else "unknown"
