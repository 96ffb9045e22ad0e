"""Updates of record 92 and of our optimizers on the same gradients, at any step of their
schedules."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspeed.optim import averages
from jspeed.parallel.sparse_rows import Pending
from jspeed.recipe import Recipe, without_sparse
from jspeed.run.compute.accumulators import number_due

from .original import Rank
from .ours import Tree, stage_at
from .r62_r89_steps import drawn
from .r92_pair import NGRAMS, Pair

BANKS = ("queries_keys", "values_outs", "mlp")


class Ours:
    """Our optimizers and averages, a step at a time, gradients summed as in training."""

    def __init__(self, recipe: Recipe, params: Tree):
        self.recipe, self.optimizer, self.rows = (
            recipe,
            recipe.optimizer(),
            recipe.row_optimizers()["ngrams"],
        )
        self.params = dict(params)
        self.state = self.optimizer.init(without_sparse(recipe, params))
        self.of_rows = self.rows.init(jnp.asarray(params["ngrams"]))
        self.means = averages.zeros(recipe.averages, jax.tree.map(jnp.asarray, self.params))
        self.sums: Tree = {}
        self._update = jax.jit(self._one, static_argnames="due")

    def _one(
        self, grads: Tree, params: Tree, state: Any, of_rows: Any, means: Any, number: Any, due: int
    ) -> Any:
        dense, grads_of_dense = (without_sparse(self.recipe, tree) for tree in (params, grads))
        changes, state = self.optimizer.update(grads_of_dense, state, dense, due=due)
        new, table = optax.apply_updates(dense, changes), params["ngrams"]
        if due % 4 == 0:  # rows without a gradient stay as they are
            found = [Pending(jnp.arange(len(table), dtype=jnp.int32), grads["ngrams"])]
            table, of_rows = self.rows.update(found, table, of_rows, False)
        new["ngrams"] = table
        means = averages.after_step(self.recipe.averages, means, new, number, ())
        return new, state, of_rows, means

    def jump(self, step: int, tables: int) -> None:
        """Pretend that all updates before ``step`` had been made, of tables ``tables``."""

        def moved(group: str, state: Any) -> Any:
            number = step if group in BANKS else tables if group == "tables" else step // 2
            counts = lambda a: jnp.ndim(a) == 0 and a.dtype == jnp.int32
            return jax.tree.map(lambda a: jnp.int32(number) if counts(a) else a, state)

        inner = {group: moved(group, state) for group, state in self.state.inner_states.items()}
        self.state = self.state._replace(inner_states=inner)
        self.of_rows = self.of_rows._replace(step=jnp.int32(tables))

    def step(self, number: int, grads: Tree) -> Tree:
        """Add ``grads`` to what waits, update what is due, and return the parameters."""
        due = number_due(self.recipe, stage_at(self.recipe, number), number % self.recipe.period)
        total = {name: grad + self.sums.get(name, 0) for name, grad in grads.items()}
        waits = {name for name, spec in self.recipe.parameters.items() if due % spec.every}
        self.sums = {name: total[name] for name in waits}
        state = self.params, self.state, self.of_rows, self.means
        self.params, self.state, self.of_rows, self.means = self._update(
            total, *state, jnp.int32(number), due=due
        )
        return jax.tree.map(np.asarray, self.params)

    def end(self) -> Tree:
        """The parameters with the averages in their place."""
        return averages.at_end(self.recipe.averages, self.means, self.params, self.recipe.keep_norm)


class Theirs:
    """The record's optimizer and schedules, a step at a time on given gradients."""

    def __init__(self, pair: Pair):
        self.pair = pair

    def jump(self, step: int, tables: int) -> None:
        """As :meth:`Ours.jump`."""

        def move(rank: Rank) -> None:
            optimizer = rank.namespace["training_manager"].optimizer
            for param, state in optimizer.param_states.items():
                if "step" in state:
                    slow = optimizer.param_cfgs[param].label in ("value_embeds", "bigram_embed")
                    state["step"] = tables if slow else step // 2
            optimizer._bgadam_le.fill_(tables)

        self.pair.script.each(move)

    def step(self, number: int, grads: Tree) -> Tree:
        """Add ``grads``, let the record update, and return the parameters as ours."""
        named = self.pair.names.theirs(grads)

        def update(rank: Rank) -> None:
            import torch

            manager = rank.namespace["training_manager"]
            manager._vesp_on = False  # value tables whole, not the rows of a batch
            manager.ve_lite_prepare(number)
            table = named[NGRAMS]
            rows = np.flatnonzero(table.any(axis=1)).astype(np.int32)
            manager.sparse_index_update(number, rows)
            manager.sparse_index_share(number)
            manager.bgsp_push(torch.from_numpy(rows), torch.from_numpy(table[rows]))
            manager._velite_buf += torch.from_numpy(named["value_embeds"])
            for name, p in rank.namespace["model"].named_parameters():
                if name not in (NGRAMS, "value_embeds"):
                    grad = torch.from_numpy(np.array(named[name])).view(p.shape)
                    p.grad = grad if p.grad is None else p.grad + grad
            manager.step_optimizers(number)
            # what it gathers at the start of the next step
            rank.namespace["ags_flush"](rank.namespace["model"])

        self.pair.script.each(update)
        return self.pair.parameters()


def some_rows(params: Tree, step: int) -> Tree:
    """Gradients of everything, of n-grams in one row of eight."""
    grads = drawn(params, step)
    rng = np.random.default_rng(step)
    grads["ngrams"] *= rng.random(len(grads["ngrams"]))[:, None] < 1 / 8
    return grads


def changes(pair: Pair, windows: Sequence[range]) -> Iterator[tuple[int, Tree, Tree]]:
    """Yield (step, our changes of every parameter, the record's) in every step of ``windows``,
    which start where all parameters have just been updated."""
    params = pair.start()
    theirs, ours = Theirs(pair), Ours(pair.recipe, params)
    before = pair.parameters(), ours.params
    for window in windows:
        tables = int(np.sum(np.array(updates_of_tables(pair.recipe)) < window.start))
        theirs.jump(window.start, tables)
        ours.jump(window.start, tables)
        for step in window:
            # zeros in padding
            grads = pair.names.ours(pair.names.theirs(some_rows(ours.params, step)))
            after = theirs.step(step, grads), ours.step(step, grads)
            moved = [
                {name: a[name] - b[name] for name in a if name != "largest"}
                for a, b in zip(after, before, strict=True)
            ]
            before = after
            yield step, moved[1], moved[0]


def updates_of_tables(recipe: Recipe) -> list[int]:
    """The steps in which tables are updated."""
    due = [
        number_due(recipe, stage_at(recipe, step), step % recipe.period)
        for step in range(recipe.steps)
    ]
    return [step for step, number in enumerate(due) if number % 4 == 0]
