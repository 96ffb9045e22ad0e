"""Losses and gradients of records 62/89 and ours, on the record's own batches."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.recipe import Context, Recipe
from jspeed.run.compute import program, score
from jspeed.run.compute.device import device_of

from .original import Original, Rank
from .ours import Named, Tree, one_device
from .r62_r89_names import sign_table

Lane = tuple[Any, ...]


def starts(recipe: Recipe) -> list[int]:
    """The first step of every stage."""
    return [sum(stage.steps for stage in recipe.stages[:n]) for n in range(len(recipe.stages))]


def cut(
    script: Original, recipe: Recipe, stage: int | None, count: int, skip: int = 0
) -> list[Lane]:
    """Lanes from the record's generator: of a stage's training, or of validation."""

    def take(rank: Rank) -> list[Lane]:
        args, make = rank.namespace["args"], rank.namespace["distributed_data_generator"]
        if stage is None:
            lanes = make(
                args.val_files, args.val_batch_size, -1, grad_accum_steps=8, align_to_bos=False
            )
        else:
            length, most = recipe.stages[stage].lane_len, recipe.stages[stage].max_doc_len
            lanes = make(args.train_files, 8 * length, most, grad_accum_steps=8)
        return list(islice(lanes, skip, skip + count))

    return script.each(take)[0]


def give_signs(script: Original, width: int) -> None:
    """Record 89 draws the signs of its bigrams; let them be ours."""

    def copy(rank: Rank) -> None:
        import torch

        rank.namespace["model"].bigram_sign_table.copy_(torch.from_numpy(sign_table(width)))

    script.each(copy)


def give_prefixes(script: Original, prefixes: np.ndarray) -> None:
    """Let these be the prefixes of record 89's tokens."""

    def copy(rank: Rank) -> None:
        import torch

        rank.namespace["model"].prefix_table.copy_(torch.from_numpy(prefixes))

    script.each(copy)


def tokens_of(lanes: Sequence[Lane]) -> np.ndarray:
    """Inputs and the last target of every lane: ``[B, T + 1]``."""
    return np.stack([np.append(lane[0].numpy(), lane[1].numpy()[-1]) for lane in lanes])


def at_step(rank: Rank, recipe: Recipe, step: int) -> Any:
    """Bring the record's schedules to ``step`` over every border before it; return its manager."""
    manager = rank.namespace["training_manager"]
    manager.reset()
    for start in starts(recipe):
        if start <= step:
            manager.advance_schedule(start)
    manager.advance_schedule(step)
    return manager


def theirs(
    script: Original, found: list[np.ndarray], recipe: Recipe, step: int, lanes: Sequence[Lane]
) -> tuple[np.ndarray, float, Named]:
    """Of a training step before its update: (each token's loss, the mean over lanes of what is
    descended on, grads)."""

    def run(rank: Rank) -> float:
        manager, model = at_step(rank, recipe, step), rank.namespace["model"]
        model.train()
        model.zero_grad(set_to_none=True)
        found.clear()
        total = sum(model(*lane[:4], manager.get_forward_args()).sum() for lane in lanes) / len(
            lanes
        )
        total.backward()
        return float(total.detach())

    total, grads = script.each(run)[0], script.gradients()
    script["model"].zero_grad(set_to_none=True)
    return np.stack(found), total, grads


def updated(script: Original, step: int, lanes: Sequence[Lane]) -> Named:
    """The record's parameters after one more of its steps, on these lanes."""

    def run(rank: Rank) -> None:
        manager, model = rank.namespace["training_manager"], rank.namespace["model"]
        manager.advance_schedule(step)
        (
            sum(model(*lane[:4], manager.get_forward_args()).sum() for lane in lanes) / len(lanes)
        ).backward()
        manager.step_optimizers(step)

    script.each(run)
    return script.parameters()


def evaluated(
    script: Original, recipe: Recipe, lanes: Sequence[Lane], final: bool = True
) -> np.ndarray:
    """Each token's loss in the record's last validation."""

    def run(rank: Rank) -> np.ndarray:
        import torch

        manager, model = at_step(rank, recipe, recipe.steps), rank.namespace["model"]
        if final:
            manager.apply_final_ws_ext()
        model.eval()
        rank.losses.clear()
        with torch.no_grad():
            for lane in lanes:
                model(*lane[:4], manager.get_forward_args())
        model.train()
        return np.stack(rank.losses)

    return script.each(run)[0]


class Ours:
    """Our recipe's losses and gradients, compiled once for each stage."""

    def __init__(self, recipe: Recipe):
        self.recipe, self._compiled = recipe, {}

    def trained(
        self, params: Tree, step: int, tokens: np.ndarray
    ) -> tuple[np.ndarray, float, Tree]:
        """As :func:`theirs`."""
        number = max(n for n, start in enumerate(starts(self.recipe)) if start <= step)
        stage = self.recipe.stages[number]
        weight = 1 / tokens[:, 1:].size

        def total(params: Tree, tokens: Any, step: Any) -> Any:
            ctx = Context(stage, training=True, step=step)
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            sums, losses = self.recipe.loss(
                params, inputs, targets, jnp.full(targets.shape, weight), ctx
            )
            return sums, (losses, sums)

        if number not in self._compiled:
            self._compiled[number] = jax.jit(jax.grad(total, has_aux=True))
        grads, (losses, sums) = self._compiled[number](
            params, jnp.asarray(tokens, jnp.int32), jnp.int32(step)
        )
        return np.asarray(losses), float(sums), jax.tree.map(np.asarray, grads)

    def evaluated(self, params: Tree, tokens: np.ndarray) -> np.ndarray:
        """Each token's loss as the last validation has it."""
        ctx = program.eval_context(self.recipe, device_of(one_device()))
        run = jax.jit(lambda p, t: score.losses(self.recipe, p, t[:, :-1], t[:, 1:], ctx))
        return np.asarray(run(params, jnp.asarray(tokens, jnp.int32)))


def lanes_of(script: Original, tokens: np.ndarray) -> list[Lane]:
    """Lanes of given tokens ``[B, T + 1]``, which start with a document, as the record's generator
    makes them."""

    def make(rank: Rank) -> list[Lane]:
        import torch

        made = []
        for row in torch.from_numpy(np.ascontiguousarray(tokens, np.int32)):
            starts = torch.nonzero(row[:-1] == rank.namespace["BOS_ID"])[:, 0]
            ends = torch.full((64 - len(starts),), len(row) - 1)
            hashed = rank.namespace["get_bigram_hash"](row[:-1])
            made.append((row[:-1], row[1:].long(), torch.cat([starts, ends]).int(), hashed))
        return made

    return script.each(make)[0]
