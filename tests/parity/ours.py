"""Our side of the comparison: parameters under the record's names, losses, gradients, updates,
steps, in fp32."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspeed.data import TokenLoader, find_split
from jspeed.optim.muon import MuonState
from jspeed.parallel.mesh import batch_lanes, make_mesh
from jspeed.recipe import Context, Recipe, Stage, init_parameters
from jspeed.run.compute import program, score, step
from jspeed.run.compute.device import device_of
from jspeed.run.compute.division import place

Tree = dict[str, Any]
Named = Mapping[str, np.ndarray]


class Names:
    """Where each element of our arrays lies in the record's: ``arrange(of)`` builds our tree from
    arrays by name.

    ``arrange`` may stack, slice, transpose and pad with -1, nothing else: it is tried once on the
    elements' numbers.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        arrange: Callable[[Callable[[str], np.ndarray]], Tree],
    ):
        self.shapes = shapes
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        starts = dict(zip(shapes, np.cumsum([0, *sizes]), strict=False))
        self._size = sum(sizes)
        self._starts = starts
        self._places = arrange(
            lambda name: starts[name] + np.arange(int(np.prod(shapes[name]))).reshape(shapes[name])
        )

    def ours(self, theirs: Named) -> Tree:
        """Our tree of the record's arrays; zeros where the record has nothing."""
        flat = np.concatenate(
            [np.ravel(theirs[name]) for name in self.shapes] + [np.zeros(1)]
        ).astype(np.float32)
        return jax.tree.map(lambda place: flat[place], self._places)

    def theirs(self, ours: Tree, rest: float = 0.0) -> dict[str, np.ndarray]:
        """The record's arrays of our tree; ``rest`` in those elements that we have not."""
        flat = np.full(self._size + 1, rest, np.float32)
        jax.tree.map(
            lambda place, value: flat.__setitem__(place, np.asarray(value)), self._places, ours
        )
        return {
            name: flat[start : start + int(np.prod(self.shapes[name]))].reshape(self.shapes[name])
            for name, start in self._starts.items()
        }


def stage_at(recipe: Recipe, number: int) -> Stage:
    """The stage of a step, the first being 0."""
    for stage in recipe.stages:
        number -= stage.steps
        if number < 0:
            return stage
    return recipe.stages[-1]


class Forward:
    """Losses and gradients of a recipe in one program for all stages of one lane length, or in one
    for each.

    One, where ``attention`` is not ours but takes windows that are known only when the program runs
    (``alike``).
    """

    def __init__(self, recipe: Recipe, alike: bool = False):
        self.recipe, self.alike = recipe, alike
        self._programs: dict[Any, Any] = {}

    def losses(self, ctx: Context, params: Tree, tokens: np.ndarray) -> np.ndarray:
        """Loss of every token of ``tokens`` (``[B, T + 1]``), in evaluation by the trainer."""
        return np.asarray(self._call(False, ctx, params, tokens)[1])

    def gradients(self, ctx: Context, params: Tree, tokens: np.ndarray) -> Tree:
        """Gradients of the mean of what training descends on."""
        return jax.tree.map(np.asarray, self._call(True, ctx, params, tokens)[0])

    def _call(self, gradients: bool, ctx: Context, params: Tree, tokens: np.ndarray) -> Any:
        rows, length = tokens.shape[0], tokens.shape[1] - 1
        weights = jnp.full((rows, length), 1 / (rows * length))

        def mean(params: Tree, tokens: Any, windows: Any) -> Any:
            at = replace(ctx, stage=replace(ctx.stage, windows=windows)) if self.alike else ctx
            if not at.training:
                return None, score.losses(self.recipe, params, tokens[:, :-1], tokens[:, 1:], at)
            return self.recipe.loss(params, tokens[:, :-1], tokens[:, 1:], weights, at)

        stage = replace(ctx.stage, windows=(), steps=1) if self.alike else ctx.stage
        key = gradients, ctx.training, stage, tokens.shape
        if key not in self._programs:
            self._programs[key] = jax.jit(jax.grad(mean, has_aux=True) if gradients else mean)
        return self._programs[key](params, jnp.asarray(tokens, jnp.int32), ctx.stage.windows)


def eval_context(recipe: Recipe) -> Context:
    """What evaluation runs in."""
    return program.eval_context(recipe, device_of(one_device()))


def one_device() -> Any:
    """A mesh of one device."""
    return make_mesh({"data": 1}, devices=jax.devices()[:1])


