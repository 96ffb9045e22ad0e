"""Which rows of a table each of several processes has, and which of them a step asks it for.

The rows are cut into as many equal parts as devices divide the batch between, and a process has
those of its devices. Every process reads the whole batch, so nobody sends row numbers: each finds
the rows of its parts that the lanes of every device name. Its devices send them, and get their
gradients, by all-to-alls of the step (:mod:`jspeed.parallel.sharded_table`).
"""

import socket
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from jspeed.base import processes
from jspeed.errors import BadInput
from jspeed.parallel.mesh import batch_lanes
from jspeed.parallel.sharded_table import capacity
from jspeed.recipe import ParamSpec
from jspeed.run.compute.host_tables import owners_of, part_of

LEFT_OUT = -1  # of an update, of a gather


class Share(NamedTuple):
    """What this process has of a batch and of each table: the parts of ``devices`` from ``first``
    on, of all ``owners``; 1 owner has all."""

    owners: int
    first: int
    devices: int

    def rows(self, spec: ParamSpec) -> int:
        """Return how many rows of a table this process has."""
        return self.devices * part_of(spec, self.owners)

    def begin(self, spec: ParamSpec) -> int:
        """Return the first of them."""
        return self.first * part_of(spec, self.owners)

    def lanes(self, of_batch: NDArray[Any]) -> NDArray[Any]:
        """Return this process's rows of an array that has those of a whole batch."""
        each = len(of_batch) // self.owners
        return of_batch[self.first * each : (self.first + self.devices) * each]

    def own(self, spec: ParamSpec, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the numbers that ``rows`` have in this process's share, and :data:`LEFT_OUT` where
        another one has them."""
        number = rows - self.begin(spec)
        return np.where((number >= 0) & (number < self.rows(spec)), number, LEFT_OUT)

    def asked(self, spec: ParamSpec, rows_BI: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return, for each device of this process, the rows that all devices ask it for as lanes
        ``B`` name ``rows_BI``: their numbers in the share, ``[devices, owners x room]``.

        They are those of :func:`jspeed.parallel.sharded_table.requests`, in their order. Raises
        :class:`BadInput` for more than a device has room for.
        """
        if self.owners == 1:
            return rows_BI
        part, lanes = part_of(spec, self.owners), rows_BI.reshape(self.owners, -1)
        room = capacity(lanes.shape[1], part, self.owners)
        found = np.full((self.devices, self.owners, room), LEFT_OUT, np.int32)
        bounds = self.begin(spec) + part * np.arange(self.devices + 1, dtype=np.int32)
        for asking, rows in enumerate(lanes):
            ordered = np.sort(rows)  # sooner than to choose this process's own
            distinct = ordered[np.diff(ordered, prepend=np.int32(LEFT_OUT)) > 0]
            ends = np.searchsorted(distinct, bounds)
            for device, (start, end) in enumerate(pairwise(ends)):
                if end - start > room:
                    raise BadInput(
                        f"lanes of one device name {end - start} different rows of the"
                        f" {part} that another one has, more than the {room} that there is room"
                        " for; rows should be spread like hashes, or start one process for all"
                        " devices"
                    )
                found[device, asking, : end - start] = distinct[start:end] - bounds[0]
        return found.reshape(self.devices, -1)


def share_of(mesh: Mesh) -> Share:
    """Return this process's share on ``mesh``."""
    owners = owners_of(mesh)
    if owners == 1:
        return Share(1, 0, 1)
    places = batch_lanes(mesh).addressable_devices_indices_map((owners,)).values()
    starts = {place[0].start or 0 for place in places if place}
    return Share(owners, min(starts), len(starts))


def neighbours() -> int:
    """Return how many processes of the run share this machine's memory."""
    name = socket.gethostname()
    return processes.gather("machines of tables", name).count(name)
