"""A plan as one page: the tables of the terminal and the picture, in one file that opens from disk.

The page is a pure function of the dict that ``plan.py --json`` writes, and loads and runs nothing. All text is escaped.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jspeed.files import write_whole
from jspeed.plan.picture import INK, PALE, drawing, fullest, memory_by_kind
from jspeed.plan.picture import plan_svg as plan_svg
from jspeed.plan.words import (
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
    printable,
    shape,
    size,
    stage_name,
    whole,
)

Plan = Mapping[str, Any]
Rows = list[list[str]]

DIGITS = re.compile(r"(under )?[-+]?[\d,.]+(e[-+]?\d+)?( (to [\d,.]+|x [\d,.]+|[kMG]?B|ms|%))*")

STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --dim: #5f6368; --line: #d9dce0; --page: #fff; --card: #f5f6f8;
  --link: #0060a0; --bad: #b3261e; --good: #16693a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --dim: #a3a9b1; --line: #3c4046; --page: #15171a;
  --card: #1f2227; --link: #7cc0f5; --bad: #ff8a80; --good: #7fd6a0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 76rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .2rem; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
p { margin: .3rem 0; }
a { color: var(--link); }
.dim { color: var(--dim); }
.bad { color: var(--bad); font-weight: 600; }
.good { color: var(--good); font-weight: 600; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); gap: .6rem; margin: 1rem 0; }
dl div { background: var(--card); border-radius: .5rem; padding: .5rem .7rem; }
dt { color: var(--dim); font-size: .8rem; }
dd { margin: 0; font-size: 1.05rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--dim); font-weight: 500; vertical-align: bottom; }
.n { text-align: right; }
td.n, td.t { white-space: nowrap; }
.l { min-width: 14rem; }
figure { margin: 1rem 0; }
svg { display: block; width: 100%; max-width: 38rem; height: auto; color: var(--ink); }
"""


def plan_html(path: Path, plan: Plan) -> None:
    """Write the report of ``plan`` to ``path``: one file without a script. Raises OSError when that cannot be.

    What the dict does not have is left out or shown as ``-``.
    """
    write_whole(path, page(plan).encode())


def page(plan: Plan) -> str:
    """Return the report as HTML text."""
    title = f"{_text(plan.get('recipe', 'a recipe'))} on {_text(plan.get('target', 'a target'))}"
    sections = (
        _stages(plan), _doctor(plan), _words(plan, "warnings"), _memory(plan), _buffers(plan), _search(plan),
        _flops(plan), _matmuls(plan), _kernels(plan), _collectives(plan), _calibration(plan), _facts(plan),
        _words(plan, "bounds"), _words(plan, "guesses"),
    )  # fmt: skip
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # Nothing is fetched and nothing runs, whatever a recipe is called.
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
            f"<h1>{title}</h1>",
            _summary(plan),
            _figure(plan),
            *sections,
            "</body>\n</html>\n",
        ]
    )


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
    boxes = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in cards.items())
    lines = []
    if plan.get("fit"):
        kind = {"yes": "good", "no": "bad"}.get(_yes(plan.get("fits")), "")
        lines.append(f'<p class="{kind}">{_text(plan["fit"])}</p>')
    if plan.get("sets"):
        lines.append(f"<p>with {_text(', '.join(map(str, plan['sets'])))}</p>")
    if plan.get("compiled") is False:
        lines.append("<p>nothing was compiled: formulas only</p>")
    if plan.get("recipe_hash"):
        lines.append(f'<p class="dim">recipe {_text(plan["recipe_hash"])}</p>')
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
            "of it exposed", "peak memory", "TFLOPs", "bytes moved", "tokens at once", "from"]  # fmt: skip

    def row(stage: Plan) -> list[str]:
        times = mapping(stage.get("time_ms"))
        origin = f"scaled from {stage['scaled_from']}" if stage.get("scaled_from") else "compiled"
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
            origin if stage.get("compiled", True) or stage.get("scaled_from") else "formulas",
        ]

    return _section("stages", _table(head, map(row, mappings(plan.get("stages")))), "FLOPs and bytes of one device.")


def _memory(plan: Plan) -> str:
    stage = fullest(plan)
    kinds, peak = memory_by_kind(plan), number(mapping(stage.get("memory_bytes")).get("peak"))
    device = number(plan.get("device_memory_bytes"))
    held = {**kinds, "peak": peak, "a device has": device} if kinds else {}
    share = device or peak or 0.0
    rows = [[kind, size(value), percent(value, share)] for kind, value in held.items() if value]
    head = ["kind", "size", "of the device" if device else "of the peak"]
    return _section(f"memory of one device, {stage_name(stage)}", _table(head, rows))


def _buffers(plan: Plan) -> str:
    head = ["buffer", "array", "source", "from"]
    rows = [
        [size(b.get("bytes")), array(b), str(b.get("source") or NONE), str(b.get("op") or NONE)]
        for b in mappings(fullest(plan).get("largest_buffers"))
    ]
    return _section("largest buffers", _table(head, rows))


def _flops(plan: Plan) -> str:
    return "".join(
        _section(f"TFLOPs by {what}", _matrix(plan, key, lambda value: figures(value, 1e12)), note)
        for what, key, note in (
            ("part of the model", "flops_by_part", "One device, one step."),
            ("dtype", "flops_by_dtype", ""),
        )
    )


def _kernels(plan: Plan) -> str:
    return _section("kernels", _matrix(plan, "kernels", whole))


