"""What tables in the host's memory cost a step: bytes over the link, gather, update, and what of
that no computing hides."""

import math
from typing import NamedTuple

from jspeed.errors import BadInput
from jspeed.plan.assumed import Constant
from jspeed.plan.schema import HostRow
from jspeed.plan.target import Cluster
from jspeed.recipe import ParamSpec, Recipe, Stage
from jspeed.run.compute.accumulators import number_due
from jspeed.run.compute.host_tables import BUFFERS

NOTE = "lab/2026-11-28-table-in-the-hosts-memory.md"
# Bytes of rows a second and core, of rows of 768 bf16 numbers that lie anywhere.
GATHER = Constant(3.5e6 * 1536, f"{NOTE}; scaling over cores was not measured")
UPDATE = Constant(1.4e6 * 1536, f"{NOTE}; scaling over cores was not measured")
# Of the look-ups of a step, those of rows that the next one names too; of those since an update,
# those of rows that both its last step and the next one name.
AGAIN = Constant(0.33, f"{NOTE}: 24 to 33 % of 262,144 to 786,432 look-ups in English text")
BOTH = Constant(0.28, f"{NOTE}: 24.7 % where AGAIN is 29.5 %, of four steps of 524,288")
# Look-ups of a batch a second and process, of which it finds those that are of its own rows.
ASKED = Constant(140e6, "lab/2026-11-29-waiting-for-the-host.md: one thread, half of the rows")
NUMBERS = 16  # bytes of a row in use besides weights: square, update, number, slot
FORM = "cores=16,memory=128,link=50"


class Host(NamedTuple):
    """The host of the devices of a node; all ``nodes`` have an equal share of each table, and are
    asked for as many rows."""

    cores: float
    memory_bytes: float
    link_bytes_per_second: float  # of each device, one direction
    nodes: int = 1


def host_of(cluster: Cluster, asked: str | None = None) -> Host | None:
    """Return the usual host of ``cluster``, or with what is ``asked`` of it: ``cores=16``,
    ``memory=128`` (GB), ``link=50`` (GB/s a device), some of them with commas.

    None where the target says nothing and not all three are asked for. Raises :class:`BadInput`.
    """
    share, devices = cluster.target.data_sheet.host, cluster.per_node
    known = {
        "cores": devices * share["cores"],
        "memory": devices * share["memory_bytes"] / 1e9,
        "link": share["link_bytes_per_second"] / 1e9,
    } if share else {}  # fmt: skip
    parts = [] if asked is None else asked.split(",")
    given = dict(part.partition("=")[::2] for part in parts)
    for name, value in given.items():
        try:
            known[name] = float(value)
        except ValueError:
            known[name] = math.nan
        if name not in ("cores", "memory", "link") or not 0 < known[name] < math.inf:
            raise BadInput(
                f"--host {asked}: '{name}={value}' is not cores, memory (GB) or link (GB/s) with a"
                f" number above 0; write for example {FORM}"
            )
    if asked and len(known) < 3:
        raise BadInput(
            f"--host {asked}: nothing is known of the host of {cluster.target.name}; give all of"
            f" {FORM}"
        )
    if not known:
        return None
    sizes = known["cores"], 1e9 * known["memory"], 1e9 * known["link"]
    return Host(*sizes, cluster.nodes)


def row_bytes(spec: ParamSpec) -> int:
    """Return the bytes of a row in use, whose weights are bf16."""
    return 2 * spec.shape[1] + NUMBERS


def table_bytes(spec: ParamSpec) -> int:
    """Return the bytes of a table all of whose rows are in use."""
    return spec.shape[0] * row_bytes(spec)


def buffer_bytes(recipe: Recipe) -> int:
    """Return the bytes that a run keeps besides tables: rows for the devices, and gradients since
    the last update. Where lanes are cut into sub-lanes, which overlap, they are more."""
    return max(
        sum(
            (BUFFERS + spec.updated_after(stage))
            * 2 * spec.shape[1] * spec.sparse_rows * recipe.lanes * stage.lane_len
            for spec in recipe.on_host.values()
        )
        for stage in recipe.stages
    )  # fmt: skip


def exchange(
    recipe: Recipe,
    stage: Stage,
    phase: int,
    tokens: int,
    host: Host,
    devices: int,
    computing: float,
) -> HostRow:
    """Return what the tables take of a host in a step of ``stage``, and what the next step waits
    for.

    Rows are looked up for so many ``tokens``, and ``devices``, those of all hosts, compute for
    ``computing`` seconds. Rows that several hosts send each other are part of that. Each of several
    finds those of its own among the look-ups of all, before it gathers them.

    Between updates the next step's rows are gathered and copied while this one is computed, and
    gradients of the one before copied back. Before an update, rows that this step does not name are
    updated meanwhile, and the next rows gathered that it does not name. After the step gradients
    come back, and change the rows that both steps name. These are gathered, and all go to the
    devices. The rest of the update goes beside the next step.
    """
    due = number_due(recipe, stage, phase)
    rows = moved = since = 0
    searched = sum(tokens * spec.sparse_rows for spec in recipe.on_host.values())
    asked = searched / ASKED if host.nodes > 1 else 0.0
    for spec in recipe.on_host.values():
        its = tokens * spec.sparse_rows // host.nodes
        rows, moved = rows + its, moved + 2 * spec.shape[1] * its
        if due % spec.every == 0:
            since += (phase % spec.updated_after(stage) + 1) * 2 * spec.shape[1] * its
    gather, update = moved / (GATHER * host.cores), since / (UPDATE * host.cores)
    copied = moved / (devices / host.nodes) / host.link_bytes_per_second  # one way
    exposed = max(0.0, asked + gather + copied - computing)
    if since:
        later = BOTH * update + AGAIN * gather
        exposed = max(0.0, update + asked + gather - later - computing) + copied + later + copied
    return {
        "rows": rows,
        "bytes_each_way": moved,
        "asked_ms": 1e3 * asked,
        "gather_ms": 1e3 * gather,
        "copied_ms": 1e3 * copied,
        "update_ms": 1e3 * update,
        "exposed_ms": 1e3 * exposed,
    }
