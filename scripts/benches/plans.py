"""``jspeed bench plans``: plan every program whose seconds are quoted, and check the cost model
against what was measured of whole steps: benchmarks/plan.md."""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jspeed.base.files import write_whole
from jspeed.plan import attention, predict
from jspeed.plan.compile import WINDOW
from jspeed.plan.cost import Kernel
from jspeed.plan.schema import TermRow
from jspeed.plan.target import parse_target
from jspeed.recipe import Recipe

if TYPE_CHECKING:
    from jspeed.plan.compile import Step, TargetPlacement

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "benchmarks" / "plan.json"
PAGE = ROOT / "benchmarks" / "plan.md"
MLP = 2816  # channels of r92's
NEAR = 257  # keys within which attention has gradients, of PR 371's lever
ONE_OF_EIGHT = ("LANES=1", "NGRAMS=10575360")  # as scripts/gpu_day.sh measured on one H200


class Program(NamedTuple):
    """A recipe on a target; ``stage``: one of its stages alone, from 1."""

    recipe: str
    target: str = "h100x8"
    sets: tuple[str, ...] = ()
    stage: int | None = None


PROGRAMS = {name: Program(name) for name in ("llmc", "track3", "r21", "r29", "r62", "r89", "r92")}
PROGRAMS |= {
    "jspeed3": Program("jspeed3"),
    "jspeed3 with retrieval": Program("jspeed3", sets=("RETRIEVAL=(2,3,4,6,10)",)),
    "llmc on four": Program("llmc", "h100x4"),
    "r29, one H100": Program("r29", "h100x1"),
    "r29, eight A100s": Program("r29", "a100x8"),
    "tinystories, one H100": Program("tinystories", "h100x1"),
    "r92, H200": Program("r92", "h200x1", ONE_OF_EIGHT, 4),
    "r92, H200, custom kernels off": Program(
        "r92", "h200x1", (*ONE_OF_EIGHT, "OWN_KERNELS=off"), 4
    ),
    "jspeed3, H200": Program("jspeed3", "h200x1", ONE_OF_EIGHT, 4),
}
# Whole runs on one card; where a table does not fit it, it is in the host's memory.
CARDS = {
    f"{recipe} on one {card}": Program(recipe, f"{target}x1")
    for recipe in ("r29", "r92", "jspeed3")
    for target, card in {
        "h100": "H100",
        "h200": "H200",
        "a100": "A100 80 GB",
        "a100-40": "A100 40 GB",
        "l40s": "L40S",
        "rtx4090": "RTX 4090",
        "rtx3090": "RTX 3090",
    }.items()
}
PROGRAMS |= CARDS


# The last figures by flat rates, of 2026-11-27 (0.85 to 1.25 times was the range).
BEFORE = {
    "llmc": "2,968", "track3": "", "r21": "363", "r29": "166", "r62": "104", "r89": "81.4",
    "r92": "41.0", "jspeed3": "34.1", "jspeed3 with retrieval": "28.5 (848 steps)",
}  # fmt: skip
# Shares of r92's steps that jspeed3 needs: measured at full size, its pointer (PR 379: 1,050 of
# 1,194 steps, n = 8) and its classes of tokens (PR 375: 15 fewer of 1,194, n = 7), each by itself;
# and what races at width 128 allow (benchmarks/quality.md).
POINTER, CLASSES = 1050 / 1194, 1179 / 1194
STEPS = {
    "jspeed3": {
        "at full size, its pointer (PR 379) and its classes (PR 375), as if they multiply":
            POINTER * CLASSES,
        "at full size, its pointer alone": POINTER,
        "races at width 128, the recipe": 0.86,
    },
    "jspeed3 with retrieval": {
        "at full size, without what retrieval saves": POINTER * CLASSES,
        "races at width 128": 0.71,
    },
}  # fmt: skip


def plans(only: str | None = None) -> None:
    """Plan all programs (some hours of two cores), then write benchmarks/plan.json and plan.md.

    Args:
        only: Names of programs to plan again, with commas; "none" makes the page alone.
    """
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for name in PROGRAMS if only is None else only.split(","):
        if name != "none":
            figures |= planned(name)
            write_whole(FIGURES, text_of(figures))
    write_whole(PAGE, "\n".join(page(figures)) + "\n")
    print(f"written: {PAGE}")


