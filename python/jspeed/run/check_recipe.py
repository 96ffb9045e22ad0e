"""Whether a recipe's fields are of the types and ranges that it declares, and its parts fit."""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import jax.numpy as jnp

from jspeed.errors import BadInput
from jspeed.fields import misfits
from jspeed.recipe import ParamSpec, Recipe, leaves


def check_recipe(recipe: Recipe) -> None:
    """Raise :class:`BadInput` for a field of another type or range than it declares, or parts
    that do not fit."""
    for problem in problems(recipe):
        raise BadInput(f"recipe {recipe.name}: {problem}")


def check_loss(recipe: Recipe, total: Any, loss_BT: Any, tokens: Any) -> None:
    """Raise :class:`BadInput` where what ``recipe.loss`` has returned for ``tokens`` ``[B, T]`` is
    of other shapes."""
    if total.shape != () or loss_BT.shape != tokens.shape:
        raise BadInput(
            f"recipe {recipe.name}: loss returns shapes {total.shape} and {loss_BT.shape}; "
            f"expected () and (batch, tokens) = {tokens.shape}"
        )


def problems(recipe: Recipe) -> Iterator[str]:
    """Yield what is wrong; later checks rely on earlier ones having found nothing."""
    for where, expected, found in misfits(recipe, Recipe):
        yield f"{where} is {found}; expected {expected}"
    specs = dict(leaves(recipe.parameters))
    for path, spec in specs.items():
        for where, expected, found in misfits(spec, ParamSpec, f"parameter {path}"):
            yield f"{where} is {found}; expected {expected}"
        yield from (f"parameter {path} {problem}" for problem in _problems_of(recipe, spec))
    for path, spec in specs.items():
        yield from (f"parameter {path} {problem}" for problem in _conflicts_of(recipe, specs, spec))
    tables = [path for path, spec in specs.items() if spec.sparse_rows]
    if set(tables) != set(recipe.row_optimizers()):
        yield (
            f"row_optimizers gives {sorted(recipe.row_optimizers())}, and tables with sparse_rows"
            f" are {tables}"
        )
    if extra := recipe.named_rows.keys() - set(tables):
        yield f"named_rows gives {sorted(extra)}, and tables with sparse_rows are {tables}"
    if recipe.data.bos_id >= recipe.data.vocab_size:
        yield (
            f"data.bos_id is {recipe.data.bos_id}, but ids are below"
            f" vocab_size={recipe.data.vocab_size}"
        )
    if recipe.data.windows and (recipe.data.shuffle_block or recipe.data.align):
        yield (
            "windows='random' starts lanes at any token; leave align and shuffle_block out of Data"
        )
    if not recipe.stages:
        yield "STAGES is empty; a recipe needs at least one Stage"
    yield from _problems_of_stages(recipe)
    lists = [
        (f"stage {number} lists {{}} attention windows", s.windows)
        for number, s in enumerate(recipe.stages, 1)
    ]
    lists.append(("eval_windows lists {} attention windows", recipe.eval_windows))
    for what, listed in [*lists, ("attention_widths lists {}", recipe.attention_widths)]:
        if listed and len(listed) != recipe.layers:
            yield (
                f"{what.format(len(listed))} for {recipe.layers} layers; give one for each layer"
            )
    if recipe.beside:
        yield from recipe.beside.problems()
    if recipe.eval_tokens < recipe.eval_len:
        yield (
            f"eval_tokens is {recipe.eval_tokens}, less than one lane of eval_len="
            f"{recipe.eval_len}; give more"
        )


def _problems_of(recipe: Recipe, spec: ParamSpec) -> Iterator[str]:
    if len(spec.axes) != len(spec.shape) or len(set(spec.axes)) < len(spec.axes):
        yield (
            f"has shape {spec.shape} but names {len(set(spec.axes))} axes {spec.axes}; give"
            " each dimension a name of its own"
        )
    for kind, dtype in (("dtype", spec.dtype), ("compute dtype", spec.compute or spec.dtype)):
        if not _is_floating(dtype):
            yield f"has {kind} {dtype!r}; expected a dtype such as 'bfloat16' or 'float32'"
    if (
        recipe.alike
        and spec.stacks_layers
        and (spec.padding or not spec.shape[0] or spec.shape[0] % recipe.layers)
    ):
        yield (
            f"stacks {spec.shape[0]} entries (padding {spec.padding}) for {recipe.layers} alike"
            " layers; give the same number for each layer and no padding"
        )


def _conflicts_of(recipe: Recipe, specs: Mapping[str, ParamSpec], spec: ParamSpec) -> Iterator[str]:
    """Yield what does not fit of one parameter beside others and the stages."""
    cadences = [spec.updated_after(stage) for stage in recipe.stages]
    if spec.every > 1 and recipe.period != max(each.every for each in specs.values()):
        yield (
            f"is updated every {spec.every} steps and others every"
            f" {recipe.period}; give slow parameters numbers that divide the largest"
        )
    starts = accumulate(stage.steps for stage in recipe.stages)
    for start, *two in zip(starts, cadences, cadences[1:], strict=False):
        if two[0] != two[1] and (start % two[0] or start % two[1]):
            yield (
                f"is updated every {two[0]} steps, and from step {start}"
                f" on every {two[1]}; let that stage start with a multiple of both"
            )
    if spec.sparse_rows and (
        spec.axes[:1] != ("row",) or len(spec.shape) != 2 or spec.compute or spec.padding
    ):
        yield "has sparse_rows; give it axes ('row', ...), no compute dtype and no padding"
    if spec.grad_accum_fp32 and (spec.every == 1 or spec.axes[:2] != ("token", "table")):
        yield "has grad_accum_fp32; give it axes ('token', 'table', ...) and every of 2 or more"
    if spec.init_like and (
        spec.init_like not in specs or specs[spec.init_like].shape != spec.shape
    ):
        yield f"has init_like '{spec.init_like}', which is not a parameter of shape {spec.shape}"


def _problems_of_stages(recipe: Recipe) -> Iterator[str]:
    block = recipe.data.shuffle_block
    for number, stage in enumerate(recipe.stages, 1):
        lane = f"tokens but a lane has {stage.lane_len}; give"
        if stage.max_doc_len and stage.max_doc_len > stage.lane_len:
            yield f"stage {number} cuts documents at {stage.max_doc_len} {lane} at most that"
        if stage.windows and max(stage.windows) > stage.lane_len:
            yield (
                f"stage {number} has an attention window of {max(stage.windows)} {lane} at most"
                " that"
            )
        if block and block % stage.lane_len:
            yield (
                f"shuffle block of {block} tokens is not a multiple of the lane length"
                f" {stage.lane_len}"
            )


def _is_floating(dtype: Any) -> bool:
    try:
        return dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        return False
