"""The program of a run: initial state, one training step per stage, evaluation, compiled ahead for one mesh."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspeed.errors import BadInput
from jspeed.files import cache_folder
from jspeed.parallel.mesh import batch_rows, parameter_shardings, replicated
from jspeed.recipe import Context, Recipe, Stage, init_parameters

State = dict[str, Any]
CPU_MICRO_BATCH = 512  # tokens; the quickest of 512, 1024, 2048 and 4096 for a stdlib-sized step on two cores

StepProgram = Callable[[State, jax.Array], tuple[State, dict[str, jax.Array]]]


@dataclass(frozen=True)
class Program:
    """Compiled executables. All take and return arrays on the mesh; none moves anything to the host.

    ``init(seed)``: uint32 scalar -> state. ``steps[i](state, tokens)``: donated state and uint16 tokens
    ``[lanes, lane_len + 1]`` -> (state, {"loss": fp32 scalar}). ``evaluate(params, rows)``: uint16
    ``[eval_rows, eval_len + 1]`` -> fp32 mean loss of each row, the last rows being padding. ``micro_tokens`` are
    the tokens a device takes at once in the last stage.
    """

    init: Callable[[jax.Array], State]
    steps: tuple[StepProgram, ...]
    evaluate: Callable[[Any, jax.Array], jax.Array]
    micro_tokens: int
    eval_rows: int


def use_compile_cache() -> None:
    """Keep compiled programs in the cache folder from run to run, unless JAX_COMPILATION_CACHE_DIR says where."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def init_state(recipe: Recipe, seed: jax.Array) -> State:
    """Return the state before step 1: ``params`` and ``optimizer``."""
    params = init_parameters(recipe.parameters, jax.random.key(seed))
    return {"params": params, "optimizer": recipe.optimizer().init(params)}