def text_of(figures: Mapping[str, Any]) -> str:
    """Figures as JSON, a line a program."""
    lines = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in figures.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def planned(name: str) -> dict[str, Any]:
    """Compile a program, and return its figures and those of its variants by name."""
    from jspeed.plan.command import add_installed_compiler

    add_installed_compiler()
    import jax

    from jspeed.parallel import DEFAULT_LAYOUT
    from jspeed.plan import compile as compiling
    from jspeed.plan.host.choose import choose
    from jspeed.plan.target import pretend
    from jspeed.run.compute.accumulators import first_alike
    from jspeed.run.find_recipe import find

    jax.config.update("jax_platforms", "cpu")
    program, cluster = PROGRAMS[name], parse_target(PROGRAMS[name].target)
    loaded, placement = choose(
        find(program.recipe, list(program.sets)),
        cluster,
        None,
        lambda recipe: compiling.place_on_target(recipe, cluster, DEFAULT_LAYOUT),
    )
    recipe = loaded.recipe
    if program.stage is None:
        steps = compiling.compile_stages(recipe, placement)
    else:  # a step of each phase
        at, stage = program.stage - 1, replace(recipe.stages[program.stage - 1], steps=1)
        phases = [first_alike(recipe, stage, phase) for phase in range(recipe.period)]
        with pretend(cluster.target):
            made = {
                phase: compiling.compile_that_fits(recipe, placement, at, phase)
                for phase in dict.fromkeys(phases)
            }
        steps = [compiling.read_step(stage, made[phase]) for phase in phases]
    found = figures(
        name,
        [(program.stage or 1 + number // recipe.period, step.stage.steps, step.stage.lane_len,
          step.kernels, step.stage.max_doc_len) for number, step in enumerate(steps)],
    )  # fmt: skip
    if name in CARDS:
        found[name] |= on_card(recipe, placement, steps, found[name]["stages"])
    return found


