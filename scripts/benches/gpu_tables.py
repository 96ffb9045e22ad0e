"""The results of a day on a GPU (gpu_day.py) as Markdown: predicted beside measured, by the plan's
rates and by those that were measured."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jspeed.base.files import write_whole
from jspeed.plan import assumed, predict
from jspeed.plan.attention import EMPTY_KERNELS, TILE
from jspeed.plan.cost import Kernel
from jspeed.plan.measured import terms
from jspeed.plan.target import (
    MEASURED,
    DataSheet,
    data_sheet_of,
    known_targets,
    load_target,
    parse_target,
)

Known = Mapping[str, Mapping[str, Any]]  # results by name


def table(known: Known) -> list[str]:
    """The results so far: what failed, rates, predicted beside measured by family, attention."""
    there = known.get("environment", {})
    jax = there.get("versions", {}).get("jax")
    lines = [
        f"{there.get('device_kind')}, jax {jax}, cuDNN {there.get('cudnn')}, {there.get('date')}",
        "",
        said_of_time(known),
        "",
    ]
    for name, one in known.items():
        wrong = one.get("failed") or one.get("wrong")
        if name != "end of a call" and (wrong or "seconds" not in one):
            lines.append(f"- {name}: {wrong or one.get('died') or 'not finished'}")
        if "made by" in one:
            lines.append(
                f"- {name}: runs; at most {one['difference']:g} from what is compiled here"
            )
    lines += rates(known)
    for name, one in known.items():
        if name.startswith("stage ") and "counted" in one:
            lines += beside(name, one, sheet_of(known))
    lines += attentions(known)
    for line in known.get("own kernels alone", {}).get("lines", ()):
        lines.append(f"    {line}")
    for name in ("r92", "r89"):
        if (found := empty_block_us(known, name)) is not None:
            planned = 1e6 * terms.EMPTY_BLOCK
            lines.append(
                f"\nempty blocks as {name}: {found:.3f} us of an SM, planned {planned:.3f}"
            )
    for name, one in known.items():
        if name.startswith("run ") and "status" in one:
            lines.append(
                f"\n{name}: {one['status']} after {one['steps']} steps,"
                f" {one['timed_seconds']:.1f} s timed, {one['compile_seconds']:.0f} s of"
                f" compilation, loss {one['val_loss']}"
            )
    return lines


def said_of_time(known: Known) -> str:
    """For how long the device measured, of the time of all calls until their last result."""
    spans = [one["span"] for one in known.values() if "span" in one]
    measured, reached = 0.0, 0.0
    for began, ended in sorted(spans):
        measured += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    ends: defaultdict[float, float] = defaultdict(float)
    for one in known.values():
        if "call" in one:
            ends[one["call"]] = max(ends[one["call"]], one["at"])
    total = sum(end - call for call, end in ends.items())
    share = f" ({measured / total:.0%})" if total else ""
    return f"the device measured for {measured:.0f} of {total:.0f} s{share}, {len(ends)} calls"


def rates(known: Known) -> list[str]:
    """What was measured of each program alone: bursts, in a row, and as the plan has it."""
    sheet = sheet_of(known)
    lines = []
    for name, one in known.items():
        if "sustained_ms" not in one:
            continue
        amount = one.get("flops") or one.get("bytes") or 0.0
        unit, scale = ("TFLOP/s", 1e9) if one.get("flops") else ("GB/s", 1e6)
        speed = f"{amount / one['ms'] / scale:,.0f} {unit}" if amount else ""
        planned = f"{1e3 * seconds_planned(one, sheet):.4f}" if one.get("family") else ""
        lines.append(
            f"| {name} | {one['ms']:.4f} | {one['sustained_ms']:.4f} | {planned} | {speed} |"
        )
    head = ["", "| program | ms | ms in a row | planned ms | |", "|---|---|---|---|---|"]
    return head + lines if lines else []


def seconds_planned(one: Mapping[str, Any], sheet: DataSheet) -> float:
    """Seconds that the plan gives to a rate's program."""
    dtype = "f8" if one["family"] == "fp8_matmul" else "bf16"
    family = "fusion" if one["family"] == "memory" else one["family"]
    return max(assumed.kernel_seconds(kernel(family, dtype, one["flops"], one["bytes"]), sheet))


def kernel(kind: Any, dtype: str, flops: float, moved: float) -> Kernel:
    """A kernel that runs once, without its instruction."""
    instruction: Any = None
    return Kernel(kind, flops, moved, dtype, (), 1, instruction)


def beside(name: str, one: Mapping[str, Any], sheet: DataSheet) -> Iterator[str]:
    """Yield a stage's figures, and its time by family of kernels, predicted beside measured."""
    found, measured = predicted(one["counted"], sheet), one["measured_ms"] or {}
    yield ""
    yield (
        f"**{name}**: {one['step_ms_in_a_row']:.2f} ms a step, predicted {sum(found.values()):.2f};"
        f" {one['memory_needed'] / 1e9:.1f} GB, {one['fp8_calls']} FP8 calls, attention"
        f" {one['attention']}, loss {one['first_loss']:.2f} to {one['loss']:.2f}"
    )
    yield from ("", "| family | predicted ms | measured ms | ratio |", "|---|---|---|---|")
    for family in sorted(found | measured, key=lambda family: -found.get(family, 0.0)):
        ms, seen = found.get(family, 0.0), measured.get(family)
        ratio = f"{seen / ms:.2f}" if seen is not None and ms else ""
        yield f"| {family} | {ms:.2f} | {'' if seen is None else f'{seen:.2f}'} | {ratio} |"