def train_step(
    recipe: Recipe, stage: Stage, parts: int, mesh: Mesh, state: State, tokens: jax.Array
) -> tuple[State, dict[str, jax.Array]]:
    """One update on one global batch, its gradient accumulated over ``parts`` micro-batches.

    The loss is the mean over all tokens of the batch, formed row by row so that it does not depend on how rows
    are spread over devices and micro-batches.
    """
    ctx = Context(stage, training=True)
    tokens = tokens.astype(jnp.int32)
    rows = tokens.shape[0] // parts
    weights = jnp.full((rows, stage.lane_len), 1 / (tokens.shape[0] * stage.lane_len), jnp.float32)

    def loss(params: Any, micro: jax.Array) -> tuple[jax.Array, jax.Array]:
        total, loss_BT = recipe.loss(params, micro[:, :-1], micro[:, 1:], weights, ctx)
        return total, jnp.mean(loss_BT, axis=1)

    def accumulate(grads: Any, micro: jax.Array) -> tuple[Any, jax.Array]:
        new, row_losses = jax.grad(loss, has_aux=True)(state["params"], micro)
        return jax.tree.map(jnp.add, grads, new), row_losses

    if parts == 1:
        grads, row_losses = jax.grad(loss, has_aux=True)(state["params"], tokens)
    else:
        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        grads, row_losses = jax.lax.scan(accumulate, zeros, spread(tokens, parts, mesh))
    updates, optimizer = recipe.optimizer().update(grads, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": optimizer}, {"loss": jnp.mean(row_losses)}


def evaluate(recipe: Recipe, parts: int, mesh: Mesh, params: Any, rows: jax.Array) -> jax.Array:
    """Return the mean loss of each row (fp32 ``[rows]``), ``1 / parts`` of them at a time."""
    ctx = Context(eval_stage(recipe), training=False)

    def losses(part: jax.Array) -> jax.Array:
        tokens = part.astype(jnp.int32)
        ones = jnp.ones((tokens.shape[0], tokens.shape[1] - 1), jnp.float32)
        return jnp.mean(recipe.loss(params, tokens[:, :-1], tokens[:, 1:], ones, ctx)[1], axis=1)

    means = jax.lax.map(losses, spread(rows, parts, mesh))
    return gather(means, mesh)


def eval_stage(recipe: Recipe) -> Stage:
    """The stage evaluation runs in: the last one's windows, rows of ``eval_len``, documents whole."""
    return Stage(steps=1, lane_len=recipe.eval_len, windows=recipe.stages[-1].windows)


def spread(tokens: jax.Array, parts: int, mesh: Mesh) -> jax.Array:
    """Split rows into ``parts``, every device keeping its own: ``[rows, T]`` -> ``[parts, rows / parts, T]``."""
    devices = mesh.shape["data"]
    split = tokens.reshape(devices, parts, -1, tokens.shape[-1]).swapaxes(0, 1)
    split = split.reshape(parts, -1, tokens.shape[-1])
    return jax.lax.with_sharding_constraint(split, NamedSharding(mesh, PartitionSpec(None, "data")))


def gather(spread_out: jax.Array, mesh: Mesh) -> jax.Array:
    """Undo :func:`spread` on one value a row: ``[parts, rows / parts]`` -> ``[rows]``."""
    devices = mesh.shape["data"]
    parts = spread_out.shape[0]
    return spread_out.reshape(parts, devices, -1).swapaxes(0, 1).reshape(-1)


def micro_batches(recipe: Recipe, stage: Stage, mesh: Mesh, micro_batch: int | None) -> int:
    """Number of parts a step is accumulated over when each device takes ``micro_batch`` tokens at a time.

    Without ``micro_batch`` a GPU takes all its lanes at once, and a CPU as many as keep activations in its
    caches. Raises :class:`BadInput` with the numbers when the batch does not divide.
    """
    devices = mesh.shape["data"]
    batch = recipe.tokens_per_step(stage)
    if recipe.lanes % devices:
        raise BadInput(
            f"global batch of {batch} tokens ({recipe.lanes} lanes of {stage.lane_len}) cannot be divided over "
            f"{devices} devices on the data axis; use a number of devices that divides {recipe.lanes}"
        )
    lanes = recipe.lanes // devices
    divisors = [n for n in range(1, lanes + 1) if lanes % n == 0]
    if micro_batch is None:
        at_once = lanes
        if mesh.devices.flat[0].platform == "cpu":
            at_once = max(n for n in divisors if n == 1 or n * stage.lane_len <= CPU_MICRO_BATCH)
        return lanes // at_once
    if micro_batch < 1 or micro_batch % stage.lane_len or lanes % (micro_batch // stage.lane_len):
        raise BadInput(
            f"--micro-batch {micro_batch}: the global batch of {batch} tokens ({recipe.lanes} lanes of "
            f"{stage.lane_len}) is not a multiple of {devices} devices x {micro_batch} tokens in whole lanes; "
            f"give one of {', '.join(str(n * stage.lane_len) for n in divisors)}"
        )
    return lanes * stage.lane_len // micro_batch


def eval_parts(recipe: Recipe, rows: int, mesh: Mesh, micro_tokens: int) -> tuple[int, int]:
    """Return (parts, padded rows): how evaluation rows are cut so that a device sees at most ``micro_tokens``."""
    at_once = max(1, micro_tokens // recipe.eval_len) * mesh.shape["data"]
    parts = -(-rows // at_once)
    return parts, parts * at_once


def compile_program(recipe: Recipe, mesh: Mesh, layout: str, micro_batch: int | None, rows: int) -> Program:
    """Compile everything a run executes, and an evaluation of ``rows`` rows."""
    parameter_sharding = parameter_shardings(recipe.parameters, layout, mesh)
    whole, spread_rows = replicated(mesh), batch_rows(mesh)
    seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=whole)
    shapes = jax.eval_shape(lambda s: init_state(recipe, s), seed)
    state_sharding = {
        "params": parameter_sharding,
        "optimizer": jax.tree.map(lambda _: whole, shapes["optimizer"]),
    }
    state = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes,
        state_sharding,
    )

    def tokens(rows: int, length: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, length + 1), jnp.uint16, sharding=spread_rows)

    init = jax.jit(lambda s: init_state(recipe, s), out_shardings=state_sharding).lower(seed).compile()
    parts = tuple(micro_batches(recipe, stage, mesh, micro_batch) for stage in recipe.stages)
    steps = []
    for stage, stage_parts in zip(recipe.stages, parts, strict=True):

        def step(state: State, tokens: jax.Array, stage: Stage = stage, parts: int = stage_parts):
            return train_step(recipe, stage, parts, mesh, state, tokens)

        jitted = jax.jit(step, donate_argnums=0, out_shardings=(state_sharding, {"loss": whole}))
        steps.append(jitted.lower(state, tokens(recipe.lanes, stage.lane_len)).compile())
    micro_tokens = recipe.tokens_per_step(recipe.stages[-1]) // mesh.shape["data"] // parts[-1]
    rows_parts, padded = eval_parts(recipe, rows, mesh, micro_tokens)
    evaluation = jax.jit(lambda p, r: evaluate(recipe, rows_parts, mesh, p, r), out_shardings=whole)
    compiled = evaluation.lower(state["params"], tokens(padded, recipe.eval_len)).compile()
    return Program(init, tuple(steps), compiled, micro_tokens, padded)


def warm_up(program: Program, recipe: Recipe, mesh: Mesh, rows: jax.Array) -> None:
    """Run every executable on dummy tokens and a state that is thrown away, so that nothing is first at the start."""
    whole, spread_rows = replicated(mesh), batch_rows(mesh)
    state = program.init(jax.device_put(np.uint32(0), whole))
    for stage, step in zip(recipe.stages, program.steps, strict=True):
        dummy = np.zeros((recipe.lanes, stage.lane_len + 1), np.uint16)
        for _ in range(2):
            state, metrics = step(state, jax.device_put(dummy, spread_rows))
            jax.block_until_ready(metrics)
    jax.block_until_ready(program.evaluate(state["params"], rows))
