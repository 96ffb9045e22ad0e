"""Compile the training step of every stage ahead of time for absent GPUs; find the micro-batch that
fits in memory."""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import Mesh

from jspeed.base import compiler
from jspeed.base.cores import cores
from jspeed.base.jax_versions import reserve_workspace
from jspeed.parallel.layout import with_remat
from jspeed.plan import hlo
from jspeed.plan.absent import machine_code
from jspeed.plan.attention import workspace_bytes
from jspeed.plan.cost import Kernel, kernels
from jspeed.plan.host.cost import Host
from jspeed.plan.schema import Allocation
from jspeed.plan.target import Cluster, pretend, target_mesh
from jspeed.recipe import Recipe, Stage
from jspeed.run.compute import program
from jspeed.run.compute.accumulators import first_alike, steps_of, updates
from jspeed.run.compute.device import GPU_MICRO_BATCH, Device, Placement, Request, device_of
from jspeed.run.compute.division import Attempt, attempts, place

# StableHLO writes a quote as \22
WINDOW = re.compile(r'(sliding_window_length(?:\\22|")\s*:\s*)(\d+)')


@dataclass(frozen=True)
class Step:
    """The compiled step of one stage, as one device runs it."""

    stage: Stage  # with as many steps as run this program
    parts: int  # micro-batches
    text: str  # optimised HLO, with this stage's attention windows
    memory: dict[Allocation, int]  # bytes
    # not compiled: that of another stage, or step, which differs in nothing that is read here
    shared: bool = False
    head_chunk: int | None = None  # tokens of a row that the head's loss takes at once; None: all
    remat: bool = False  # whether layers are recomputed for their gradients because memory is short

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels in order."""
        return kernels(self.text, self.stage.max_doc_len)


def silent(words: str) -> None:
    """Print nothing of a program that is compiled."""


@dataclass(frozen=True)
class TargetPlacement(Placement):
    """The placement of a recipe's programs on absent devices, those of ``cluster``; ``tell`` is
    told of each program, in words, as its compilation starts and ends; ``host`` has the tables that
    do not fit the devices."""

    cluster: Cluster
    tell: Callable[[str], None] = silent
    host: Host | None = None

    @property
    def limit(self) -> int:
        """Bytes of one device that a step may take."""
        return self.device.memory or self.cluster.target.data_sheet.hbm_bytes


def place_on_target(
    recipe: Recipe,
    cluster: Cluster,
    layout: str,
    axes: dict[str, int] | None = None,
    micro_batch: int | None = None,
    tell: Callable[[str], None] = silent,
) -> TargetPlacement:
    """Return the placement of ``recipe`` on ``cluster``, with the attention backend that training
    takes there; ``tell`` is told of each program that is compiled for it.

    Set ``jax_platforms`` to ``cpu`` first (:func:`.target.target_mesh`). Raises :class:`BadInput`
    without a plugin, and as :func:`jspeed.run.compute.division.place` does.
    """
    mesh = target_mesh(cluster.target, cluster.per_node, cluster.nodes, axes)
    device = device_of(mesh, None, cluster.usable_bytes, recipe, micro_batch=micro_batch)
    placement = place(recipe, mesh, layout, device)
    return TargetPlacement(cluster=cluster, tell=tell, **vars(placement))


def place_on_gpus(
    recipe: Recipe, layout: str, mesh: Mesh, micro_batch: int | None = None
) -> Placement:
    """Return the placement of ``recipe`` that training on GPUs would try first. Raises
    :class:`BadInput` as :func:`jspeed.run.compute.division.place` does."""
    asked = Request(micro_batch=micro_batch)
    gpu = Device("gpu", "cudnn", "native", GPU_MICRO_BATCH, asked=asked)
    return place(recipe, mesh, layout, gpu)


def compile_stages(recipe: Recipe, placement: TargetPlacement) -> list[Step]:
    """Compile each stage's steps as :func:`compile_that_fits` does, as many programs a stage as the
    recipe's period.

    Steps of a stage that are alike (:func:`.accumulators.first_alike`) are one program, as in a
    run. Stages that differ only in attention windows share one, if its StableHLO is that of another
    of them but for the windows.
    """
    period = recipe.period
    jobs = [(number, first_alike(recipe, stage, phase)) for number, stage in
    enumerate(recipe.stages)
            for phase in range(period)]  # fmt: skip
    groups: dict[tuple, list[program.Job]] = {}
    for number, phase in dict.fromkeys(jobs):
        stage = recipe.stages[number]
        key = (
            stage.lane_len,
            stage.max_docs,
            stage.scored,
            updates(recipe, stage, phase),
            averages_that_move(recipe, stage, phase),
        )
        groups.setdefault(key, []).append((number, phase))
    total, done = sum(map(len, groups.values())), list[program.Job]()
    said = placement.tell
    placement = replace(placement, tell=lambda words: said(f"[{len(done)}/{total}] {words}"))
    compared = {members[-1] for members in groups.values() if len(members) > 1}

    def build(job: program.Job) -> tuple[Step, Attempt | None]:
        attempt = compile_that_fits(recipe, placement, *job)
        done.append(job)
        placement.tell(f"{program_name(recipe, *job)} is compiled")
        step = read_step(recipe.stages[job[0]], attempt)
        largest_buffers(step), memory_by_kind(step)  # read while the other cores compile
        return step, attempt if job in compared else None

    compiled = {job: job for job in jobs}  # whose program a job has
    # Lowering is single-threaded; XLA compiles in the pool meanwhile.
    with pretend(placement.cluster.target), ThreadPoolExecutor(cores() + 1) as pool:
        building = {members[-1]: pool.submit(build, members[-1]) for members in groups.values()}
        for *others, last in groups.values():
            if others and differ_in_windows(
                recipe, placement, others, last, building[last].result()[1]
            ):
                compiled |= dict.fromkeys(others, last)
                done.extend(others)
                names = ", ".join(program_name(recipe, *job) for job in others)
                placement.tell(f"{names}: the program of {program_name(recipe, *last)}")
            else:
                building |= {job: pool.submit(build, job) for job in others}
        steps = {job: result.result()[0] for job, result in building.items()}
    return [
        with_stage(
            steps[compiled[job]], stage, shared=compiled[job] != (number // period, number % period)
        )
        for number, (job, stage) in enumerate(zip(jobs, stages_by_phase(recipe), strict=True))
    ]


def program_name(recipe: Recipe, stage: int, phase: int = 0) -> str:
    """Name the program of a stage, counted from 0, and of a step of the recipe's period."""
    step = f", step {phase % recipe.period + 1} of {recipe.period}" if recipe.period > 1 else ""
    return f"stage {stage + 1}{step}"


