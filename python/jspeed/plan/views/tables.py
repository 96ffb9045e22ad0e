"""A plan as tables of text, which terminal and page show."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jspeed.plan.views import compare
from jspeed.plan.views.formatting import NONE, array, between, figures, percent, shape, size
from jspeed.plan.views.plot import fullest

Plan = Mapping[str, Any]
DIGITS = re.compile(r"(under )?[-+]?[\d,.]+(e[-+]?\d+)?( (to [\d,.]+|x [\d,.]+|[kMG]?B|ms|%))*")


class Table(NamedTuple):
    """Title, names of the columns, rows of text, and what is said above them."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @property
    def kinds(self) -> list[str]:
        """The kind of every column, its CSS class: n for numbers, l for long words, t for others."""
        return [
            "n" if all(cell in (NONE, "") or DIGITS.fullmatch(cell) for cell in column)
            else "l" if any(len(cell) > 40 for cell in column)
            else "t"
            for column in zip(*self.rows, strict=True)
        ]  # fmt: skip


def stages(plan: Plan) -> Table:
    """Return milliseconds, memory and work of every stage."""
    head = ["stage", "steps", "tokens", "predicted ms", "compute ms", "memory ms", "comm. ms", "exposed ms", "peak",
            "TFLOPs", "moved", "at once"]  # fmt: skip
    kinds = ("compute", "memory", "communication", "exposed_communication")
    rows = [
        [re.sub(", step (.) of (.)", r" (\1/\2)", s["name"]) + " *" * (not s["compiled"]),
         f"{s['steps']:,}", f"{s['tokens_per_step']:,}",
         between(s["predicted_ms"]), *(figures(s["time_ms"][kind]) for kind in kinds), size(s["memory_bytes"]["peak"]),
         figures(s["flops"], 1e12), size(s["bytes_moved"]), f"{at_once(s)} x {s['micro_batches']:,}"]
        for s in plan["stages"]
    ]  # fmt: skip
    note = (
        "One device, one step; (1/2) is the first of two. Compute and memory are compute-bound and memory-bound "
        "kernels; with the exposed communication they add up to the roofline of the step. Peak: of memory; at once: "
        "tokens of a micro-batch (of a row whose logits exist at once, if not all). *: another stage's program."
    )
    return Table("stages", head, rows, note)


def doctor(plan: Plan) -> Table:
    """Return the doctor's findings."""
    rows = [[f["level"], f["name"], f["text"], figures(f["value"]), figures(f["threshold"])] for f in plan["doctor"]]
    return Table("doctor", ["level", "finding", "what", "value", "threshold"], rows)


def tables(plan: Plan) -> Iterator[Table]:
    """Yield the other tables, in the order of the page."""
    stage, device = fullest(plan), plan["device_memory_bytes"]
    limits = {"peak": stage["memory_bytes"]["peak"], "JAX may take": plan["memory_limit_bytes"], "a device has": device}
    memory = {kind: value for kind, value in stage["memory_by_kind"].items() if value > 0} | limits
    rows = [[kind, size(value), percent(value, device)] for kind, value in memory.items()]
    yield Table(f"memory of one device, {stage['name']}", ["kind", "size", "of the device"], rows)
    rows = [[size(b["bytes"]), array(b), b["source"] or NONE, b["op"] or NONE] for b in stage["largest_buffers"]]
    yield Table("largest buffers", ["buffer", "array", "source", "from"], rows)
    head = ["layout", "mesh", "tokens at once", "peak memory", "fits", "predicted step"]
    rows = [
        [s["layout"], ", ".join(f"{axis}={n}" for axis, n in s["mesh"].items()), at_once(s),
         size(s["peak_bytes"]), yes(s["fits"]), between(s["predicted_ms"], "ms")]
        for s in plan.get("search", ())
    ]  # fmt: skip
    yield Table("layouts and micro-batches tried", head, rows, "Best first.")
    if before := plan.get("against"):
        note = "One device, means over all steps."
        yield Table("against another recipe", compare.heading(before, plan), compare.rows(before, plan), note)
    for title, key, note in (
        ("part of the model", "flops_by_part", "One device, one step."),
        ("dtype", "flops_by_dtype", ""),
    ):
        yield by_stage(plan, f"TFLOPs by {title}", key, lambda value: figures(value, 1e12), note)
    head = ["source", "name", "dtype", "shape", "times", "TFLOPs", "redundancy"]
    rows = [
        [m["source"] or NONE, m["name"], m["dtype"], shape(m["shape"]), f"{m['count']:,}", figures(m["flops"], 1e12),
         figures(m["redundancy"])]
        for m in plan["matmuls"]
    ]  # fmt: skip
    yield Table("matmuls", head, rows, "Redundancy: FLOPs of all devices over the FLOPs that the matmul needs.")
    yield by_stage(plan, "kernels", "kernels", lambda value: f"{value:,}")
    yield collectives(plan)
    head = ["recipe", "measured ms", "predicted", "error", "", "source"]
    rows = [
        [c["recipe"], figures(c["measured_ms"]), between(c["predicted_ms"], "ms"), percent(c["error"], 1),
         "fitted" if c["used_to_fit"] else "held out", c["source"]]
        for c in plan["calibration"]
    ]  # fmt: skip
    yield Table("predictions against measured steps", head, rows)
    rows = [[kind.replace("_", " "), percent(share, 1)] for kind, share in plan["fractions"].items()]
    yield Table("assumed fraction of the peak", ["kind", "share"], rows)
    yield facts(plan["facts"])


def by_stage(plan: Plan, title: str, key: str, show: Callable[[Any], str], note: str = "") -> Table:
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
        same = [[c[key] for key in ("kind", "axis", "count", "bytes", "dtype", "async")] for c in stage["collectives"]]
        if same not in seen:
            seen.append(same)
            rows += [
                [stage["name"], c["kind"], c["axis"], f"{c['count']:,}", size(c["bytes"]), c["dtype"], yes(c["async"]),
                 figures(c["ms"]), figures(c["compute_ms_between"]), figures(c["exposed_ms"]), c["source"] or NONE]
                for c in stage["collectives"]
            ]  # fmt: skip
    return Table("collectives", head, rows, "A stage that is not listed has the same collectives as one that is.")


def facts(found: Mapping[str, Any]) -> Table:
    """Return the device's facts, each with its source."""
    rows = []
    for name, value in found.items():
        if name != "sources":
            each = [f"{k} {figures(v)}" for k, v in value.items()] if isinstance(value, dict) else [figures(value)]
            rows.append([name.replace("_", " "), ", ".join(each), found["sources"].get(name, NONE)])
    return Table("facts of the device", ["fact", "value", "source"], rows)


def yes(value: bool) -> str:
    """Return ``yes`` or ``no``."""
    return "yes" if value else "no"


def at_once(row: Mapping[str, Any]) -> str:
    """Return the tokens of a micro-batch, and of a row those whose logits exist at once where these are not all."""
    chunk, again = row.get("head_chunk"), row.get("remat", False)
    return f"{row['micro_batch_tokens']:,}" + (f" ({chunk:,})" if chunk else "") + " recomputed" * again
