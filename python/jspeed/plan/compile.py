"""Compile the training step of every stage ahead of time for absent GPUs; find the micro-batch that fits in memory."""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax

from jspeed.cores import cores
from jspeed.jax_versions import reserve_workspace
from jspeed.parallel.layout import with_remat
from jspeed.plan import hlo
from jspeed.plan.attention import workspace_bytes
from jspeed.plan.cost import Kernel, kernels, with_windows
from jspeed.plan.schema import Allocation
from jspeed.plan.target import Cluster, pretend, target_mesh, without_machine_code
from jspeed.recipe import Recipe, Stage
from jspeed.run.compute import compiler, program
from jspeed.run.compute.accumulators import first_alike, steps_of, updates
from jspeed.run.compute.device import GPUS, Placement, device_of
from jspeed.run.compute.division import micro_batches
from jspeed.run.compute.memory_fallbacks import Attempt, attempts

WINDOW = re.compile(r'(sliding_window_length(?:\\22|")\s*:\s*)\d+')  # StableHLO writes a quote as \22


@dataclass(frozen=True)
class Step:
    """The compiled step of one stage, as one device runs it."""

    stage: Stage  # with as many steps as run this program
    parts: int  # micro-batches
    text: str  # optimised HLO
    memory: dict[Allocation, int]  # bytes
    shared: bool = False  # not compiled: that of another stage, or step, which differs in nothing that is read here
    changed: "tuple[Step, Step] | None" = None  # not compiled: this one, more the first of these, less the second
    windows: tuple[tuple[int, int], ...] = ()  # (window that was compiled, window of this stage)
    head_chunk: int | None = None  # tokens of a row that the head's loss takes at once; None: all
    remat: bool = False  # whether layers are recomputed for their gradients because memory is short

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels in order, with this stage's attention windows."""
        compiled = kernels(self.text, self.stage.max_doc_len)
        return with_windows(compiled, dict(self.windows), self.stage.max_doc_len) if self.windows else compiled


@dataclass(frozen=True)
class Hardware(Placement):
    """What a plan compiles for: absent devices of a ``cluster``."""

    cluster: Cluster

    @property
    def limit(self) -> int:
        """Bytes of one device that a step may take."""
        return self.device.memory or self.cluster.facts.hbm_bytes


def hardware_for(cluster: Cluster, layout: str, axes: dict[str, int] | None = None) -> Hardware:
    """Return the absent devices of ``cluster``. Raises :class:`BadInput` without a plugin.

    Set ``jax_platforms`` to ``cpu`` first (:func:`.target.target_mesh`).
    """
    mesh = target_mesh(cluster.target, cluster.per_node, cluster.nodes, axes)
    return Hardware(mesh, layout, device_of(mesh, memory=cluster.usable_bytes), cluster)


def with_backend(hardware: Hardware, recipe: Recipe) -> Hardware:
    """Return ``hardware`` with the attention backend that training takes for ``recipe``."""
    if hardware.device.platform not in GPUS:
        return hardware
    device = device_of(hardware.mesh, memory=hardware.device.memory, recipe=recipe)
    # fa4 asks the live backend, and its kernels carry no shapes to read FLOPs from.
    return replace(hardware, device=replace(device, attention=device.attention.replace("fa4", "cudnn")))


