"""Numbers derived from a recipe: parameters, tokens, FLOPs per token and in all."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jspeed.fields import Stage
from jspeed.recipe import Context, ParamSpec, Recipe, init_parameters, leaves
from jspeed.record.schema import Parameter


def parameter_count(parameters: Mapping[str, Any]) -> int:
    """Number of stored parameters."""
    return sum(spec.size for _, spec in leaves(parameters))


def parameter_table(recipe: Recipe) -> dict[str, Parameter]:
    """Return what run.json says of each parameter: shape without padding, axes, and how many
    entries a token reads."""
    table: dict[str, Parameter] = {}
    specs = leaves(recipe.parameters)
    fetched = rows_fetched(recipe) if any("row" in spec.axes for _, spec in specs) else {}
    for path, spec in specs:
        shape = [spec.shape[0] - spec.padding, *spec.shape[1:]] if spec.shape else []
        table[path] = {"shape": shape, "axes": list(spec.axes)}
        if "row" in spec.axes:
            table[path]["reads"] = fetched[path] + fetched[str(spec.shape)]
        elif {"token", "position"} & set(spec.axes):
            table[path]["reads"] = 1
    return table


def rows_fetched(recipe: Recipe) -> Counter[str]:
    """Return, by table, the rows that ``forward`` fetches for a token, counted while it is traced;
    of a cast or copied table by its shape."""
    stage, rows = recipe.stages[0], Counter[str]()
    params = jax.eval_shape(lambda: init_parameters(recipe.parameters, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((1, stage.lane_len), jnp.int32)

    def forward(params: Any, tokens: jax.Array) -> jax.Array:
        paths = {id(array): path for path, array in leaves(params)}

        def fetch(table: jax.Array, ids: jax.Array, kernel: Any = None) -> jax.Array:
            rows[paths.get(id(table), str(table.shape))] += ids.size // tokens.size
            return table[ids]

        return recipe.forward(params, tokens, Context(stage, training=False, fetch=fetch))

    jax.eval_shape(forward, params, tokens)
    return rows


def is_matrix(spec: ParamSpec) -> bool:
    """Whether it is a matmul weight: two or more axes besides those that stack, and not a lookup
    table."""
    return len(set(spec.axes) - {"layer", "matrix", "table"}) >= 2 and not {
        "token",
        "position",
        "row",
    } & set(spec.axes)


def scored_shape(spec: ParamSpec, stage: Stage) -> tuple[int, ...]:
    """Return the shape of a weight in the matmuls of a training step: of a head, only the rows that
    are scored."""
    sizes = zip(spec.shape, spec.axes, strict=True)
    return tuple(
        min(size, stage.scored or size) if axis == "vocab" else size for size, axis in sizes
    )


def scored_heads(recipe: Recipe, stage: Stage) -> list[tuple[int, int]]:
    """Return (rows that are scored in training, bytes of a logit) of each head."""
    heads = [spec for _, spec in leaves(recipe.parameters) if "vocab" in spec.axes]
    return [
        (
            scored_shape(spec, stage)[spec.axes.index("vocab")],
            jnp.dtype(spec.compute or spec.dtype).itemsize,
        )
        for spec in heads
    ]


def active_matmul_parameters(recipe: Recipe, stage: Stage) -> int:
    """Number of parameters in matmul weights that multiply a token in training: shapes are
    :func:`scored_shape`."""

    def active(spec: ParamSpec) -> int:
        return (
            (spec.size - spec.unread)
            * math.prod(scored_shape(spec, stage))
            // math.prod(spec.shape)
        )

    return sum(active(spec) for _, spec in leaves(recipe.parameters) if is_matrix(spec))


def mean_context(stage: Stage, window: int | None) -> float:
    """Mean number of keys a query sees in a lane cut into pieces of ``max_doc_len`` (causal, itself
    included)."""
    length = min(stage.lane_len, stage.max_doc_len or stage.lane_len)
    window = min(window or length, length)
    return (window * (window + 1) / 2 + (length - window) * window) / length


def attention_widths(recipe: Recipe) -> tuple[int, ...]:
    """Return the width of attention in each layer."""
    return recipe.attention_widths or (recipe.attention_width,) * recipe.layers


def flops_per_token(recipe: Recipe, stage: Stage) -> float:
    """Training FLOPs per token, forward and backward: 6 x active matmul parameters + 12 x width x
    keys seen, per layer.

    The attention term counts two matmuls (scores, values) of 2 x width FLOPs for each key that the
    causal mask and the window leave. It counts them three times: forward, and two in the backward
    pass. It counts attention in every layer that ``attention_widths`` does not leave out. It does
    so in the one without it that r21, r29, r62, r89 and their children have: 0.8 % (r62, r89) to
    1.8 % (r21) too much.
    """
    windows = stage.windows or (None,) * recipe.layers
    pairs = zip(attention_widths(recipe), windows, strict=True)
    attention = sum(12 * width * mean_context(stage, window) for width, window in pairs)
    return 6 * active_matmul_parameters(recipe, stage) + attention


def describe(recipe: Recipe) -> list[tuple[str, str, str]]:
    """Return the derived numbers as (name, formula, value) for the start of a run."""
    shapes = " + ".join(
        f"{path} {'x'.join(map(str, spec.shape))}" for path, spec in leaves(recipe.parameters)
    )
    lines = [("parameters", shapes, f"{parameter_count(recipe.parameters):,}")]
    several = len(recipe.stages) > 1
    for number, stage in enumerate(recipe.stages, 1):
        windows = f", windows {min(stage.windows)} to {max(stage.windows)}" if stage.windows else ""
        formula = f"{stage.steps} steps x {recipe.lanes} lanes x {stage.lane_len} tokens{windows}"
        name = f"stage {number}" if several else "batch"
        lines.append((name, formula, f"{recipe.tokens_per_step(stage):,} tokens/step"))
    flops = flops_per_token(recipe, recipe.stages[-1])
    total = sum(
        s.steps * recipe.tokens_per_step(s) * flops_per_token(recipe, s) for s in recipe.stages
    )
    per_token = "6 x matmul parameters + 12 x width x keys seen x layers"
    return [
        *lines,
        ("tokens", "sum of steps x tokens/step", f"{recipe.tokens:,}"),
        (
            "FLOPs/token",
            f"{per_token}, in the last stage" if several else per_token,
            f"{flops / 1e6:.2f} M",
        ),
        (
            "FLOPs",
            "sum over stages of tokens x FLOPs/token" if several else "tokens x FLOPs/token",
            f"{total / 1e12:.2f} T",
        ),
        (
            "target",
            f"mean over the first {recipe.eval_tokens:,} validation tokens",
            f"{recipe.target_loss} nats",
        ),
    ]
