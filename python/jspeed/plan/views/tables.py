"""A plan as tables of text."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jspeed.plan.schema import MicroBatch, Plan, Time
from jspeed.plan.views.formatting import (
    NONE,
    array,
    fullest,
    memory_by_kind,
    number,
    percent,
    range_text,
    shape,
    size,
)

DIGITS = re.compile(r"(under )?[-+]?[\d,.]+(e[-+]?\d+)?( (to [\d,.]+|x [\d,.]+|[kMG]?B|ms|%))*")


class Table(NamedTuple):
    """Title, names of the columns, rows of text, and a note."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @property
    def numeric(self) -> list[bool]:
        """Whether a column holds numbers, for each of them."""
        return [
            all(cell in (NONE, "") or DIGITS.fullmatch(cell) for cell in column)
            for column in zip(*self.rows, strict=True)
        ]


def stages(plan: Plan) -> Table:
    """Return milliseconds, memory and work of every stage."""
    head = ["stage", "steps", "tokens", "predicted ms", "compute", "memory", "comm.", "exposed", "idle", "peak",
            "TFLOPs", "moved", "micro-batch"]  # fmt: skip
    kinds: tuple[Time, ...] = ("compute", "memory", "communication", "exposed_communication")
    rows = [
        [re.sub(", step (.) of (.)", r" (\1/\2)", s["name"]) + " *" * (not s["compiled"]),
         f"{s['steps']:,}", f"{s['tokens_per_step']:,}",
         range_text(s["predicted_ms"]), *(number(s["time_ms"][kind]) for kind in kinds),
         number(s["time_ms"]["launches"] + s["time_ms"]["empty_blocks"]),
         size(s["memory_bytes"]["peak"]), number(s["flops"], 1e12), size(s["bytes_moved"]),
         f"{micro_batch(s)} x {s['micro_batches']:,}"]
        for s in plan["stages"]
    ]  # fmt: skip
    note = (
        "One device, one step, milliseconds; (1/2) is the first of two. Compute and memory are compute-bound and "
        "memory-bound kernels. Idle: between kernels, which is part of the roofline as is exposed communication, and "
        "in blocks of attention that find nothing to do. Peak: of memory. micro-batch: tokens x number; in parentheses "
        "the tokens of a head-loss chunk; remat: layers are recomputed. *: shares another program, or adds several up."
    )
    return Table("stages", head, rows, note)


def tables(plan: Plan) -> Iterator[Table]:
    """Yield the other tables, in the order of the page."""
    stage, device = fullest(plan), plan["device_memory_bytes"]
    limits = {"peak": stage["memory_bytes"]["peak"], "JAX may take": plan["memory_limit_bytes"], "a device has": device}
    memory = memory_by_kind(plan) | limits
    rows = [[kind, size(value), percent(value, device)] for kind, value in memory.items()]
    yield Table(f"memory of one device, {stage['name']}", ["kind", "size", "of the device"], rows)
    rows = [[size(b["bytes"]), array(b), b["source"] or NONE, b["op"] or NONE] for b in stage["largest_buffers"]]
    yield Table("largest buffers", ["buffer", "array", "source", "from"], rows)
    yield searched(plan)
    if before := plan.get("against"):
        yield compared("against another recipe", before, plan, "One device, means over all steps.")
    yield by_stage(plan, "TFLOPs by part of the model", "flops_by_part", note="One device, one step.")
    yield by_stage(plan, "TFLOPs by dtype", "flops_by_dtype")
    head = ["source", "name", "dtype", "shape", "times", "TFLOPs", "redundancy"]
    rows = [
        [m["source"] or NONE, m["name"], m["dtype"], shape(m["shape"]), f"{m['count']:,}", number(m["flops"], 1e12),
         number(m["redundancy"])]
        for m in plan["matmuls"]
    ]  # fmt: skip
    yield Table("matmuls", head, rows, "Redundancy: FLOPs of all devices over the FLOPs that the matmul needs.")
    yield by_stage(plan, "kernels", "kernels", "{:,}".format)
    yield collectives(plan)
    head = ["recipe", "measured ms", "predicted", "error", "", "source"]
    rows = [
        [c["recipe"], number(c["measured_ms"]), range_text(c["predicted_ms"], "ms"), percent(c["error"], 1),
         "fitted" if c["used_to_fit"] else "held out", c["source"]]
        for c in plan["calibration"]
    ]  # fmt: skip
    yield Table("predictions against measured steps", head, rows)
    rows = [[kind.replace("_", " "), percent(share, 1)] for kind, share in plan["fractions"].items()]
    yield Table("assumed fraction of the peak", ["kind", "share"], rows)
    yield facts(plan["facts"])


def searched(plan: Plan) -> Table:
    """Return the layouts and micro-batches of a search."""
    head = ["layout", "mesh", "micro-batch", "peak memory", "fits", "predicted step"]
    rows = [
        [s["layout"], ", ".join(f"{axis}={n}" for axis, n in s["mesh"].items()), micro_batch(s), size(s["peak_bytes"]),
         yes_no(s["fits"]), range_text(s["predicted_ms"], "ms") if s["predicted_ms"] else NONE]
        for s in plan.get("search", ())
    ]  # fmt: skip
    return Table("layouts and micro-batches tried", head, rows, "Best first.")


