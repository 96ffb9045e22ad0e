"""Updates of records 62 and 89 and of our optimizers on the same gradients, at any step of their
schedules."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspeed.optim.muon import MuonState
from jspeed.recipe import Recipe

from .original import Original, Rank
from .ours import Named, Tree


def drawn(tree: Tree, seed: int) -> Tree:
    """Gradients like ``tree``."""
    rng = np.random.default_rng(seed)
    return {
        name: np.asarray(1e-2 * rng.standard_normal(value.shape), np.float32)
        for name, value in tree.items()
    }


class Theirs:
    """The record's optimizer and schedules, a step at a time on given gradients."""

    def __init__(self, script: Original):
        self.script = script

    def jump(self, step: int) -> None:
        """Pretend that all updates before ``step`` had been made."""

        def move(rank: Rank) -> None:
            for state in rank.namespace["training_manager"].optimizer.param_states.values():
                if "step" in state:
                    state["step"] = step // 2

        self.script.each(move)

    def step(self, number: int, grads: Named) -> dict[str, np.ndarray]:
        """Add ``grads`` to what is there, let the record update, and return the parameters."""

        def update(rank: Rank) -> None:
            import torch

            for name, p in rank.namespace["model"].named_parameters():
                grad = torch.from_numpy(np.array(grads[name])).view(p.shape)
                p.grad = grad if p.grad is None else p.grad + grad
            rank.namespace["training_manager"].step_optimizers(number)

        self.script.each(update)
        return self.script.parameters()


class Ours:
    """Our optimizer, a step at a time on given gradients; those of slow parameters are summed as in
    a training step."""

    def __init__(self, recipe: Recipe, params: Tree):
        self.recipe, self.optimizer = recipe, recipe.optimizer()
        self.params, self.state = params, self.optimizer.init(params)
        self.sums: Tree = {}
        self.slow = {name for name, spec in recipe.parameters.items() if spec.every > 1}
        self._update = jax.jit(self._one, static_argnames="due")

    def _one(self, grads: Tree, state: Any, params: Tree, due: bool) -> tuple[Tree, Any]:
        changes, state = self.optimizer.update(grads, state, params, due=1 + due)
        return optax.apply_updates(params, changes), state

    def jump(self, step: int) -> None:
        """As :meth:`Theirs.jump`: NorMuon has made ``step`` updates, Adam one in two."""

        def moved(state: Any) -> Any:
            parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, MuonState))
            number = step if any(isinstance(part, MuonState) for part in parts) else step // 2
            counts = lambda a: jnp.ndim(a) == 0 and a.dtype == jnp.int32
            return jax.tree.map(lambda a: jnp.int32(number) if counts(a) else a, state)

        inner = {group: moved(state) for group, state in self.state.inner_states.items()}
        self.state = self.state._replace(inner_states=inner)

    def step(self, number: int, grads: Tree) -> Tree:
        """Add ``grads`` to what is there, update, and return the parameters."""
        due = number % 2 == 1
        total = {n: g + self.sums[n] if due and n in self.slow else g for n, g in grads.items()}
        self.sums = {} if due else {n: grads[n] for n in self.slow}
        self.params, self.state = self._update(total, self.state, self.params, due=due)
        return jax.tree.map(np.asarray, self.params)


def changes(
    theirs: Theirs, ours: Ours, names: Any, windows: Sequence[range], gradients: Any = drawn
) -> Iterator[tuple[int, Tree, Tree]]:
    """Yield (step, our changes of every parameter, the record's) in every step of ``windows``,
    which start even."""
    before = names.ours(theirs.script.parameters()), ours.params
    for window in windows:
        theirs.jump(window.start)
        ours.jump(window.start)
        for step in window:
            grads = gradients(ours.params, step)
            grads = names.ours(names.theirs(grads))  # zeros in padding
            after = names.ours(theirs.step(step, names.theirs(grads))), ours.step(step, grads)
            moved = [
                {name: a[name] - b[name] for name in a} for a, b in zip(after, before, strict=True)
            ]
            before = after
            yield step, moved[1], moved[0]