def differ_in_windows(
    recipe: Recipe,
    placement: TargetPlacement,
    jobs: Sequence[program.Job],
    last: program.Job,
    attempt: Attempt | None,
) -> bool:
    """Whether ``jobs`` differ from ``last``, whose program is ``attempt``'s, in nothing but
    attention windows.

    The first of them is lowered and compared.
    """
    assert attempt
    if any(_windows(recipe.stages[last[0]], recipe.stages[number]) is None for number, _ in jobs):
        return False
    (number, phase), *_ = jobs
    how = add_remat(placement) if attempt.remat else placement
    lowered = lower(recipe, recipe.stages[number], how, attempt.parts, phase, attempt.head_chunk)
    return WINDOW.sub(r"\1", lowered.as_text()) == WINDOW.sub(r"\1", attempt.lowered.as_text())


def averages_that_move(recipe: Recipe, stage: Stage, phase: int) -> tuple[bool, ...]:
    """Return which averages of weights move in some of the steps of a stage and phase."""
    steps = steps_of(recipe, stage, phase) if recipe.averages else ()
    return tuple(bool(average.moves(steps).any()) for average in recipe.averages)


def stages_by_phase(recipe: Recipe) -> list[Stage]:
    """Return every stage as often as the recipe has phases, with the number of steps that are in
    each."""
    listed, start = [], 0
    for stage in recipe.stages:
        phases = [step % recipe.period for step in range(start, start + stage.steps)]
        listed += [replace(stage, steps=phases.count(phase)) for phase in range(recipe.period)]
        start += stage.steps
    return listed


def with_stage(step: Step, stage: Stage, shared: bool = True) -> Step:
    """A compiled step as that of ``stage``, which may differ in attention windows."""
    windows = _windows(step.stage, stage) or {}
    text = WINDOW.sub(lambda match: f"{match[1]}{windows.get(int(match[2]), match[2])}", step.text)
    return replace(step, stage=stage, shared=shared, text=text)