def late(state: Any, number: int) -> Any:
    """An optimizer's fresh state whose schedules stand at step ``number``; Adam's own count stays
    at 0."""

    def at(part: Any) -> Any:
        if isinstance(part, MuonState):
            return part._replace(step=jnp.full([], number, jnp.int32))
        if isinstance(part, optax.ScaleByScheduleState):
            return part._replace(count=jnp.full([], number, jnp.int32))
        return part

    ours = (MuonState, optax.ScaleByScheduleState)
    return jax.tree.map(at, state, is_leaf=lambda part: isinstance(part, ours))


def updates(recipe: Recipe, params: Tree, grads: Sequence[Tree], number: int) -> list[Tree]:
    """The parameters after each of the steps from ``number`` on, one for each of ``grads``."""
    optimizer = recipe.optimizer()

    @jax.jit
    def one(params: Tree, state: Any, grads: Tree) -> tuple[Tree, Any]:
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    state, found = late(optimizer.init(params), number), []
    for given in grads:
        params, state = one(params, state, given)
        found.append(jax.tree.map(np.asarray, params))
    return found


def train(recipe: Recipe, params: Tree, batches: Iterable[np.ndarray]) -> tuple[list[float], Tree]:
    """Loss of every training step from step 0 on, and the parameters after the last."""
    mesh = one_device()
    _, shardings = program.state_shardings(recipe, "zero1", mesh)
    state = jax.jit(lambda s: step.init_state(recipe, s, "zero1", mesh), out_shardings=shardings)(
        np.uint32(0)
    )
    state["params"] = jax.tree.map(
        lambda new, old: jax.device_put(new, old.sharding), params, state["params"]
    )
    compiled: dict[Any, Any] = {}
    at_once = (
        recipe.lanes * recipe.stages[0].lane_len
        if len({s.lane_len for s in recipe.stages}) == 1
        else None
    )
    found = []
    for number, tokens in enumerate(batches):
        stage = stage_at(recipe, number)
        key = (id(stage), number % recipe.period)
        if key not in compiled:
            device = device_of(mesh, micro_batch=at_once)
            placement, index = place(recipe, mesh, "zero1", device), recipe.stages.index(stage)
            compiled[key] = program.fit(recipe, placement, index, number % recipe.period)[0]
        state, metrics = compiled[key](
            state, jax.device_put(np.asarray(tokens, np.uint16), batch_lanes(mesh))
        )
        found.append(float(metrics["loss"]))
    return found, jax.tree.map(np.asarray, state["params"])


def batches(recipe: Recipe, folder: Path, split: str, count: int) -> list[np.ndarray]:
    """The first batches of the shards that :func:`write_shards` left: of training, or all rows of
    validation as one."""
    shards = find_split(folder / "data" / "fineweb10B", split)
    common: dict[str, Any] = {"bos_id": recipe.data.bos_id, "prefetch": 0}
    if split == "val":
        lanes = recipe.eval_tokens // recipe.eval_len
        loader = TokenLoader(shards, lanes=lanes, lane_len=recipe.eval_len, **common)
    else:
        loader = TokenLoader(
            shards, lanes=recipe.lanes, schedule=recipe.stages, align="bos", **common
        )
    with loader:
        return [np.array(batch.tokens) for batch, _ in zip(loader, range(count), strict=False)]


def check_draws(recipe: Recipe, expected: Tree) -> None:
    """Compare what we draw at first with ``expected``: constants are equal; what is drawn has the
    same spread, nearly the same largest value, and the same matrices start at zero."""
    found = jax.tree.map(
        np.asarray, jax.jit(lambda: init_parameters(recipe.parameters, jax.random.key(0)))()
    )
    for key, spec in recipe.parameters.items():
        if key == "largest":
            continue
        used = slice(spec.shape[0] - spec.padding if spec.padding else None)
        value, ours = (tree[key][used] if spec.shape else tree[key] for tree in (expected, found))
        if value.std() < 1e-6 or value.size < 500:
            np.testing.assert_allclose(ours, value, rtol=1e-6, err_msg=key)
        else:
            # The largest of some thousand normal numbers is itself somewhat random; of uniform ones
            # it is the bound.
            np.testing.assert_allclose(ours.std() / value.std(), 1, atol=0.1, err_msg=key)
            np.testing.assert_allclose(
                np.abs(ours).max() / np.abs(value).max(), 1, atol=0.4, err_msg=key
            )
            assert [bool(part.any()) for part in value] == [bool(part.any()) for part in ours], key
    np.testing.assert_array_equal(expected["embed"], expected["head"])