def by_stage(
    plan: Plan,
    title: str,
    key: Literal["flops_by_part", "flops_by_dtype", "kernels"],
    show: Callable[[float], str] = lambda flops: number(flops, 1e12),
    note: str = "",
) -> Table:
    """Return a table with a row for every stage and a column for everything that any stage has under ``key``."""
    names = list(dict.fromkeys(name for stage in plan["stages"] for name in stage[key]))
    rows = [[s["name"], *(show(s[key][n]) if n in s[key] else NONE for n in names)] for s in plan["stages"]]
    return Table(title, ["stage", *(name.replace("_", " ") for name in names)], rows if names else [], note)


def collectives(plan: Plan) -> Table:
    """Return the collectives of every stage that has others than those before it."""
    head = ["stage", "kind", "axis", "times", "bytes", "dtype", "asynchronous", "ms", "overlapping ms",
            "exposed ms", "source"]  # fmt: skip
    rows, seen = [], []
    for stage in plan["stages"]:
        same = [(c["kind"], c["axis"], c["count"], c["bytes"], c["dtype"], c["async"]) for c in stage["collectives"]]
        if same not in seen:
            seen.append(same)
            rows += [
                [stage["name"], c["kind"], c["axis"], f"{c['count']:,}", size(c["bytes"]), c["dtype"],
                 yes_no(c["async"]), number(c["ms"]), number(c["compute_ms_between"]), number(c["exposed_ms"]),
                 c["source"] or NONE]
                for c in stage["collectives"]
            ]  # fmt: skip
    listed = {row[0] for row in rows}
    note = "A stage that is not listed has the same collectives as one that is."
    return Table("collectives", head, rows, note if len(listed) < len(plan["stages"]) else "")


def facts(found: Mapping[str, Any]) -> Table:
    """Return the device's facts, each with its source."""
    rows = []
    for name, value in found.items():
        if name != "sources":
            each = [f"{k} {number(v)}" for k, v in value.items()] if isinstance(value, dict) else [number(value)]
            rows.append([name.replace("_", " "), ", ".join(each), found["sources"].get(name, NONE)])
    return Table("facts of the device", ["fact", "value", "source"], rows)


def compared(title: str, before: Plan, after: Plan, note: str = "") -> Table:
    """Return :func:`changes` as text."""
    rows = []
    for name, old, new in changes(before, after):
        same = math.isclose(old, new, rel_tol=1e-4, abs_tol=1e-6)
        ratio = "" if same else f"{new / old - 1:+.1%}" if old else "new"
        rows.append([name, _text(old), _text(new), "" if same else _text(new - old, "+"), ratio])
    return Table(title, ["a device", before["recipe"], after["recipe"], "change", "%"], rows, note)


def changes(before: Plan, after: Plan) -> list[tuple[str, float, float]]:
    """Return (what, before, after), means over the steps of all stages."""
    parts = dict.fromkeys(part for plan in (before, after) for part in plan["stages"][-1]["flops_by_part"])
    old, new = (_values(plan, parts, after["stages"][-1]["kernels"]) for plan in (before, after))
    return [(name, old[name], new[name]) for name in new]


def _values(plan: Plan, parts: Iterable[str], kinds: Iterable[str]) -> dict[str, float]:
    """What is compared of a plan, with the FLOPs of these ``parts`` and the numbers of kernels of these ``kinds``."""
    stages = plan["stages"]
    steps = sum(stage["steps"] for stage in stages)

    def mean(values: Iterable[float]) -> float:
        return sum(stage["steps"] * value for stage, value in zip(stages, values, strict=True)) / steps

    return {
        "parameters": plan["parameters"],
        "steps": steps,
        "tokens a step": mean(stage["tokens_per_step"] for stage in stages),
        "TFLOPs": mean(stage["flops"] for stage in stages) / 1e12,
        **{
            f"TFLOPs of {part}": mean(stage["flops_by_part"].get(part, 0.0) for stage in stages) / 1e12
            for part in parts
        },
        "GB moved": mean(stage["bytes_moved"] for stage in stages) / 1e9,
        "GB communicated": mean(sum(c["bytes"] * c["count"] for c in stage["collectives"]) for stage in stages) / 1e9,
        **{f"{kind} kernels": mean(stage["kernels"].get(kind, 0) for stage in stages) for kind in kinds},
        "GB peak": fullest(plan)["memory_bytes"]["peak"] / 1e9,
        "compute ms": mean(stage["time_ms"]["compute"] for stage in stages),
        "memory ms": mean(stage["time_ms"]["memory"] for stage in stages),
        "exposed communication ms": mean(stage["time_ms"]["exposed_communication"] for stage in stages),
        "launch ms": mean(stage["time_ms"]["launches"] for stage in stages),
        "empty blocks ms": mean(stage["time_ms"]["empty_blocks"] for stage in stages),
        "predicted ms, low": plan["predicted_step_ms"][0],
        "seconds to target, low": plan["predicted_seconds"][0],
        "predicted ms, high": plan["predicted_step_ms"][1],
        "seconds to target, high": plan["predicted_seconds"][1],
    }


def _text(value: float, sign: str = "") -> str:
    return f"{value:{sign},.0f}" if value == round(value) or abs(value) >= 1e4 else f"{value:{sign},.3f}"


def yes_no(value: bool) -> str:
    """Return ``yes`` or ``no``."""
    return "yes" if value else "no"


def micro_batch(row: MicroBatch) -> str:
    """Return the tokens of a micro-batch, those of a head-loss chunk in parentheses, and whether remat is on."""
    chunk = row.get("head_chunk")
    return f"{row['micro_batch_tokens']:,}" + (f" ({chunk:,})" if chunk else "") + ", remat" * row.get("remat", False)
