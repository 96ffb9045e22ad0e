"""Time the training step of one recipe on the devices at hand, stage by stage; ``jspeed bench gpu``
prints the rows."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from benches.kernel_profile import Profile, profile
from benches.synthetic import lanes_of, vocabulary
from jspeed.base.compiler import memory_needed
from jspeed.data import Shards
from jspeed.parallel import DEFAULT_LAYOUT
from jspeed.parallel.mesh import batch_lanes, put_lanes, replicated
from jspeed.plan.target import data_sheet_of
from jspeed.recipe import Recipe, Stage
from jspeed.record.sizes import flops_per_token, scored_heads
from jspeed.run.clock import now
from jspeed.run.compute.device import Device, device_of
from jspeed.run.compute.division import Attempt, place
from jspeed.run.compute.program import check_state_fits, fit, state_shardings
from jspeed.run.compute.step import State, init_state
from jspeed.run.setup import open_loader

ALL_STAGES = 4  # of a recipe with more, the first, the middle and the last one are measured
LONG_RUN = 1_000_000  # steps: more than are ever measured
# The first loss of a new state, in ln V: from equal chances of the tokens that are scored to those
# of the whole vocabulary, and what random weights add.
FIRST_LOSS = 0.9, 1.2


@dataclass(frozen=True)
class Row:
    """One stage of one recipe. Milliseconds are of a whole step, memory is bytes of one device."""

    recipe: str
    recipe_hash: str
    stage: int
    stages: int
    lanes: int
    lane_len: int
    longest_window: int | None
    attention: str  # backend
    micro_batches: int
    head_chunk: int | None
    remat: bool
    compile_seconds: float
    steps: int
    step_ms_median: float
    step_ms_p99: float
    step_ms_in_a_row: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    flops_per_token: float
    mfu: float | None
    memory_needed: int
    memory_peak: int | None
    data_wait_ms: float | None
    first_loss: float
    loss: float
    profile: Profile | str


@dataclass(frozen=True)
class Settings:
    """What all measurements share."""

    mesh: Mesh
    attention: str | None  # backend instead of the one that each recipe gets
    micro_batch: int | None
    steps: int
    shards: Shards | None


class Timing(NamedTuple):
    """What was measured of a stage's steps, in seconds."""

    alone: list[float]  # of each step that is waited for
    in_a_row: float  # of a step among as many that are not
    wait: float  # for data, a step
    losses: list[float]  # of all steps, warm-up included
    profile: Profile | str


class Compiled(NamedTuple):
    """The programs of one stage: of its first state, and of a step of each phase."""

    init: jax.stages.Compiled
    steps: list[jax.stages.Compiled]
    fitted: Attempt  # the last one's settings
    device: Device
    seconds: float

    @property
    def texts(self) -> list[str]:
        """Optimised HLO of the steps."""
        return [str(step.as_text()) for step in self.steps]


def measure_recipe(recipe: Recipe, recipe_hash: str, setting: Settings) -> Iterator[Row]:
    """Measure the stages of a recipe one after the other, on one training state."""
    state = None
    for index in stages_to_measure(len(recipe.stages)):
        asked = setting.attention, None, recipe, None, setting.micro_batch
        device = device_of(setting.mesh, *asked)
        made = compile_stage(recipe, index, setting, device)
        row, state = measure_stage(recipe, recipe_hash, index, setting, made, state)
        yield row


def compile_stage(
    recipe: Recipe, index: int, setting: Settings, device: Device, at_once: int = 1
) -> Compiled:
    """Compile the steps of a stage, ``at_once`` side by side, and its first state. Raises
    :class:`BadInput` where that does not fit in memory."""
    mesh, began = setting.mesh, now()
    placement = place(recipe, mesh, DEFAULT_LAYOUT, device)
    check_state_fits(recipe, placement, {})
    with ThreadPoolExecutor(at_once) as pool:
        one = partial(fit, recipe, placement, index)
        fitted = list(pool.map(one, range(recipe.period)))
    seconds = now() - began
    _, shardings = state_shardings(recipe, DEFAULT_LAYOUT, mesh)
    init = jax.jit(
        lambda seed: init_state(recipe, seed, DEFAULT_LAYOUT, mesh), out_shardings=shardings
    )
    seed = jax.ShapeDtypeStruct((), np.uint32, sharding=replicated(mesh))
    programs = [attempt.program for attempt in fitted]
    return Compiled(init.lower(seed).compile(), programs, fitted[-1], device, seconds)


