"""The executables of a run, compiled for its mesh before training: initial state, steps of each
stage, evaluation."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from jspeed.base.compiler import Build, anew, compiled, memory_needed, need_and_step
from jspeed.errors import BadInput
from jspeed.model.custom_kernels import custom_kernel
from jspeed.parallel.layout import partitions, with_remat
from jspeed.parallel.mesh import batch_lanes, lane_shards, replicated
from jspeed.recipe import Context, Recipe, Stage, leaves, map_specs, without_sparse
from jspeed.record.provenance import Sums, sums_of
from jspeed.run.compute import accumulators
from jspeed.run.compute.device import Device, Placement
from jspeed.run.compute.division import (
    Attempt,
    attempts,
    divisions,
    evaluated_at_once,
    lanes_of_device,
    sub_lane_length,
    sub_lanes_of,
    without_room,
)
from jspeed.run.compute.host_tables import HostTables, Rows, given_shapes
from jspeed.run.compute.inside import Inside, host_calls
from jspeed.run.compute.score import Measure, losses
from jspeed.run.compute.side_by_side import Job, beside, compile_all
from jspeed.run.compute.step import (
    Metrics,
    State,
    at_end,
    draw,
    eval_step,
    init_state,
    sparse_specs,
    train_step,
    unchanged,
    without_jit,
)

StepProgram = Callable[[State, Any], tuple[State, Metrics]]


@dataclass(frozen=True)
class Program:
    """Compiled executables. All take and return arrays on the mesh; none moves anything to the
    host.

    ``init(seed)``: the first state. ``steps[i][p](state, tokens)``, for stage i and steps whose
    number is p modulo the recipe's period: donated state and lanes ``[lanes, lane_len + 1]`` of
    ``Data.dtype`` (longer with more: :mod:`jspeed.base.beside`) -> (state, {"loss": fp32
    scalar}). ``evaluate(params, lanes, targets, mask)``: such lanes ``[eval_lanes, eval_len +
    1]``, their targets ``[eval_lanes, eval_len]`` and ``[V, V / 8]`` bits or None, -> fp32 loss of
    each target, the last lanes padding; ``accuracy`` likewise, if asked for. ``at_end(state)``,
    donated, after the last step: averages of weights take their place. In the last stage a device
    takes ``micro_tokens`` at once, of a lane the head's loss ``head_chunk`` (None: all), and layers
    are recomputed for their gradients with ``remat``.
    ``parts``: micro-batches of a device in each stage. ``inside``: what the recipe's functions put
    into the first state, the steps and the evaluation; none without jit. ``others``: the
    executables of the first state and of the evaluation. ``sums`` takes checksums of states.
    ``loaded``: all were saved by an earlier run (:mod:`jspeed.saved`). ``calls``, instead of
    ``steps``, where ``tables`` lie in the host's memory: NumPy's rows of all lanes.
    """

    init: Callable[[int], State]
    steps: tuple[tuple[StepProgram, ...], ...]
    evaluate: Callable[[Any, jax.Array, jax.Array, jax.Array | None], jax.Array]
    at_end: Callable[[State], State]
    micro_tokens: int
    eval_lanes: int
    head_chunk: int | None = None
    remat: bool = False
    parts: tuple[int, ...] = ()
    accuracy: Callable[..., jax.Array] | None = None
    inside: Mapping[str, Inside] = field(default_factory=dict)
    others: tuple[jax.stages.Compiled, ...] = ()
    sums: Sums = sums_of
    loaded: bool = False
    calls: tuple[tuple[StepProgram, ...], ...] = ()
    tables: HostTables | None = None

    @property
    def compiled(self) -> list[jax.stages.Compiled]:
        """The steps; none without jit."""
        return [
            step
            for step in chain.from_iterable(self.steps)
            if isinstance(step, jax.stages.Compiled)
        ]

    @property
    def need(self) -> int:
        """Bytes of a device that the step needs which needs most."""
        return max(map(memory_needed, self.compiled), default=0)

    def texts(self) -> Iterator[str]:
        """Yield the optimised HLO of each step that was compiled."""
        yield from (text for step in self.compiled if (text := step.as_text()))

    def host_calls(self, evaluation: bool = False) -> set[str]:
        """Return what any executable, or the ``evaluation``, asks the host for: as it was traced,
        and as it was compiled or loaded."""
        names = ("evaluation",) if evaluation else tuple(self.inside)
        found: set[str] = set()
        for name in names:
            found |= self.inside[name].calls if name in self.inside else set()
        some = self.others[-1:] if evaluation else (*self.compiled, *self.others)
        for executable in {id(each): each for each in some}.values():
            found |= host_calls(executable.as_text() or "")
        return found


def compile_program(
    recipe: Recipe, placement: Placement, lanes: int, build: Build = anew
) -> Program:
    """Compile everything a run executes, and an evaluation of so many lanes; ``placement`` is that
    of ``recipe``.

    Raises :class:`BadInput` for a step or evaluation that needs more memory than a device has.
    """
    if without_jit():
        return eager_program(recipe, placement, lanes)
    mesh, layout = placement.mesh, placement.layout
    shapes, shardings = state_shardings(recipe, layout, mesh)
    number = jax.ShapeDtypeStruct((), jnp.uint32, sharding=replicated(mesh))
    inside = {name: Inside() for name in ("initial state", "step", "evaluation")}
    traced = jax.jit(lambda s: init_state(recipe, s, layout, mesh), out_shardings=shardings).trace(
        number
    )
    inside["initial state"].look(traced.jaxpr)

    def plain(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        return build(lowered, jax.stages.Lowered.compile)

    first = beside(partial(plain, traced.lower()), placement.device)
    lowered = sums_of.lower(jax.tree.leaves(shapes))
    summing = beside(partial(plain, lowered), placement.device)
    alike, period = partial(accumulators.first_alike, recipe), recipe.period
    jobs = [
        (recipe.stages.index(stage), alike(stage, phase))
        for stage in recipe.stages
        for phase in range(period)
    ]
    unlike = list(dict.fromkeys(jobs))

    def compile_one(job: Job, stop: threading.Event) -> Attempt:
        return fit(recipe, placement, *job, stop=stop, inside=inside["step"], build=build)

    done = compile_all(compile_one, unlike, placement.device)
    placement.traces.clear()
    fitted = [done[unlike.index(job)] for job in jobs]
    last, every = fitted[-1], [attempt.program for attempt in fitted]
    steps = tuple(tuple(every[n : n + period]) for n in range(0, len(every), period))
    micro_tokens = recipe.tokens_per_step(recipe.stages[-1]) // mesh.shape["data"] // last.parts
    idle = idle_state_bytes(recipe, placement)
    at_once = evaluated_at_once(recipe, placement, micro_tokens, lanes)
    padded, evaluation = compile_evaluation(
        recipe, placement, at_once, lanes, idle, inside=inside["evaluation"], build=build
    )
    parts = tuple(attempt.parts for attempt in fitted[period - 1 :: period])
    end: Callable[[State], State] = unchanged
    if recipe.averages:
        means = jax.jit(partial(at_end, recipe), donate_argnums=0, out_shardings=shardings)
        end = plain(means.lower(shapes))
    how = (last.head_chunk, last.remat, parts)
    drawn, sums = first(), summing()
    return Program(
        partial(draw, drawn, mesh), steps, evaluation, end, micro_tokens, padded, *how,
        inside=inside, others=(drawn, evaluation), sums=sums,
    )  # fmt: skip


def compile_evaluation(
    recipe: Recipe,
    placement: Placement,
    micro_tokens: int,
    lanes: int,
    idle: int = 0,
    measure: Measure = losses,
    inside: Inside | None = None,
    build: Build = anew,
) -> tuple[int, jax.stages.Compiled]:
    """Compile :func:`trace_evaluation`; returns the padded lanes too. ``inside`` notes its
    constants and calls.

    Raises :class:`BadInput` where it does not fit into a device's memory beside ``idle`` bytes.
    """
    device = placement.device
    padded, traced = trace_evaluation(recipe, placement, micro_tokens, lanes, measure)
    if inside is not None:
        inside.look(traced.jaxpr)
    lowered = traced.lower()
    how = partial(compiled, device=device)
    need, evaluation = need_and_step(lambda each: build(each, how), lowered)
    if evaluation is None or need + idle > (device.memory or math.inf):
        there = (
            f" and there are {device.memory / 1e9:.1f} GB"
            if device.memory
            else ", more than there are"
        )
        raise BadInput(
            f"recipe {recipe.name} needs {(need + idle) / 1e9:.1f} GB a device to evaluate lanes of"
            f" {recipe.eval_len} tokens{there}; use more or larger devices, or --set a shorter"
            " EVAL_LEN"
        )
    return padded, evaluation


def eager_program(recipe: Recipe, placement: Placement, lanes: int) -> Program:
    """Return the programs of a run as Python that computes operation by operation, for
    JAX_DISABLE_JIT and a debugger.

    Raises :class:`BadInput` on more than one device.
    """
    mesh, layout, device = placement.mesh, placement.layout, placement.device
    if recipe.on_host:
        raise BadInput("--table host needs compiled programs; leave JAX_DISABLE_JIT out")
    if mesh.size > 1:
        raise BadInput(
            f"JAX_DISABLE_JIT computes on one device and the mesh is {dict(mesh.shape)}; leave"
            " --mesh out, and on GPUs set CUDA_VISIBLE_DEVICES=0"
        )
    _, shardings = state_shardings(recipe, layout, mesh)

    def init(seed: int) -> State:
        return jax.device_put(init_state(recipe, jnp.uint32(seed), layout, mesh), shardings)

    def step(stage: Stage, parts: int, phase: int) -> StepProgram:
        return partial(train_step, recipe, step_context(stage, device), placement, parts, phase)

    stages = zip(recipe.stages, placement.parts, strict=True)
    steps = tuple(tuple(step(*each, phase) for phase in range(recipe.period)) for each in stages)
    micro_tokens = recipe.tokens_per_step(recipe.stages[-1]) // placement.parts[-1]
    cuts, padded = eval_parts(recipe, lanes, mesh, micro_tokens)
    evaluation = partial(eval_step, recipe, eval_context(recipe, device), placement, cuts)
    return Program(
        init,
        steps,
        evaluation,
        partial(at_end, recipe),
        micro_tokens,
        padded,
        parts=placement.parts,
    )


def fit(
    recipe: Recipe,
    placement: Placement,
    number: int,
    phase: int = -1,
    stop: threading.Event | None = None,
    inside: Inside | None = None,
    build: Build = anew,
) -> Attempt:
    """Return the first of :func:`attempts` for a stage, by its ``number``, that fits in memory,
    compiled; ``inside`` notes what is in it.

    Where one lane is too much, micro-batches are sub-lanes of lanes, more than there are lanes.
    Raises :class:`BadInput` if the micro-batch that was asked for, or every one, needs too much
    memory, or those that were tried until ``stop`` was set.
    """
    stage, mesh, device = recipe.stages[number], placement.mesh, placement.device
    limit = (device.memory or math.inf) - recipe.canonical * math.prod(tokenizer_mask_shape(recipe))

    def lower(parts: int, head_chunk: int | None, remat: bool) -> jax.stages.Lowered:
        how = replace(placement, layout=with_remat(placement.layout)) if remat else placement
        traced = trace_step(recipe, stage, how, parts, phase, head_chunk)
        if inside is not None:
            found = Inside()
            found.look(traced.jaxpr)
            inside.join(found)
        return traced.lower()

    how = partial(compiled, device=device)
    measure = partial(need_and_step, lambda lowered: build(lowered, how))
    for tried in attempts(
        recipe, stage, mesh, placement.micro_batches[number], limit, lower, measure
    ):
        if tried.fits(limit):
            return tried
        if stop and stop.is_set():
            break
    smallest = tried.parts == divisions(recipe, stage, mesh)[-1]
    less = (
        "use more or larger devices, or --set a shorter lane"
        if smallest
        else "leave out --micro-batch, or give less"
    )
    raise BadInput(
        f"recipe {recipe.name} needs {tried.need / 1e9:.1f} GB a device with"
        f" {lanes_of_device(recipe, stage, mesh) * stage.lane_len // tried.parts} tokens at once"
        f" and there are {limit / 1e9:.1f} GB; {less}"
    )


def check_state_fits(recipe: Recipe, placement: Placement, fields: Mapping[str, Any]) -> None:
    """Raise :class:`BadInput` where parameters and optimizer are more than a device holds, with the
    one of the recipe's ``fields`` that makes the largest parameter smaller.

    It takes a second, and to find it out from compiled steps takes an hour.
    """
    if (limit := placement.device.memory) is None:
        return
    state, _ = state_shardings(recipe, placement.layout, placement.mesh)
    sizes = {path: local_bytes(array) for path, array in leaves(state["params"])}
    if reason := without_room(recipe, local_bytes(state), sizes, limit, fields):
        raise BadInput(reason)


def idle_state_bytes(recipe: Recipe, placement: Placement) -> int:
    """Bytes of optimizer state and accumulators that stay on a device during an evaluation."""
    state, _ = state_shardings(recipe, placement.layout, placement.mesh)
    return local_bytes([part for name, part in state.items() if name != "params"])


def local_bytes(tree: Any) -> int:
    """Bytes that one device holds of the arrays in ``tree``, which have shardings."""
    arrays: list[Any] = jax.tree.leaves(tree)
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in arrays
    )


def trace_step(
    recipe: Recipe,
    stage: Stage,
    placement: Placement,
    parts: int,
    phase: int = -1,
    head_chunk: int | None = None,
) -> jax.stages.Traced:
    """Trace the training step of ``stage`` over ``parts`` micro-batches: its jaxpr, and what can be
    lowered.

    ``phase`` is the step's number modulo the recipe's period; the last one updates all parameters.
    ``head_chunk`` is that of :class:`Context`.
    """
    mesh, layout = placement.mesh, placement.layout
    ctx = replace(step_context(stage, placement.device), head_chunk=head_chunk)
    phase %= recipe.period
    state, shardings = state_shardings(recipe, layout, mesh)
    shape = recipe.lanes, recipe.lane_words(stage.lane_len)
    tokens = jax.ShapeDtypeStruct(shape, recipe.data.dtype, sharding=batch_lanes(mesh))
    sub_lanes = sub_lanes_of(recipe, stage, mesh, parts)
    given = given_shapes(recipe, recipe.lanes * sub_lanes, sub_lane_length(stage, sub_lanes), mesh)

    def step(state: State, tokens: jax.Array, *given: Rows) -> tuple[State, Metrics]:
        return train_step(recipe, ctx, placement, parts, phase, state, tokens, *given)

    metrics = {"loss": replicated(mesh)} | ({"rows": batch_lanes(mesh)} if given else {})

    # Unused arguments are kept: else arrays of the state are returned in the place of others, by
    # copies.
    out = shardings, metrics
    jitted = jax.jit(step, donate_argnums=0, keep_unused=True, out_shardings=out)
    return jitted.trace(state, tokens, *given)


def step_context(stage: Stage, device: Device) -> Context:
    """What a training step of ``stage`` runs in."""
    kernels = {name: custom_kernel(name).kernel for name in device.custom_kernels}
    return Context(stage, True, attention=device.attention, fp8=device.fp8, kernels=kernels)


def trace_evaluation(
    recipe: Recipe, placement: Placement, micro_tokens: int, lanes: int, measure: Measure = losses
) -> tuple[int, jax.stages.Traced]:
    """Trace the evaluation of so many lanes, ``micro_tokens`` a device at once; returns the padded
    lanes too."""
    mesh, layout = placement.mesh, placement.layout
    ctx = eval_context(recipe, placement.device)
    state, _ = state_shardings(recipe, layout, mesh)
    parts, padded = eval_parts(recipe, lanes, mesh, micro_tokens)
    at_once = padded
    if recipe.on_host:  # rows of all would not fit on the devices: each part is a call
        at_once, parts = padded // parts, 1
    shapes = (at_once, recipe.lane_words(recipe.eval_len)), (at_once, recipe.eval_len)
    tokens, targets = (
        jax.ShapeDtypeStruct(shape, recipe.data.dtype, sharding=batch_lanes(mesh))
        for shape in shapes
    )
    whole = replicated(mesh)
    bits = (
        jax.ShapeDtypeStruct(tokenizer_mask_shape(recipe), jnp.uint8, sharding=whole)
        if recipe.canonical
        else None
    )

    def evaluation(
        params: Any, lanes: jax.Array, targets: jax.Array, mask: jax.Array | None, *given: Rows
    ) -> jax.Array:
        read = params, lanes, targets, mask, *given
        return eval_step(recipe, ctx, placement, parts, *read, measure=measure)

    jitted = jax.jit(evaluation, out_shardings=whole)
    given = given_shapes(recipe, at_once, recipe.eval_len, mesh)
    return padded, jitted.trace(state["params"], tokens, targets, bits, *given)


def tokenizer_mask_shape(recipe: Recipe) -> tuple[int, int]:
    """Return the shape of ``Context.tokenizer_mask``: a row an id, a bit an id, both rounded up to
    a multiple of 128."""
    size = -(-recipe.data.vocab_size // 128) * 128
    return size, size // 8


def eval_context(recipe: Recipe, device: Device) -> Context:
    """What evaluation runs in: its own or the last stage's windows, lanes of ``eval_len`` tokens,
    documents whole.

    A lane has room for as many documents in proportion as a lane of that stage.
    """
    last = recipe.stages[-1]
    docs = last.max_docs and -(-last.max_docs * recipe.eval_len // last.lane_len)
    windows = recipe.eval_windows or last.windows
    stage = Stage(1, recipe.eval_len, recipe.eval_max_doc_len, docs, windows, own=last.own)
    return Context(stage, training=False, attention=device.attention, fp8=device.fp8)


def eval_parts(recipe: Recipe, lanes: int, mesh: Mesh, micro_tokens: int) -> tuple[int, int]:
    """Return (parts, padded lanes): how evaluation lanes are cut so that a device sees at most
    ``micro_tokens``."""
    at_once = max(1, micro_tokens // recipe.eval_len) * lane_shards(mesh)
    parts = -(-lanes // at_once)
    return parts, parts * at_once


def state_shardings(recipe: Recipe, layout: str, mesh: Mesh) -> tuple[State, State]:
    """Return (shapes with shardings, shardings) of the state; optimizer arrays are sharded like
    their parameter."""
    shapes = jax.eval_shape(lambda: init_state(recipe, jnp.uint32(0), layout, mesh))
    cuts = partitions(recipe.parameters, layout, mesh)

    def absent(array: Any) -> bool:
        # optax.partition: the parameter belongs to another group
        return isinstance(array, optax.MaskedNode)

    def shardings_of(cuts: Any) -> Any:
        return jax.tree.map(lambda cut: NamedSharding(mesh, cut), cuts)

    placed = map_specs(lambda spec, cut: None if spec.on_host else cut, recipe.parameters, cuts)
    params = shardings_of(placed)
    optimizer = optax.tree_utils.tree_map_params(
        recipe.optimizer(),
        lambda array, sharding: array if absent(array) else sharding,
        shapes["optimizer"],
        without_sparse(recipe, params),
        transform_non_params=lambda _: replicated(mesh),
        is_leaf=absent,
    )
    shardings: State = {
        "params": params,
        "optimizer": optimizer,
        "step": replicated(mesh),
        "accumulators": shardings_of(accumulators.specs(recipe, layout, mesh)),
        "rows": shardings_of(sparse_specs(recipe, cuts)),
        "means": [{name: params[name] for name in average.blends} for average in recipe.averages],
    }
    sharded = jax.tree.map(
        lambda s, n: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=n), shapes, shardings
    )
    return sharded, shardings