def on_card(
    recipe: Recipe,
    placement: "TargetPlacement",
    steps: Sequence["Step"],
    stages: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Memory of a whole run on one card, and what was reduced for it; what waits for a table on the
    host is added to ``stages``."""
    from jspeed.plan.host.choose import share_of
    from jspeed.plan.host.cost import exchange
    from jspeed.run.compute.division import looked_up

    cluster, host = placement.cluster, placement.host
    for number, step in enumerate(steps):
        if host is None:
            break
        stage, phase = divmod(number, recipe.period)
        computing = predict.simulate(step.kernels, cluster)[0].expected
        tokens = looked_up(recipe, step.stage, placement.mesh, step.parts)
        row = exchange(recipe, step.stage, phase, tokens, host, cluster.devices, computing)
        terms = stages[str(stage + 1)]["terms_s"]
        waits = terms.get("table on the host", [0.0])[0]
        waits += step.stage.steps * row["exposed_ms"] / 1e3
        terms["table on the host"] = [waits, waits]
    at_once = [recipe.tokens_per_step(step.stage) // step.parts for step in steps]
    chunks = [step.head_chunk for step in steps if step.head_chunk]
    reduced = [f"micro-batches of {min(at_once):,} to {max(at_once):,} tokens"]
    reduced += [f"the loss in chunks of {min(chunks):,}"] if chunks else []
    reduced += ["layers recomputed"] if any(step.remat for step in steps) else []
    if host:
        reduced.append(f"the table on the host, {share_of(recipe, host):.0%} of its rows")
    peak = max(step.memory["peak"] for step in steps)
    return {"peak_gb": peak / 1e9, "limit_gb": placement.limit / 1e9, "reduced": reduced}


def figures(
    name: str, steps: Sequence[tuple[int, int, int, Sequence[Kernel], int | None]]
) -> dict[str, Any]:
    """Figures by name of a program and its variants, whose ``steps`` are (stage, number, tokens of
    a lane, kernels, longest document)."""
    cluster, found = parse_target(PROGRAMS[name].target), {}
    flat = cluster._replace(target=cluster.target._replace(name="flat"))  # which has no table
    for variant, change in {"": as_it_is, **VARIANTS.get(name, {})}.items():
        stages: dict[str, dict[str, Any]] = {}  # by their number
        for number, count, lane, listed, longest in steps:
            changed = [change(kernel, lane, longest) for kernel in listed]
            stage = stages.setdefault(str(number), {"steps": 0, "flat_s": 0.0, "terms_s": {}})
            stage["steps"] += count
            stage["flat_s"] += count * predict.simulate(changed, flat)[0].total
            for term, pair in predict.terms_of(changed, cluster).items():
                old = stage["terms_s"].get(term, (0.0, 0.0))
                stage["terms_s"][term] = [a + count * b for a, b in zip(old, pair, strict=True)]
        found[name + variant] = {"target": cluster.name, "stages": stages}
    return found


def as_it_is(kernel: Kernel, lane: int, longest: int | None) -> Kernel:
    """No change."""
    return kernel


def in_bf16(kernel: Kernel) -> Kernel:
    """An FP8 matmul as cuBLAS has it in bf16."""
    cublas = kernel.instruction._replace(target="__cublas$lt$matmul")
    return kernel._replace(kind="matmul", dtype="bf16", instruction=cublas)


def without_fp8_backward(kernel: Kernel, lane: int, longest: int | None) -> Kernel:
    """The MLP's gradients in bf16: what PR 360 calls the FP8 extension, without its caches."""
    mlp = kernel.kind == "fp8_matmul" and MLP in kernel.dims
    return in_bf16(kernel) if mlp and "transpose(" in kernel.instruction.op_name else kernel


def without_fp8_down(kernel: Kernel, lane: int, longest: int | None) -> Kernel:
    """The MLP's second matmul, forward, in bf16: PR 342."""
    down = kernel.kind == "fp8_matmul" and kernel.dims[2] == MLP
    return in_bf16(kernel) if down and "transpose(" not in kernel.instruction.op_name else kernel


def near_gradients(kernel: Kernel, lane: int, longest: int | None) -> Kernel:
    """Attention's gradients within NEAR keys in long lanes: PR 371."""
    if kernel.kind != "attention_backward" or not kernel.seen or lane < 32768:
        return kernel
    words = WINDOW.sub(lambda m: f"{m[1]}{min(int(m[2]), NEAR)}", kernel.instruction.attributes)
    op = kernel.instruction._replace(attributes=words)
    flops = attention.flops_of(op, longest)
    return kernel._replace(instruction=op, flops=flops, seen=attention.seen_of(op, flops, longest))


def with_fast_sums(kernel: Kernel, lane: int, longest: int | None) -> Kernel:
    """FP8 matmuls with fast accumulation."""
    op = kernel.instruction
    return kernel._replace(instruction=op._replace(attributes=op.attributes.replace("HIGHEST", "")))


def as_cublas(kernel: Kernel, lane: int, longest: int | None) -> Kernel:
    """A custom FP8 matmul that is as fast as cuBLAS's."""
    op = kernel.instruction._replace(target="__cublas$lt$matmul")
    return kernel._replace(instruction=op) if kernel.kind == "fp8_matmul" else kernel


VARIANTS: dict[str, dict[str, Callable[[Kernel, int, int | None], Kernel]]] = {
    "r92": {
        ", FP8 backward off": without_fp8_backward,
        ", FP8 down off": without_fp8_down,
        ", gradient windows": near_gradients,
        ", fast sums": with_fast_sums,
        ", custom FP8 matmuls as fast as cuBLAS's": as_cublas,
    }
}


def cards(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of whole runs on one card."""
    yield from (
        "",
        "Whole runs on one card. [Targets](../python/jspeed/plan/targets/h100.toml) name prices"
        " and hosts, with dates and sources. *Waits*: share of the seconds in which the card waits"
        " for a table in the host's memory; all of it is a guess by rates of a core.",
        "",
        "| program | seconds | dollars | waits | memory, GB | reduced |",
        "|---|---|---|---|---|---|",
    )
    for name, program in CARDS.items():
        if name not in figures:
            continue
        one, found, cluster = figures[name], seconds(figures, name), parse_target(program.target)
        low, high = predict.predicted_range(found.seconds, cluster)
        dollars = found.seconds / 3600 * cluster.target.data_sheet.dollars_per_hour
        waits = next(
            (r["share"] for r in made_of(figures, name) if r["term"] == "table on the host"), 0.0
        )
        fits = "" if one["peak_gb"] <= one["limit_gb"] else ", **does not fit**"
        yield (
            f"| {name} | {found.seconds:,.0f} ({low:,.0f} to {high:,.0f}) | {dollars:.2f} |"
            f" {waits:.1%} | {one['peak_gb']:.1f} of {one['limit_gb']:.1f}{fits} |"
            f" {'; '.join(one['reduced'])} |"
        )


class Seconds(NamedTuple):
    """What is predicted of a program or a stage."""

    seconds: float
    steps: int
    guessed: float  # share

    @property
    def ms(self) -> float:
        """Of a step."""
        return 1e3 * self.seconds / self.steps


def made_of(figures: Mapping[str, Any], name: str, stage: str | None = None) -> list[TermRow]:
    """The terms of a program's seconds, or of one of its stages'."""
    stages = figures[name]["stages"]
    chosen = [stages[stage]] if stage else stages.values()
    return predict.by_term((1, each["terms_s"]) for each in chosen)


def seconds(figures: Mapping[str, Any], name: str, stage: str | None = None) -> Seconds:
    """What is predicted of a program, or of one of its stages."""
    stages, rows = figures[name]["stages"], made_of(figures, name, stage)
    steps = sum(each["steps"] for each in ([stages[stage]] if stage else stages.values()))
    return Seconds(sum(row["seconds"] for row in rows), steps, sum(row["guessed"] for row in rows))


def without_empty(figures: Mapping[str, Any], name: str) -> tuple[float, float]:
    """(by tables, by flat rates) milliseconds of a step, without empty blocks."""
    stages = figures[name]["stages"].values()
    steps = sum(stage["steps"] for stage in stages)
    tables = sum(
        pair[0]
        for stage in stages
        for term, pair in stage["terms_s"].items()
        if term != "empty blocks of attention"
    )
    return 1e3 * tables / steps, 1e3 * sum(stage["flat_s"] for stage in stages) / steps


class Check(NamedTuple):
    """A measured number of whole steps, beside the plan's."""

    what: str
    measured: float
    planned: float
    unit: str
    ours: bool  # a program of ours, or one equal to it
    why: str = ""
    same_card: bool = False  # as the plan's own rates of attention, copies and the loss

    @property
    def error(self) -> float:
        """Of the plan."""
        return self.planned / self.measured - 1


def checks(figures: Mapping[str, Any]) -> list[Check]:
    """All checks."""

    def of(name: str, stage: str | None = None) -> Seconds:
        return seconds(figures, name, stage)

    r92, r89 = of("r92"), of("r89")
    nanogpt = of("llmc on four")
    shares = {row["term"]: row["share"] for row in made_of(figures, "llmc on four")}
    alone = "one of eight devices' work, alone; the card of the plan's own rates", True
    return [
        Check("record 92 / record 89", 0.540, r92.seconds / r89.seconds, "", True,
              "PyTorch's programs, the same machine (39.914 and 73.889 s)"),
        Check("record 92, first stage", 16.97, of("r92", "1").ms, "ms", True,
              "PyTorch"),
        Check("record 92, longest stage", 45.0, of("r92", "4").ms, "ms", True, "PyTorch"),
        Check("record 89, longest stage", 82.6, of("r89", "3").ms, "ms", True, "PyTorch"),
        Check("r92 on an H200, longest stage", 47.99, of("r92, H200").ms, "ms", True, *alone),
        Check("the same, custom kernels off", 55.88,
              of("r92, H200, custom kernels off").ms, "ms", True, *alone),
        Check("jspeed3 on an H200, longest stage", 48.92, of("jspeed3, H200").ms, "ms", True,
              *alone),
        Check("nanoGPT 124M on four H100 NVL", 295.0, nanogpt.ms, "ms", True,
              "planned as llmc on four SXM boards of 700 W, not 400"),
        Check("its matmuls", 43.0, 100 * shares["bf16 matmuls"], "%", False, "of the step"),
        Check("its attention", 13.4, 100 * shares["attention"], "%", False, "of the step"),
        Check("its all-reduce", 12.3, 100 * shares["exposed communication"], "%", False,
              "PyTorch's whole gradient in fp32, here reduce-scatters that kernels hide"),
        Check("FP8 backward and caches (PR 360)", 5.02,
              of("r92, FP8 backward off").seconds - r92.seconds, "s", False,
              "matmuls alone: casts stay"),
        Check("FP8 down projection (PR 342)", 1.04,
              of("r92, FP8 down off").seconds - r92.seconds, "s", False,
              "there in record 89's base, of 1,285 steps and no sparser MLP"),
        Check("gradient windows (PR 371)", 0.76,
              r92.seconds - of("r92, gradient windows").seconds, "s", False,
              "there 15 to 18 of 21 heads, and one in four of the head's tokens"),
        Check("record 91 on one H100", 505.5, 8 * r92.seconds, "s", False,
              "8 x r92: no recipe here, and its table does not fit into one"),
    ]  # fmt: skip


def page(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield benchmarks/plan.md."""
    h100 = parse_target("h100x8")
    yield from (
        "# The plan beside what was measured",
        "",
        "Made by `python scripts/bench.py plans`, which plans each program below anew; the figures"
        " are in [plan.json](plan.json). How a plan comes about: [planning](../docs/plan.md).",
        "",
        "## Seconds",
        "",
        "| program | seconds, eight H100s | ms a step | guesses | before, with flat rates |",
        "|---|---|---|---|---|",
    )
    for name in PROGRAMS:
        if name in figures and PROGRAMS[name].target == "h100x8":
            found = seconds(figures, name)
            low, high = predict.predicted_range(found.seconds, h100)
            yield (
                f"| `{name}` | {found.seconds:,.1f} ({low:,.1f} to {high:,.1f}) | {found.ms:.2f} |"
                f" {found.guessed:.1%} | {BEFORE.get(name, '')} |"
            )
    yield from (
        "",
        "Steps of jspeed3 are evidence of two kinds. A model of width 128 copies worse by itself,"
        " so the first is the headline:",
        "",
        "| program | steps, of r92's | seconds |",
        "|---|---|---|",
    )
    for name, shares in STEPS.items():
        for why, share in shares.items() if name in figures else ():
            total = seconds(figures, name).ms * share * seconds(figures, "r92").steps / 1e3
            low, high = predict.predicted_range(total, h100)
            yield f"| `{name}` | {share:.3g}: {why} | {total:.1f} ({low:.1f} to {high:.1f}) |"
    yield from cards(figures)
    yield from ("", "| other | seconds | ms a step |", "|---|---|---|")
    for name in PROGRAMS:
        if name in figures and (", one" in name or ", eight" in name):
            found = seconds(figures, name)
            yield f"| {name} | {found.seconds:,.0f} | {found.ms:,.1f} |"
    yield from (
        "",
        "## Published programs",
        "",
        "Nothing is fitted. The range of a plan, x"
        f" {math.exp(predict.WIDTH_OF_RANGE * predict.spread(h100)):.2f} either way, comes of these"
        f" errors: 80 % of such programs. {leave_one_out()}",
        "",
        "| program | measured ms | planned | error |",
        "|---|---|---|---|",
    )
    for row in predict.calibration(h100):
        yield (
            f"| {row['source']} | {row['measured_ms']} | {row['predicted_ms']:.1f} |"
            f" {row['error']:+.1%} |"
        )
    yield from ("", "## Other checks", "")
    listed = checks(figures)
    yield (
        "Median error of those that are programs of ours or equal to one, on other cards than the"
        f" plan's own rates: **{median_error(listed):.1%}**."
    )
    yield from ("", "| what | measured | planned | error | |", "|---|---|---|---|---|")
    for one in listed:
        unit = f" {one.unit}" if one.unit else ""
        digits = 3 if one.measured < 1 else 2 if one.measured < 100 else 0
        yield (
            f"| {one.what} | {one.measured:.{digits}f}{unit} | {one.planned:.{digits}f}{unit} |"
            f" {one.error:+.1%} | {one.why} |"
        )
    yield from (
        "",
        "## Levers of r92, by what kernels take",
        "",
        "| lever | seconds |",
        "|---|---|",
    )
    yield f"| as it is | {seconds(figures, 'r92').seconds:.2f} |"
    for name in (", fast sums", ", custom FP8 matmuls as fast as cuBLAS's", ", gradient windows"):
        if "r92" + name in figures:
            yield f"| {name[2:]} | {seconds(figures, 'r92' + name).seconds:.2f} |"
    yield from (
        "",
        "## What r92's seconds are made of",
        "",
        "| term | s | guessed |",
        "|---|---|---|",
    )
    for term in made_of(figures, "r92"):
        yield f"| {term['term']} | {term['seconds']:.2f} | {term['guessed']:.1%} of all |"


def leave_one_out() -> str:
    """What one fitted factor would do."""
    logs = [math.log(p.measured_ms / p.tables_ms) for p in predict.MEASURED]
    others = [(sum(logs) - own) / (len(logs) - 1) for own in logs]
    errors = [own - factor for own, factor in zip(logs, others, strict=True)]
    with_it, without = (math.sqrt(statistics.fmean(e * e for e in x)) for x in (errors, logs))
    factor = math.exp(statistics.fmean(logs))
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    return (
        f"A factor over all terms, fitted on them, would be {factor:.3f} +- {error:.3f}; fitted on"
        f" five it predicts the sixth with an error of {with_it:.1%}, and none with {without:.1%},"
        " so there is none."
    )


def median_error(listed: Sequence[Check]) -> float:
    """Of the checks that are programs of ours and share no card with the plan's own rates."""
    return statistics.median(abs(one.error) for one in listed if one.ours and not one.same_card)
