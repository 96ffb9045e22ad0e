"""A plan as one self-contained HTML page: the tables of the terminal and the picture.

The page is a pure function of the dict that ``plan.py --json`` writes. It loads no other file and runs no script; all
text is escaped.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jspeed import markup
from jspeed.files import write_whole
from jspeed.markup import section, table, text
from jspeed.plan.views import compare
from jspeed.plan.views.format import (
    NONE,
    array,
    between,
    duration,
    figures,
    mapping,
    mappings,
    number,
    pairs,
    percent,
    shape,
    size,
    stage_name,
    whole,
)
from jspeed.plan.views.picture import INK, PALE, drawing, fullest, memory_by_kind
from jspeed.plan.views.picture import plan_svg as plan_svg

Plan = Mapping[str, Any]


def plan_html(path: Path, plan: Plan) -> None:
    """Write the report of ``plan`` to ``path``: one file without a script. Raises OSError when that cannot be.

    What the dict does not have is left out or shown as ``-``.
    """
    write_whole(path, page(plan).encode())


def page(plan: Plan) -> str:
    """Return the report as HTML text, what matters most at the top."""
    parts = (
        _summary, _figure, _stages, _doctor, _warnings, _memory, _buffers, _search, _against, _flops, _matmuls,
        _kernels, _collectives, _calibration, _facts, _sure,
    )  # fmt: skip
    title = f"{plan.get('recipe', 'a recipe')} on {plan.get('target', 'a target')}"
    return markup.page(title, [part(plan) for part in parts])


def _summary(plan: Plan) -> str:
    mesh = " ".join(f"{axis}={n}" for axis, n in pairs(plan.get("mesh")))
    cost = mapping(plan.get("predicted_cost"))
    price = f"{figures(cost.get('per_device_hour'))} {cost.get('currency', '')} a device and hour".strip()
    cards = {
        "step": between(plan.get("predicted_step_ms"), "ms"),
        "time to target": duration(plan.get("predicted_seconds")),
        f"cost at {price}": between([cost.get("low"), cost.get("high")], str(cost.get("currency", ""))),
        "devices": f"{plan.get('devices', NONE)} x {plan.get('device_kind', plan.get('target', NONE))}",
        "mesh and layout": f"{mesh or NONE}, {plan.get('layout', NONE)}",
        "parameters": whole(plan.get("parameters")),
    }
    if not cost:
        del cards[f"cost at {price}"]
    boxes = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in cards.items())
    lines = []
    if plan.get("fit"):
        kind = {"yes": "good", "no": "bad"}.get(_yes(plan.get("fits")), "")
        lines.append(f'<p class="{kind}">{text(plan["fit"])}</p>')
    if plan.get("sets"):
        lines.append(f"<p>with {text(', '.join(map(str, plan['sets'])))}</p>")
    if plan.get("compiled") is False:
        lines.append("<p>nothing was compiled: formulas only</p>")
    if plan.get("recipe_hash"):
        lines.append(f'<p class="dim">recipe {text(plan["recipe_hash"])}</p>')
    return "\n".join([lines[0] if lines else "", f"<dl>{boxes}</dl>", *lines[1:]])


def _figure(plan: Plan) -> str:
    """The picture, in the colours of the page."""
    svg = drawing(plan, heading=False)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor").replace(PALE, "var(--line)")
    what = (
        "Bars of compute, memory and communication time of every stage, and of device memory by kind; as tables below"
    )
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{what}"', 1)
    return f'<figure class="wide" tabindex="0">{svg}</figure>'


def _stages(plan: Plan) -> str:
    head = ["stage", "steps", "tokens a step", "predicted step", "compute ms", "memory ms", "communication ms",
            "exposed communication ms", "peak memory", "TFLOPs", "bytes moved", "tokens at once", "from"]  # fmt: skip

    def row(stage: Plan) -> list[str]:
        times = mapping(stage.get("time_ms"))
        return [
            stage_name(stage),
            whole(stage.get("steps")),
            whole(stage.get("tokens_per_step")),
            between(stage.get("predicted_ms"), "ms"),
            *(figures(times.get(kind)) for kind in ("compute", "memory", "communication", "exposed_communication")),
            size(mapping(stage.get("memory_bytes")).get("peak")),
            figures(stage.get("flops"), 1e12),
            size(stage.get("bytes_moved")),
            f"{whole(stage.get('micro_batch_tokens'))} x {whole(stage.get('micro_batches'))}",
            _origin(plan, stage),
        ]

    note = (
        "One device, one step. Compute and memory are compute-bound and memory-bound kernels; with the exposed "
        "communication they add up to the roofline of the step."
    )
    return section("stages", table(head, map(row, mappings(plan.get("stages")))), note)


def _origin(plan: Plan, stage: Plan) -> str:
    if stage.get("scaled_from"):
        return f"scaled from {stage['scaled_from']}"
    if stage.get("compiled", True):
        return "compiled"
    return "another stage's program" if plan.get("compiled") else "formulas"


def _memory(plan: Plan) -> str:
    stage = fullest(plan)
    kinds, peak = memory_by_kind(plan), number(mapping(stage.get("memory_bytes")).get("peak"))
    device = number(plan.get("device_memory_bytes"))
    limit = number(plan.get("memory_limit_bytes"))
    listed = {**kinds, "peak": peak, "JAX may take": limit, "a device has": device} if kinds else {}
    share = device or peak or 0.0
    rows = [[kind, size(value), percent(value, share)] for kind, value in listed.items() if value]
    head = ["kind", "size", "of the device" if device else "of the peak"]
    return section(f"memory of one device, {stage_name(stage)}", table(head, rows))


def _buffers(plan: Plan) -> str:
    head = ["buffer", "array", "source", "from"]
    rows = [
        [size(b.get("bytes")), array(b), str(b.get("source") or NONE), str(b.get("op") or NONE)]
        for b in mappings(fullest(plan).get("largest_buffers"))
    ]
    return section("largest buffers", table(head, rows))


def _flops(plan: Plan) -> str:
    return "".join(
        section(f"TFLOPs by {what}", _matrix(plan, key, lambda value: figures(value, 1e12)), note)
        for what, key, note in (
            ("part of the model", "flops_by_part", "One device, one step."),
            ("dtype", "flops_by_dtype", ""),
        )
    )


def _kernels(plan: Plan) -> str:
    return section("kernels", _matrix(plan, "kernels", whole))


def _collectives(plan: Plan) -> str:
    head = ["stage", "kind", "axis", "times", "bytes", "dtype", "asynchronous", "ms", "overlapping compute ms",
            "exposed ms", "source"]  # fmt: skip
    rows, seen = [], []
    for stage in mappings(plan.get("stages")):
        found = mappings(stage.get("collectives"))
        same = [[c.get(key) for key in ("kind", "axis", "count", "bytes", "dtype", "async")] for c in found]
        if same in seen:
            continue
        seen.append(same)
        for c in found:
            rows.append([
                stage_name(stage), str(c.get("kind", NONE)), str(c.get("axis", NONE)), whole(c.get("count")),
                size(c.get("bytes")), str(c.get("dtype") or NONE), _yes(c.get("async")), figures(c.get("ms")),
                figures(c.get("compute_ms_between")), figures(c.get("exposed_ms")), str(c.get("source") or NONE),
            ])  # fmt: skip
    note = "A stage that is not listed has the same collectives as one that is."
    return section("collectives", table(head, rows), note)


def _doctor(plan: Plan) -> str:
    found = mappings(plan.get("doctor"))
    rows = [
        [str(f.get("level", NONE)), str(f.get("name", NONE)), str(f.get("text", NONE)), figures(f.get("value")),
         figures(f.get("threshold"))]
        for f in found
    ]  # fmt: skip
    if "doctor" in plan and not found:
        return section("doctor", "<p>nothing found</p>")
    return section("doctor", table(["level", "finding", "what", "value", "threshold"], rows))


def _matmuls(plan: Plan) -> str:
    head = ["source", "name", "dtype", "shape", "times", "TFLOPs", "redundancy"]
    rows = [
        [str(m.get("source") or NONE), str(m.get("name", NONE)), str(m.get("dtype", NONE)), shape(m.get("shape")),
         whole(m.get("count")), figures(m.get("flops"), 1e12), figures(m.get("redundancy"))]
        for m in mappings(plan.get("matmuls"))
    ]  # fmt: skip
    note = "Redundancy: FLOPs of all devices over the FLOPs that the matmul needs."
    return section("matmuls", table(head, rows), note)


def _search(plan: Plan) -> str:
    head = ["layout", "mesh", "tokens at once", "peak memory", "fits", "predicted step"]
    rows = [
        [str(s.get("layout", NONE)), ", ".join(f"{axis}={n}" for axis, n in s.get("mesh", {}).items()) or NONE,
         whole(s.get("micro_batch_tokens")), size(s.get("peak_bytes")),
         _yes(s.get("fits")), between(s.get("predicted_ms"), "ms")]
        for s in mappings(plan.get("search"))
    ]  # fmt: skip
    return section("layouts and micro-batches tried", table(head, rows), "Best first.")


def _against(plan: Plan) -> str:
    """What changes from another plan for the same target to this one."""
    before = mapping(plan.get("against"))
    if not before:
        return ""
    return section(
        "against another recipe",
        table(compare.heading(before, plan), compare.rows(before, plan)),
        "One device, means over all steps.",
    )


def _calibration(plan: Plan) -> str:
    rows = [
        [str(c.get("recipe", NONE)), figures(c.get("measured_ms")), between(c.get("predicted_ms"), "ms"),
         percent(c.get("error"), 1), _yes(c.get("used_to_fit")), str(c.get("source", NONE))]
        for c in mappings(plan.get("calibration"))
    ]  # fmt: skip
    head = ["recipe", "measured ms", "predicted", "error", "used to fit", "source"]
    fractions = mapping(plan.get("fractions"))
    ends = [(name, mapping(value)) for name, value in fractions.items() if isinstance(value, Mapping)]
    flat = {name: value for name, value in fractions.items() if not isinstance(value, Mapping)}
    if flat:
        ends.insert(0, ("share", flat))
    kinds = list(dict.fromkeys(kind for _, values in ends for kind in values))
    reached = [[kind.replace("_", " "), *(percent(values.get(kind), 1) for _, values in ends)] for kind in kinds]
    columns = ["kind", *(name.removesuffix("_ms") for name, _ in ends)]
    return section("predictions against measured steps", table(head, rows)) + section(
        "assumed fraction of the peak", table(columns, reached)
    )


def _facts(plan: Plan) -> str:
    """The device's facts, each with its source."""
    facts = mapping(plan.get("facts"))
    sources = mapping(facts.get("sources"))
    rows = []
    for name, value in facts.items():
        if name != "sources":
            each = [f"{kind} {figures(rate)}" for kind, rate in pairs(value)] or [figures(value)]
            rows.append([name.replace("_", " "), ", ".join(each), str(sources.get(name, NONE))])
    return section("facts of the device", table(["fact", "value", "source"], rows))


def _warnings(plan: Plan) -> str:
    return _words(plan, "warnings")


def _sure(plan: Plan) -> str:
    """What is sure and what is not."""
    return _words(plan, "bounds") + _words(plan, "guesses")


def _words(plan: Plan, key: str) -> str:
    items = "".join(f"<li>{text(line)}</li>" for line in plan.get(key) or ())
    return section(key, f"<ul>{items}</ul>" if items else "")


def _matrix(plan: Plan, key: str, show: Callable[[Any], str]) -> str:
    """A table with a row for every stage and a column for everything that any stage has under ``key``."""
    stages = mappings(plan.get("stages"))
    names = list(dict.fromkeys(name for stage in stages for name in mapping(stage.get(key))))
    rows = [[stage_name(stage), *(show(mapping(stage.get(key)).get(name)) for name in names)] for stage in stages]
    return table(["stage", *(str(name).replace("_", " ") for name in names)], rows if names else [])


def _yes(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else NONE