def compile_stages(recipe: Recipe, hardware: Hardware, micro_batch: int | None = None) -> list[Step]:
    """Compile each stage's steps as :func:`compile_that_fits` does, as many programs a stage as the recipe's period.

    Stages that differ only in attention windows share one program. This is checked: the StableHLO of the first and the
    last stage of a group must be identical apart from the windows. Steps of a stage that update the same parameters
    after as many steps are one program, as in a run. Of others :func:`by_difference` leaves some out.
    """
    stages, period = programs(recipe), recipe.period
    alike_to = {
        number: first
        for number, stage in enumerate(stages)
        if (first := number - number % period + first_alike(recipe, stage, number % period)) != number
    }
    changes = by_difference(recipe, [number for number in range(len(stages)) if number not in alike_to])
    groups: dict[tuple, list[int]] = {}
    for number, stage in enumerate(stages):
        if number in alike_to or number in changes:
            continue
        what = stage.lane_len, stage.max_docs, stage.scored, updates(recipe, stage, number % period)
        groups.setdefault((*what, *moving(recipe, stage, number % period)), []).append(number)
    copies: dict[int, int] = {}
    # Lowering is single-threaded; XLA compiles in the pool meanwhile.
    with pretend(hardware.cluster.target), ThreadPoolExecutor(cores()) as pool:

        def build(number: int) -> tuple[Step, Attempt | None]:
            attempt = compile_that_fits(recipe, stages[number], hardware, micro_batch, number % period)
            step = step_of(stages[number], attempt)
            largest_buffers(step), memory_by_kind(step)  # read while the other cores compile
            return step, attempt if number in compared else None

        def start(number: int) -> Future[tuple[Step, Attempt | None]]:
            return pool.submit(build, number)

        compared = {members[-1] for members in groups.values() if len(members) > 1}
        jobs = {members[-1]: start(members[-1]) for members in groups.values()}
        for first, *rest in (members for members in groups.values() if len(members) > 1):
            last = rest[-1]
            alike = all(_windows(stages[last], stages[n]) is not None for n in (first, *rest))
            if alike:
                taken = jobs[last].result()[1]
                assert taken
                how = add_remat(hardware) if taken.remat else hardware
                lowered = lower(recipe, stages[first], how, taken.parts, first % period, taken.head_chunk)
                alike = len({WINDOW.sub(r"\1", program_.as_text()) for program_ in (taken.lowered, lowered)}) == 1
            others = (first, *rest[:-1])
            if alike:
                copies |= dict.fromkeys(others, last)
            else:
                jobs |= {n: start(n) for n in others}
        steps = {number: job.result()[0] for number, job in jobs.items()}
    for number, last in [*copies.items(), *alike_to.items()]:
        steps[number] = with_stage(steps[last], stages[number])
    for number, (base, other, less) in changes.items():
        changed = steps[other], steps[less]
        steps[number] = replace(steps[base], stage=stages[number], shared=True, changed=changed)
    return [steps[number] for number in range(len(stages))]


