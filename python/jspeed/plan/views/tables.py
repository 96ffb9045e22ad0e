"""A plan as tables of text. The columns of a table are the fields of its rows
(:mod:`jspeed.plan.schema`)."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jspeed.base.numbers import NONE, si, size
from jspeed.plan.schema import MicroBatch, Plan, StagePlan

UNITS = (("days", 86_400, 172_800), ("hours", 3_600, 3_600), ("s", 1, 0))  # seconds; used from
DIGITS = re.compile(r"(under )?[-+]?[\d,.]+( ?[kMGTP]?B?| %)(( to | x )[\d,.]+)*")


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


def listing(title: str, rows: Sequence[Mapping[str, Any]], note: str = "") -> Table:
    """Return rows of a plan as a table that has a column for each field that any of them has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[text(name, row.get(name)) for name in names] for row in rows]
    return Table(title, [name.replace("_", " ") for name in names], cells, note)


def text(name: str, value: Any) -> str:
    """Return the value of the field ``name`` as text. Bytes are known by the name, everything else
    by the type."""
    match value:
        case None | "":
            return NONE
        case bool():
            return "yes" if value else "no"
        case str():
            return value
        case dict():
            return ", ".join(f"{key}={text(key, inner)}" for key, inner in value.items())
        case list():
            return (
                range_text(value) if name.startswith("predicted") else " x ".join(map(str, value))
            )
    return size(value) if "bytes" in name else number(value)


def stages(plan: Plan) -> Table:
    """Return milliseconds, memory and work of every stage."""
    rows = [
        {
            "stage": (
                re.sub(", step (.) of (.)", r" (\1/\2)", stage["name"])
                + " *" * (not stage["compiled"])
            ),
            "steps": stage["steps"],
            "tokens": stage["tokens_per_step"],
            "predicted ms": stage["predicted_ms"],
            "compute": stage["time_ms"]["compute"],
            "memory": stage["time_ms"]["memory"],
            "comm.": stage["time_ms"]["communication"],
            "exposed": stage["time_ms"]["exposed_communication"],
            "idle": stage["time_ms"]["launches"] + stage["time_ms"]["empty_blocks"],
            "peak": size(stage["memory_bytes"]["peak"]),
            "FLOPs": stage["flops"],
            "moved": size(stage["bytes_moved"]),
            "micro-batch": f"{micro_batch(stage)} x {stage['micro_batches']:,}",
        }
        for stage in plan["stages"]
    ]
    note = (
        "One device, one step, milliseconds; (1/2) is the first of two. Compute and memory are"
        " compute-bound and memory-bound kernels. Idle: between kernels, which is part of the"
        " roofline as is exposed communication, and in blocks of attention that find nothing to do."
        " Peak: of memory. micro-batch: tokens x number; in parentheses the tokens of a head-loss"
        " chunk; remat: layers are recomputed. *: shares another program."
    )
    return listing("stages", rows, note)


def tables(plan: Plan) -> Iterator[Table]:
    """Yield the other tables, in the order of the page."""
    stage, device = fullest(plan), plan["device_memory_bytes"]
    limits = {
        "peak": stage["memory_bytes"]["peak"],
        "JAX may take": plan["memory_limit_bytes"],
        "a device has": device,
    }
    rows: list[dict[str, Any]] = [
        {"kind": kind, "size": size(value), "of the device": percent(value, device)}
        for kind, value in {**memory_by_kind(plan), **limits}.items()
    ]
    yield listing(f"memory of one device, {stage['name']}", rows)
    yield on_host(plan)
    yield listing("largest buffers", stage["largest_buffers"])
    yield searched(plan)
    if before := plan.get("against"):
        yield compared(before, plan)
    yield by_stage(plan, "FLOPs by part of the model", "flops_by_part", "One device, one step.")
    yield by_stage(plan, "FLOPs by dtype", "flops_by_dtype")
    yield listing(
        "matmuls",
        plan["matmuls"],
        "Redundancy: FLOPs of all devices over the FLOPs that the matmul needs.",
    )
    yield by_stage(plan, "kernels", "kernels")
    rows = [
        {"term": row["term"], "seconds": row["seconds"], "share": f"{row['share']:.1%}",
         "guessed": f"{row['guessed']:.1%}"}
        for row in plan["terms"]
    ]  # fmt: skip
    yield listing("seconds by term", rows, "Guessed: share of the run that nobody has measured.")
    yield collectives(plan)
    yield listing("predictions against measured steps", plan["calibration"])
    yield listing("numbers of the cost model", plan["constants"])
    facts, sources = plan["facts"], plan["facts"]["sources"]
    rows = [
        {"fact": name.replace("_", " "), "value": text("", value), "source": sources.get(name)}
        for name, value in facts.items()
        if name != "sources"
    ]
    yield listing("facts of the device", rows)


def on_host(plan: Plan) -> Table:
    """Return what tables in the host's memory take in each step; without rows where none is
    there."""
    rows = [{"stage": stage["name"], **row} for stage in plan["stages"] if (row := stage["host"])]
    note = (
        "One step. Between updates gather and copy of the next rows run beside computing. After an"
        " update gradients are copied back, rows updated, the next ones gathered and copied: all"
        " exposed."
    )
    return listing("table on the host", rows, note)


