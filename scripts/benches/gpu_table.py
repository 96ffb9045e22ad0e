"""What a day on a GPU found out (gpu_day.py), as Markdown: predicted beside measured."""

from collections.abc import Mapping
from typing import Any

from jspeed.plan import predict
from jspeed.plan.attention import EMPTY_KERNELS, TILE
from jspeed.plan.target import load_target

Known = Mapping[str, Mapping[str, Any]]


def empty_block_us(known: Known, name: str) -> float | None:
    """Microseconds of an SM for an empty block: the difference of attention by lanes and by rows, over that of blocks.

    How many kernels have such blocks: :func:`jspeed.plan.attention.empty_blocks`.
    """
    rows, lanes = (known.get(f"attention {backend} as {name}", {}) for backend in ("cudnn", "cudnn_lanes"))
    if "both_ms" not in rows or "both_ms" not in lanes:
        return None
    _, length, heads, _ = rows["shape"]
    slots = rows["documents"]
    fewer = sum(EMPTY_KERNELS.values()) * heads * slots * (-(-length // TILE) - -(-rows["longest"] // TILE))
    return 1e3 * (lanes["both_ms"] - rows["both_ms"]) * load_target("h100").cores / fewer  # an H200 has as many


def table(known: Known) -> list[str]:
    """The results as lines of Markdown: what failed, predicted beside measured by family, attention, FP8."""
    there = known.get("environment", {})
    versions = there.get("versions", {})
    lines = [f"{there.get('device')}, jax {versions.get('jax')}, cuDNN {there.get('cudnn')}, {there.get('date')}", ""]
    for name, one in known.items():
        wrong = one.get("failed") or one.get("wrong")
        if wrong or "seconds" not in one:
            lines.append(f"- {name}: {wrong or 'not finished'}")
    for name, one in known.items():
        if not name.startswith("stage ") or "predicted_ms" not in one:
            continue
        found, measured = one["predicted_ms"], one["measured_ms"] or {}
        lines += ["", f"**{name}**: {one['step_ms_in_a_row']:.2f} ms a step, {one['memory_needed'] / 1e9:.1f} GB, "
                  f"{one['fp8_calls']} FP8 calls, attention {one['attention']}"]  # fmt: skip
        lines += ["", "| family | predicted ms | measured ms | ratio |", "|---|---|---|---|"]
        for family in sorted(found | measured, key=lambda family: -found.get(family, 0.0)):
            ms, seen = found.get(family, 0.0), measured.get(family)
            ratio = f"{seen / ms:.2f}" if seen is not None and ms else ""
            lines.append(f"| {family} | {ms:.2f} | {'' if seen is None else f'{seen:.2f}'} | {ratio} |")
    rows = [(name, one) for name, one in known.items() if "both_ms" in one]
    if rows:
        lines += ["", "| what | forward ms | forward and backward ms | GB | FP8 calls |", "|---|---|---|---|---|"]
    for name, one in rows:
        lines.append(f"| {name} | {one.get('forward_ms', '')} | {one['both_ms']} | {one['need_GB']} | "
                     f"{one.get('fp8_calls', '')} |")  # fmt: skip
    for name in ("r29", "r89"):
        if (found := empty_block_us(known, name)) is not None:
            lines.append(f"\nempty blocks as {name}: {found:.3f} us of an SM, planned {1e6 * predict.EMPTY_BLOCK:.3f}")
    for name, one in known.items():
        if name.startswith("run ") and "status" in one:
            lines.append(f"\n{name}: {one['status']} after {one['steps']} steps, {one['timed_seconds']:.1f} s timed, "
                         f"{one['compile_seconds']:.0f} s of compilation, loss {one['val_loss']}")  # fmt: skip
    return lines