def by_difference(recipe: Recipe, numbers: Sequence[int]) -> dict[int, tuple[int, int, int]]:
    """Return which programs of a recipe with a longer period need not be compiled, by number: (base, other, less).

    Of the steps of a stage the first updates least and the last most. Those between them differ from the first in
    gathers, updates, averages and sums of gradients of whole parameters, whatever the stage's batch. So they are
    compiled for one stage of those with an equal ``every`` and equal averages, the longest: in another one such a step
    is the first, more that of the longest stage (``other``), less the first of that.
    """
    period, stages = recipe.period, recipe.stages
    summed = {}
    for number in numbers:
        stage, phase = divmod(number, period)
        ends = [n % period for n in numbers if n // period == stage]
        if phase in (ends[0], ends[-1]):
            continue
        moved = moving(recipe, stages[stage], phase)
        alike = [n for n, s in enumerate(stages) if s.every == stages[stage].every]
        alike = [n for n in alike if moving(recipe, stages[n], phase) == moved]
        model = max(alike, key=lambda n: stages[n].steps)
        if model != stage:
            start = model * period
            summed[number] = stage * period + ends[0], start + phase, start + ends[0]
    return summed


def moving(recipe: Recipe, stage: Stage, phase: int) -> tuple[bool, ...]:
    """Return which averages of weights move in some of the steps of a stage and phase."""
    steps = steps_of(recipe, stage, phase) if recipe.averages else ()
    return tuple(bool(average.moves(steps).any()) for average in recipe.averages)


def programs(recipe: Recipe) -> list[Stage]:
    """Return every stage as often as the recipe has phases, with the number of steps that are in each."""
    listed, start = [], 0
    for stage in recipe.stages:
        phases = [step % recipe.period for step in range(start, start + stage.steps)]
        listed += [replace(stage, steps=phases.count(phase)) for phase in range(recipe.period)]
        start += stage.steps
    return listed


def with_stage(step: Step, stage: Stage) -> Step:
    """The step of a stage that differs in attention windows alone from the one that was compiled."""
    pairs = _windows(step.stage, stage) or ()
    return replace(step, stage=stage, shared=True, windows=pairs)


def lower(
    recipe: Recipe, stage: Stage, hardware: Hardware, parts: int, phase: int = -1, head_chunk: int | None = None
) -> jax.stages.Lowered:
    """Lower one stage's step through the code that training runs, with the workspace that cuDNN asks for on a GPU."""
    lowered = program.trace_step(recipe, stage, hardware, parts, phase, head_chunk).lower()
    reserve_workspace(lowered, partial(workspace_bytes, hardware.cluster.target.capability))
    return lowered


def add_remat(hardware: Hardware) -> Hardware:
    """Return ``hardware`` with layers recomputed for their gradients."""
    return replace(hardware, layout=with_remat(hardware.layout))


def compile_that_fits(
    recipe: Recipe, stage: Stage, hardware: Hardware, micro_batch: int | None = None, phase: int = -1
) -> Attempt:
    """Compile a stage's step as training would: the first attempt that fits in memory, or the last if none fits.

    Tries ``micro_batch`` tokens per device, or all sizes if None. Raises :class:`.compiler.DoesNotFit` where a TPU's
    compiler refuses the last attempt. Call inside :func:`.target.pretend`.
    """
    numbers = micro_batches(recipe, stage, hardware.mesh, hardware.device, micro_batch)
    for attempt in tries(recipe, stage, hardware, numbers, phase):
        if attempt.fits(hardware.limit):
            break
    if attempt.step is None:
        raise compiler.DoesNotFit(attempt.need)
    return attempt


def tries(
    recipe: Recipe, stage: Stage, hardware: Hardware, numbers: Sequence[int], phase: int = -1
) -> Iterator[Attempt]:
    """Yield the attempts of training with each of ``numbers`` of micro-batches."""

    def lowered(parts: int, head_chunk: int | None, remat: bool) -> jax.stages.Lowered:
        return lower(recipe, stage, add_remat(hardware) if remat else hardware, parts, phase, head_chunk)

    build = partial(compiler.compiled, device=hardware.device, more=without_machine_code())
    measure = partial(compiler.measured, build)
    return attempts(recipe, stage, hardware.mesh, numbers, hardware.limit, lowered, measure)


def step_of(stage: Stage, attempt: Attempt) -> Step:
    """Read a compiled step: its text, and what the compiler says of memory."""
    built: Any = attempt.step
    sizes = built.memory_analysis()
    memory: dict[Allocation, int] = {
        "arguments": sizes.argument_size_in_bytes,
        "outputs": sizes.output_size_in_bytes,
        "aliased": sizes.alias_size_in_bytes,
        "temporaries": sizes.temp_size_in_bytes,
        "peak": attempt.need,
    }
    return Step(stage, attempt.parts, str(built.as_text()), memory, head_chunk=attempt.head_chunk, remat=attempt.remat)


def memory_by_kind(step: Step) -> dict[str, int]:
    """Peak memory of one device by use, in bytes; the values sum to the peak.

    "gathered parameters" is the sum of all gathers of the step, which need not exist at once.
    """
    kinds = {"parameters": 0, "optimizer": 0, "batch": 0}
    for argument in hlo.arguments(step.text):
        kind = "batch"
        if argument.op_name.startswith("state"):
            kind = "parameters" if "'params'" in argument.op_name[:20].replace("\\", "") else "optimizer"
        kinds[kind] += argument.bytes
    collectives = [kernel.collective for kernel in step.kernels if kernel.collective]
    gathered = sum(one.bytes for one in collectives if one.kind == "all-gather")
    gathered = min(gathered, step.memory["temporaries"])
    rest = step.memory["peak"] - sum(kinds.values()) - gathered
    return kinds | {"gathered parameters": gathered, "activations, gradients and workspace": rest}


def largest_buffers(step: Step) -> list[hlo.Buffer]:
    """The 10 largest arrays, of 64 kB or more, that differ in shape or source."""
    different = {(buffer.array, buffer.instruction.source): buffer for buffer in hlo.buffers(step.text, 2**16)}
    return list(different.values())[:10]


def _windows(compiled: Stage, stage: Stage) -> tuple[tuple[int, int], ...] | None:
    """Map compiled windows to another stage's; None if equal windows map to different ones."""
    if len(compiled.windows) != len(stage.windows):
        return None
    pairs = dict(zip(compiled.windows, stage.windows, strict=True))
    if any(pairs[there] != here for there, here in zip(compiled.windows, stage.windows, strict=True)):
        return None
    return tuple(pairs.items())