def _collectives(plan: Plan) -> str:
    head = ["stage", "kind", "axis", "times", "bytes", "dtype", "asynchronous", "ms", "compute behind it, ms",
            "exposed ms", "source"]  # fmt: skip
    rows = [
        [
            stage_name(stage), str(c.get("kind", NONE)), str(c.get("axis", NONE)), whole(c.get("count")),
            size(c.get("bytes")), str(c.get("dtype") or NONE),
            _yes(c.get("async")),
            figures(c.get("ms")), figures(c.get("compute_ms_between")), figures(c.get("exposed_ms")),
            str(c.get("source") or NONE),
        ]
        for stage in mappings(plan.get("stages")) for c in mappings(stage.get("collectives"))
    ]  # fmt: skip
    return _section("collectives", _table(head, rows))


def _doctor(plan: Plan) -> str:
    found = mappings(plan.get("doctor"))
    rows = [
        [str(f.get("level", NONE)), str(f.get("name", NONE)), str(f.get("text", NONE)), figures(f.get("value")),
         figures(f.get("threshold"))]
        for f in found
    ]  # fmt: skip
    if "doctor" in plan and not found:
        return _section("doctor", "<p>nothing found</p>")
    return _section("doctor", _table(["level", "finding", "what", "value", "threshold"], rows))


def _matmuls(plan: Plan) -> str:
    head = ["source", "name", "dtype", "shape", "times", "TFLOPs", "redundancy"]
    rows = [
        [str(m.get("source") or NONE), str(m.get("name", NONE)), str(m.get("dtype", NONE)), shape(m.get("shape")),
         whole(m.get("count")), figures(m.get("flops"), 1e12), figures(m.get("redundancy"))]
        for m in mappings(plan.get("matmuls"))
    ]  # fmt: skip
    note = "Redundancy: FLOPs of all devices over the FLOPs that the product needs."
    return _section("matrix multiplications", _table(head, rows), note)


def _search(plan: Plan) -> str:
    head = ["layout", "tokens at once", "peak memory", "fits", "predicted step"]
    rows = [
        [str(s.get("layout", NONE)), whole(s.get("micro_batch_tokens")), size(s.get("peak_bytes")),
         _yes(s.get("fits")), between(s.get("predicted_ms"), "ms")]
        for s in mappings(plan.get("search"))
    ]  # fmt: skip
    return _section("layouts and micro-batches tried", _table(head, rows), "Best first.")


def _calibration(plan: Plan) -> str:
    rows = [
        [str(c.get("recipe", NONE)), figures(c.get("measured_ms")), between(c.get("predicted_ms"), "ms"),
         percent(c.get("error"), 1), _yes(c.get("used_to_fit")), str(c.get("source", NONE))]
        for c in mappings(plan.get("calibration"))
    ]  # fmt: skip
    head = ["recipe", "measured ms", "predicted", "error", "used to fit", "source"]
    fractions = mapping(plan.get("fractions"))
    ends = [(end.removesuffix("_ms"), mapping(values)) for end, values in fractions.items()]
    kinds = list(dict.fromkeys(kind for _, values in ends for kind in values))
    reached = [[kind, *(percent(values.get(kind), 1) for _, values in ends)] for kind in kinds]
    return _section("predictions against measured steps", _table(head, rows)) + _section(
        "share of the peak that a step is taken to reach",
        _table(["kind", *(f"for the {name} end" for name, _ in ends)], reached),
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
    return _section("facts of the device", _table(["fact", "value", "source"], rows))


def _words(plan: Plan, key: str) -> str:
    items = "".join(f"<li>{_text(line)}</li>" for line in plan.get(key) or ())
    return _section(key, f"<ul>{items}</ul>" if items else "")


def _matrix(plan: Plan, key: str, show: Callable[[Any], str]) -> str:
    """A table with a row for every stage and a column for everything that any stage has under ``key``."""
    stages = mappings(plan.get("stages"))
    names = list(dict.fromkeys(name for stage in stages for name in mapping(stage.get(key))))
    rows = [[stage_name(stage), *(show(mapping(stage.get(key)).get(name)) for name in names)] for stage in stages]
    return _table(["stage", *(str(name).replace("_", " ") for name in names)], rows if names else [])


def _section(title: str, body: str, note: str = "") -> str:
    if not body:
        return ""
    below = f'<p class="dim">{_text(note)}</p>' if note else ""
    return f"<section><h2>{_text(title)}</h2>{below}{body}</section>\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an escaped table, its numbers to the right, or nothing for no rows."""
    rows = list(rows)
    if not rows:
        return ""
    columns = list(zip(*rows, strict=True))
    kinds = [_kind(column) for column in columns]

    def line(tag: str, cells: Iterable[str]) -> str:
        return "".join(f'<{tag} class="{kind}">{_cell(cell)}</{tag}>' for cell, kind in zip(cells, kinds, strict=True))

    body = "".join(f"<tr>{line('td', row)}</tr>\n" for row in rows)
    # A region that scrolls must be reachable by keyboard.
    return f'<div class="wide" tabindex="0"><table><thead><tr>{line("th", head)}</tr></thead>\n{body}</table></div>'


def _kind(column: Sequence[str]) -> str:
    """The class of a column: n for numbers, l for long words, t for others."""
    if all(cell in (NONE, "") or DIGITS.fullmatch(cell) for cell in column):
        return "n"
    return "l" if any(len(cell) > 30 for cell in column) else "t"


def _cell(text: str) -> str:
    if re.fullmatch(r"https://\S+", text):
        return f'<a href="{_text(text)}">{_text(text)}</a>'
    return _text(text)


def _yes(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else NONE


def _text(value: Any) -> str:
    return escape(printable(value))