def predicted(counted: Iterable[Iterable[Any]], sheet: DataSheet) -> dict[str, float]:
    """Milliseconds of a step by family and by flat rates, of kernels as
    ``gpu_measurements.summary`` has them; idle: gaps between kernels."""
    found: defaultdict[str, float] = defaultdict(float)
    cluster = parse_target("h100x1")  # an H200 has as many cores and gaps
    for kind, dtype, flops, moved, empty, runs in counted:
        found[kind] += (
            1e3 * runs * max(assumed.kernel_seconds(kernel(kind, dtype, flops, moved), sheet))
        )
        found["idle"] += 1e3 * runs * predict.launch_gap(cluster)
        blocks = 1e3 * runs * empty * terms.EMPTY_BLOCK / cluster.target.cores
        found["empty blocks, in attention"] += blocks
    return found


def attentions(known: Known) -> Iterator[str]:
    """Yield backends beside each other."""
    rows = [
        (f"{name}, {backend}" if backend else name, seen)
        for name, one in known.items()
        for backend, seen in [("", one), *one.items()]
        if isinstance(seen, Mapping) and "both_ms" in seen
    ]
    if rows:
        yield ""
        yield "| what | forward ms | forward and backward ms | GB | off the first | FP8 calls |"
        yield "|---|---|---|---|---|---|"
    for name, one in rows:
        off, calls = one.get("off", ""), one.get("fp8_calls", "")
        ms = one.get("forward_ms", "")
        yield f"| {name} | {ms} | {one['both_ms']} | {one['need_GB']} | {off} | {calls} |"


def empty_block_us(known: Known, name: str) -> float | None:
    """Microseconds of an SM for an empty block: the difference of attention by lanes and by rows,
    over that of blocks.

    How many kernels have such blocks: :func:`jspeed.plan.attention.empty_blocks`.
    """
    one = known.get(f"attention as {name}", {})
    if "cudnn" not in one or "cudnn_lanes" not in one:
        return None
    _, length, heads, _ = one["shape"]
    tiles = -(-length // TILE) - -(-one["longest"] // TILE)
    fewer = sum(EMPTY_KERNELS.values()) * heads * one["documents"] * tiles
    ms = one["cudnn_lanes"]["both_ms"] - one["cudnn"]["both_ms"]
    return 1e3 * ms * load_target("h100").cores / fewer  # an H200 has as many


def sheet_of(known: Known) -> DataSheet:
    """The data sheet of the device that measured; an H100's where it is no target (a toy's CPU)."""
    kind = str(known.get("environment", {}).get("device_kind"))
    return data_sheet_of(kind) or load_target("h100").data_sheet


def fractions(known: Known, sheet: DataSheet) -> dict[str, float]:
    """Fractions of the data sheet's rates that were measured, by the names of assumed.FRACTIONS: of
    each family all FLOPs, or bytes, over all time in a row."""
    amounts: defaultdict[str, float] = defaultdict(float)
    spent: defaultdict[str, float] = defaultdict(float)
    for name, one in known.items():
        if "sustained_ms" not in one or not (family := one.get("family")):
            continue
        less: Mapping[str, Any] = {}
        if family == "attention_backward":
            less = known.get(name.replace(", both", ", forward"), {})
            if "sustained_ms" not in less:
                continue
        amount = one["flops"] - less.get("flops", 0.0) or one["bytes"]
        amounts[family] += amount
        spent[family] += 1e-3 * (one["sustained_ms"] - less.get("sustained_ms", 0.0))
    peaks = dict.fromkeys(amounts, sheet.peak_flops["bf16"])
    peaks |= {"memory": sheet.hbm_bytes_per_second, "fp8_matmul": sheet.peak_flops["f8"]}
    return {
        family: float(f"{amounts[family] / spent[family] / peaks[family]:.4g}")
        for family in amounts
        if spent[family] > 0
    }


def say_plan(known: Known, folder: Path) -> list[str]:
    """Write the measured rates where ``jspeed plan`` reads them, or into ``folder`` for a device
    that is no target; return the rates and each stage's prediction, before and after."""
    there = known.get("environment", {})
    sheet = sheet_of(known)
    found = fractions(known, sheet)
    if not found:
        return ["no rate was measured yet: scripts/gpu_day.sh quarter"]
    targets = (load_target(name) for name in known_targets())
    target = next((t.name for t in targets if t.data_sheet == sheet), None)
    named = target if data_sheet_of(str(there.get("device_kind"))) else None
    path = MEASURED / f"{named}.toml" if named else folder / "rates.toml"
    versions = there.get("versions", {})
    source = f"{there.get('device_kind')}, JAX {versions.get('jax')}, cuDNN {there.get('cudnn')}"
    lines = [
        f'source = "scripts/gpu_day.sh plan, {there.get("date")}: {source}"',
        "",
        "[fractions]",
    ]
    lines += [f"{family} = {value}" for family, value in sorted(found.items())]
    path.parent.mkdir(exist_ok=True)
    write_whole(path, "\n".join(lines) + "\n")
    after = sheet._replace(fractions=sheet.fractions | found)
    said = [f"written to {path}", "", "| rate | assumed | measured |", "|---|---|---|"]
    said += [f"| {k} | {assumed.FRACTIONS[k]} | {v} |" for k, v in sorted(found.items())]
    for name, one in known.items():
        if name.startswith("stage ") and "counted" in one:
            old = sum(predicted(one["counted"], sheet._replace(fractions={})).values())
            new = sum(predicted(one["counted"], after).values())
            ms = one["step_ms_in_a_row"]
            said += ["", f"assumed rates {old:.2f} ms, measured rates {new:.2f}, measured {ms:.2f}"]
            said += list(beside(name, one, after))[1:]
    if named:
        said += [
            "",
            "now predict.MEASURED's sums of terms are out of date: make test-aot says which",
        ]
    return said