def measure_stage(
    recipe: Recipe,
    recipe_hash: str,
    index: int,
    setting: Settings,
    made: Compiled,
    state: State | None = None,
) -> tuple[Row, State]:
    """Measure one stage, from ``state`` or a first one: (its figures, the last state).

    Raises :class:`FloatingPointError` for a loss that is not finite, or that a first state cannot
    have: its time would be that of another computation."""
    mesh, stage, best = setting.mesh, recipe.stages[index], peak_flops(setting.mesh)
    last, fresh = made.fitted, state is None
    if state is None:
        state = made.init(jax.device_put(np.uint32(1), replicated(mesh)))
    before = peak_bytes(mesh)
    state, timing = run(made.steps, state, recipe, stage, setting)
    check_losses(recipe, stage, timing.losses, fresh)
    most = peak_bytes(mesh)
    rate = recipe.tokens_per_step(stage) / timing.in_a_row
    flops = flops_per_token(recipe, stage)
    row = Row(
        recipe=recipe.name,
        recipe_hash=recipe_hash,
        stage=index + 1,
        stages=len(recipe.stages),
        lanes=recipe.lanes,
        lane_len=stage.lane_len,
        longest_window=max(stage.windows, default=None),
        attention=made.device.attention,
        micro_batches=last.parts,
        head_chunk=last.head_chunk,
        remat=last.remat,
        compile_seconds=made.seconds,
        steps=setting.steps,
        step_ms_median=1e3 * statistics.median(timing.alone),
        step_ms_p99=1e3 * float(np.percentile(timing.alone, 99)),
        step_ms_in_a_row=1e3 * timing.in_a_row,
        tokens_per_second=rate,
        tokens_per_second_per_device=rate / mesh.size,
        flops_per_token=flops,
        mfu=flops * rate / (mesh.size * best) if best else None,
        memory_needed=max(memory_needed(step) for step in made.steps),
        # The allocator's peak is the process's, XLA's trials of kernels included: only a new one is
        # this stage's.
        memory_peak=most if most and most > (before or 0) else None,
        data_wait_ms=1e3 * timing.wait if setting.shards else None,
        first_loss=timing.losses[0],
        loss=timing.losses[-1],
        profile=timing.profile,
    )
    return row, state


def run(
    steps: Sequence[Callable[[State, jax.Array], Any]],
    state: State,
    recipe: Recipe,
    stage: Stage,
    setting: Settings,
) -> tuple[State, Timing]:
    """Run steps and return (the last state, what was measured).

    Where a recipe's steps take turns, all of a period are run and profiled together, and their time
    is divided by their number. Not for long: hundreds of steps on one batch leave a loss of 0, and
    Muon's updates, as large for the smallest gradient, then lead anywhere, NaN included.
    """
    rows = batch_lanes(setting.mesh)
    loader = None
    feed: Iterator[Any] = itertools.repeat(None)
    if setting.shards:
        endless = replace(recipe, stages=(dataclasses.replace(stage, steps=LONG_RUN),))
        loader = feed = open_loader(endless, setting.shards, seed=1)
    else:
        resident = jax.device_put(lanes_of(recipe, stage), rows)

    def placed(batch: Any) -> jax.Array:
        return (
            put_lanes(batch.tokens.astype(recipe.data.dtype, copy=False), rows)
            if loader
            else resident
        )

    periods = -(-setting.steps // len(steps))
    seen: list[jax.Array] = []  # losses; read after the timing, but for those of steps in a row

    def one() -> None:
        nonlocal state
        for step in steps:
            state, metrics = step(state, placed(next(feed)))
            jax.block_until_ready((state, metrics))
            seen.append(metrics["loss"])

    alone, waits = [], 0.0
    with loader or nullcontext():
        for _ in range(2):
            one()
        for _ in range(periods):
            began = now()
            one()
            alone.append((now() - began) / len(steps))
        began = now()
        for step in [*steps] * periods:
            asked = now()
            batch = next(feed)
            waits += now() - asked
            state, metrics = step(state, placed(batch))
            jax.device_get(seen[-1])  # as the training loop: one number a step, one step late
            seen.append(metrics["loss"])
        jax.block_until_ready(state)
        in_a_row = (now() - began) / (len(steps) * periods)
        kernels = profile(one)
    losses = [float(loss) for loss in jax.device_get(seen)]
    waited = waits / (len(steps) * periods)
    return state, Timing(alone, in_a_row, waited, losses, kernels)


def check_losses(recipe: Recipe, stage: Stage, losses: Sequence[float], fresh: bool) -> None:
    """Raise :class:`FloatingPointError` for a loss that is not finite and, of a ``fresh`` state,
    for a first one far from that of equal chances."""
    named = f"recipe {recipe.name}, lanes of {stage.lane_len} tokens"
    for number, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"{named}: the loss of step {number} is {loss}, so its time is not that of training"
            )
    scored = min((rows for rows, _ in scored_heads(recipe, stage)), default=vocabulary(recipe))
    least = FIRST_LOSS[0] * math.log(min(scored, vocabulary(recipe)))
    most = FIRST_LOSS[1] * math.log(vocabulary(recipe))
    if fresh and not least <= losses[0] <= most:
        raise FloatingPointError(
            f"{named}: the first loss is {losses[0]:.3f}, expected {least:.2f} to {most:.2f}"
        )


def stages_to_measure(stages: int) -> list[int]:
    """Indices of the stages to measure."""
    return list(range(stages)) if stages <= ALL_STAGES else [0, stages // 2, stages - 1]


def peak_flops(mesh: Mesh) -> float | None:
    """Peak dense bf16 FLOP/s of one device, or None for a kind that is no target of ``jspeed
    plan``."""
    sheet = data_sheet_of(mesh.devices.flat[0].device_kind)
    return sheet.peak_flops["bf16"] if sheet else None


def peak_bytes(mesh: Mesh) -> int | None:
    """The most bytes that were in use at once on a device since the process began, where the
    allocator counts them."""
    stats = [device.memory_stats() for device in mesh.local_devices]
    return (
        max(s["peak_bytes_in_use"] for s in stats)
        if all(s and "peak_bytes_in_use" in s for s in stats)
        else None
    )
