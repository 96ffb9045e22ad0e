"""Numbers derived from a recipe: parameters, tokens, FLOPs."""

import math
from collections.abc import Mapping
from typing import Any

from jspeed.recipe import ParamSpec, Recipe, leaves
from jspeed.stage import Stage


def parameter_count(parameters: Mapping[str, Any]) -> int:
    """Number of stored parameters."""
    return sum(spec.size for _, spec in leaves(parameters))


def is_matrix(spec: ParamSpec) -> bool:
    """Whether tokens are multiplied by it: at least two axes besides those that stack, and no table of rows to add."""
    return len(set(spec.axes) - {"layer", "matrix", "table"}) >= 2 and not {"token", "position", "row"} & set(spec.axes)


def matmul_parameters(parameters: Mapping[str, Any]) -> int:
    """Number of parameters that multiply every token: matrices, not looked-up tables, positions or stacked vectors."""
    return sum(spec.size for _, spec in leaves(parameters) if is_matrix(spec))


def scored_shape(spec: ParamSpec, stage: Stage) -> tuple[int, ...]:
    """Return the shape that a training step of ``stage`` multiplies by: of a head, the rows that are scored."""
    sizes = zip(spec.shape, spec.axes, strict=True)
    return tuple(min(size, stage.scored or size) if axis == "vocab" else size for size, axis in sizes)


def parameters_met(recipe: Recipe, stage: Stage) -> int:
    """Number of :func:`matmul_parameters` that multiply a token in training, of shapes :func:`scored_shape`."""

    def met(spec: ParamSpec) -> int:
        return spec.size * math.prod(scored_shape(spec, stage)) // math.prod(spec.shape)

    return sum(met(spec) for _, spec in leaves(recipe.parameters) if is_matrix(spec))


def mean_context(stage: Stage, window: int | None) -> float:
    """Mean number of keys a query sees in a lane cut into pieces of ``max_doc_len`` (causal, itself included)."""
    length = min(stage.lane_len, stage.max_doc_len or stage.lane_len)
    window = min(window or length, length)
    return (window * (window + 1) / 2 + (length - window) * window) / length


def flops_per_token(recipe: Recipe, stage: Stage) -> float:
    """Training FLOPs per token, forward and backward: 6 per matmul parameter met + 12 x width x keys seen, per layer.

    The attention term counts two matmuls (scores, values) of 2 x width FLOPs per key, three times (forward and
    two in the backward pass), for the keys that the causal mask and the window leave.
    """
    windows = stage.windows or (None,) * recipe.layers
    attention = sum(12 * recipe.attention_width * mean_context(stage, window) for window in windows)
    return 6 * parameters_met(recipe, stage) + attention


def describe(recipe: Recipe) -> list[tuple[str, str, str]]:
    """Return the derived numbers as (name, formula, value) for the start of a run."""
    rows = [
        (
            "parameters",
            " + ".join(f"{path} {'x'.join(map(str, spec.shape))}" for path, spec in leaves(recipe.parameters)),
            f"{parameter_count(recipe.parameters):,}",
        )
    ]
    for number, stage in enumerate(recipe.stages, 1):
        windows = f", windows {min(stage.windows)} to {max(stage.windows)}" if stage.windows else ""
        rows.append(
            (
                f"stage {number}" if len(recipe.stages) > 1 else "batch",
                f"{stage.steps} steps x {recipe.lanes} lanes x {stage.lane_len} tokens{windows}",
                f"{recipe.tokens_per_step(stage):,} tokens/step",
            )
        )
    rows.append(("tokens", "sum of steps x tokens/step", f"{recipe.tokens:,}"))
    flops = flops_per_token(recipe, recipe.stages[-1])
    rows.append(("FLOPs/token", "6 x matmul parameters + 12 x width x keys seen x layers", f"{flops / 1e6:.2f} M"))
    total = sum(s.steps * recipe.tokens_per_step(s) * flops_per_token(recipe, s) for s in recipe.stages)
    rows.append(("FLOPs", "tokens x FLOPs/token", f"{total / 1e12:.2f} T"))
    rows.append(
        (
            "target",
            f"mean over the first {recipe.eval_tokens:,} validation tokens",
            f"{recipe.target_loss} nats",
        )
    )
    return rows
