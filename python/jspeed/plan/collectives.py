"""What a plan says of every collective: bytes, mesh axis, and the compute that hides it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
    """Name the mesh axis (or axes, with a comma) along which the members of a replica group differ."""
    coordinates = np.unravel_index(collective.members, tuple(mesh.values()))
    varying = [axis for axis, places in zip(mesh, coordinates, strict=True) if len(set(places)) > 1]
    return ",".join(varying) or next(iter(mesh))