def lower(
    recipe: Recipe,
    stage: Stage,
    placement: TargetPlacement,
    parts: int,
    phase: int = -1,
    head_chunk: int | None = None,
) -> jax.stages.Lowered:
    """Lower one stage's step through the code that training runs, with the workspace that cuDNN
    asks for on a GPU."""
    lowered = program.trace_step(recipe, stage, placement, parts, phase, head_chunk).lower()
    reserve_workspace(lowered, partial(workspace_bytes, placement.cluster.target.capability))
    return lowered


def add_remat(placement: TargetPlacement) -> TargetPlacement:
    """Return ``placement`` with layers recomputed for their gradients."""
    return replace(placement, layout=with_remat(placement.layout))


def compile_that_fits(
    recipe: Recipe, placement: TargetPlacement, number: int, phase: int = -1
) -> Attempt:
    """Compile a stage's step as training would: the first attempt that fits in memory, or the last
    if none fits.

    ``number`` is the stage's. Raises :class:`.compiler.DoesNotFit` where a TPU's compiler refuses
    the last attempt. Call inside :func:`.target.pretend`.
    """
    numbers = placement.micro_batches[number]
    for attempt in step_attempts(recipe, recipe.stages[number], placement, numbers, phase):
        if attempt.fits(placement.limit):
            break
    if attempt.step is None:
        raise compiler.DoesNotFit(attempt.need)
    return attempt


def step_attempts(
    recipe: Recipe,
    stage: Stage,
    placement: TargetPlacement,
    numbers: Sequence[int],
    phase: int = -1,
) -> Iterator[Attempt]:
    """Yield the attempts of training with each of ``numbers`` of micro-batches."""

    def lowered(parts: int, head_chunk: int | None, remat: bool) -> jax.stages.Lowered:
        tokens = recipe.tokens_per_step(stage) // placement.mesh.shape["data"] // parts
        chunk = f", loss in chunks of {head_chunk:,}" if head_chunk else ""
        placement.tell(
            f"compiling {program_name(recipe, recipe.stages.index(stage), phase)},"
            f" micro-batch of {tokens:,} tokens{chunk}" + ", layers recomputed" * remat
        )
        return lower(
            recipe, stage, add_remat(placement) if remat else placement, parts, phase, head_chunk
        )

    build = partial(machine_code.compiled, device=placement.device)
    measure = partial(compiler.need_and_step, build)
    return attempts(recipe, stage, placement.mesh, numbers, placement.limit, lowered, measure)


def read_step(stage: Stage, attempt: Attempt) -> Step:
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
    return Step(
        stage,
        attempt.parts,
        str(built.as_text()),
        memory,
        head_chunk=attempt.head_chunk,
        remat=attempt.remat,
    )


def memory_by_kind(step: Step) -> dict[str, int]:
    """Peak memory of one device by use, in bytes; the values sum to the peak.

    "gathered parameters" is the sum of all gathers of the step, which need not exist at once.
    """
    kinds = {"parameters": 0, "optimizer": 0, "batch": 0}
    for argument in hlo.arguments(step.text):
        kind = "batch"
        if argument.op_name.startswith("state"):
            kind = (
                "parameters"
                if "'params'" in argument.op_name[:20].replace("\\", "")
                else "optimizer"
            )
        kinds[kind] += argument.bytes
    collectives = [kernel.collective for kernel in step.kernels if kernel.collective]
    gathered = sum(one.bytes for one in collectives if one.kind == "all-gather")
    gathered = min(gathered, step.memory["temporaries"])
    rest = step.memory["peak"] - sum(kinds.values()) - gathered
    return kinds | {"gathered parameters": gathered, "activations, gradients and workspace": rest}


def largest_buffers(step: Step) -> list[hlo.Buffer]:
    """The 10 largest arrays, of 64 kB or more, that differ in shape or source."""
    different = {
        (buffer.array, buffer.instruction.source): buffer
        for buffer in hlo.buffers(step.text, 2**16)
    }
    return list(different.values())[:10]


def _windows(compiled: Stage, stage: Stage) -> dict[int, int] | None:
    """Map compiled windows to another stage's; None if equal windows map to different ones."""
    if len(compiled.windows) != len(stage.windows):
        return None
    pairs = dict(zip(compiled.windows, stage.windows, strict=True))
    if any(
        pairs[there] != here for there, here in zip(compiled.windows, stage.windows, strict=True)
    ):
        return None
    return pairs