def searched(plan: Plan) -> Table:
    """Return the layouts and micro-batches of a search."""
    return listing("layouts and micro-batches tried", plan.get("search", []), "Best first.")


def by_stage(
    plan: Plan,
    title: str,
    key: Literal["flops_by_part", "flops_by_dtype", "kernels"],
    note: str = "",
) -> Table:
    """Return a table with a row for every stage and a column for everything that any stage has
    under ``key``."""
    return listing(
        title, [{"stage": stage["name"], **stage[key]} for stage in plan["stages"]], note
    )


def collectives(plan: Plan) -> Table:
    """Return the collectives of every stage that has others than those before it."""
    rows, seen = [], []
    for stage in plan["stages"]:
        same = [
            (c["kind"], c["axis"], c["count"], c["bytes"], c["dtype"], c["async"])
            for c in stage["collectives"]
        ]
        if same not in seen:
            seen.append(same)
            rows += [{"stage": stage["name"], **one} for one in stage["collectives"]]
    listed = {row["stage"] for row in rows}
    note = "A stage that is not listed has the same collectives as one that is."
    return listing("collectives", rows, note if len(listed) < len(plan["stages"]) else "")


def compared(before: Plan, after: Plan) -> Table:
    """Return :func:`means` of two plans side by side."""
    title = f"{after['recipe']} against {before['recipe']} on {after['target']}"
    olds, news = means(before), means(after)
    rows = []
    for name in {**news, **olds}:
        old, new = olds.get(name, 0.0), news.get(name, 0.0)
        same = math.isclose(old, new, rel_tol=1e-4, abs_tol=1e-6)
        change = "" if same else ("+" if new > old else "-") + text(name, abs(new - old))
        ratio = "" if same else f"{new / old - 1:+.1%}" if old else "new"
        rows.append([name, text(name, old), text(name, new), change, ratio])
    head = ["a device", before["recipe"], after["recipe"], "change", "%"]
    return Table(title, head, rows, "One device, means over all steps.")


def means(plan: Plan) -> dict[str, float]:
    """Return what is compared of a plan: numbers of the run, and means over the steps of all
    stages."""
    steps = sum(stage["steps"] for stage in plan["stages"])
    averages: dict[str, float] = {"parameters": plan["parameters"], "steps": steps}
    for stage in plan["stages"]:
        values = {
            "tokens a step": stage["tokens_per_step"],
            "FLOPs": stage["flops"],
            **{f"FLOPs of {part}": flops for part, flops in stage["flops_by_part"].items()},
            "bytes moved": stage["bytes_moved"],
            "bytes communicated": sum(one["bytes"] * one["count"] for one in stage["collectives"]),
            **{f"{kind} kernels": number for kind, number in stage["kernels"].items()},
            **{f"{name} ms": takes for name, takes in stage["time_ms"].items()},
        }
        for name, value in values.items():
            averages[name] = averages.get(name, 0.0) + stage["steps"] / steps * value
    averages["bytes at the peak"] = fullest(plan)["memory_bytes"]["peak"]
    for edge, word in enumerate(("low", "high")):
        averages[f"predicted ms, {word}"] = plan["predicted_step_ms"][edge]
        averages[f"seconds to target, {word}"] = plan["predicted_seconds"][edge]
    return {name.replace("_", " "): value for name, value in averages.items()}


def fullest(plan: Plan) -> StagePlan:
    """Return the stage that needs most memory."""
    return max(plan["stages"], key=lambda stage: stage["memory_bytes"]["peak"])


def memory_by_kind(plan: Plan) -> dict[str, int]:
    """Return bytes by kind of the fullest stage, without kinds that have none."""
    return {kind: value for kind, value in fullest(plan)["memory_by_kind"].items() if value > 0}


def micro_batch(row: MicroBatch) -> str:
    """Return the tokens of a micro-batch, those of a head-loss chunk in parentheses, and whether
    remat is on."""
    chunk = row.get("head_chunk")
    return (
        f"{row['micro_batch_tokens']:,}"
        + (f" ({chunk:,})" if chunk else "")
        + ", remat" * row.get("remat", False)
    )


def number(value: float) -> str:
    """Return three digits of ``value``, from a million on with an SI prefix; a smaller whole number
    has all."""
    if abs(value) >= 1e6:
        return si(value, 3, gap=" ")
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def percent(value: float, whole: float) -> str:
    """Return ``value`` as a share of ``whole``."""
    share = 100 * value / whole
    return f"{share:.3g} %" if abs(share) >= 0.1 or not share else "under 0.1 %"


def range_text(span: Sequence[float], unit: str = "") -> str:
    """Return ``[low, high]`` as ``68 to 97 ms``."""
    return f"{number(span[0])} to {number(span[1])} {unit}".rstrip()


def duration(span: Sequence[float]) -> str:
    """Return seconds, one number or a range, as ``131 to 179 s``, from an hour on in hours and from
    two days on in days."""
    unit, seconds = next(each[:2] for each in UNITS if span[0] >= each[2])
    return " to ".join(number(each / seconds) for each in span) + f" {unit}"
