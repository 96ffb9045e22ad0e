"""What a recipe is: a table of parameters, a list of stages, three functions, and the numbers that follow from them."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jspeed.errors import BadInput
from jspeed.stage import Stage as Stage

Init = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


@dataclass(frozen=True)
class ParamSpec:
    """One parameter array before it exists: this table row gives its start, its sharding and its optimizer.

    ``axes`` names each dimension; layouts go by these names. Three carry meaning of their own: ``matrix`` stacks
    matrices of one shape in a bank that Muon takes matrix by matrix, so a matrix is never cut; ``layer`` stacks
    whatever belongs to layers; and an array with a ``token``, ``position`` or ``row`` axis is a table whose rows are
    looked up, so it costs no matrix-multiplication FLOPs. Of a table with a ``row`` axis, which is its first, no
    device need ever hold all: its rows come through ``Context.fetch``. The last two axes of a bank's matrix are (in,
    out): it is used as ``x @ w``.

    The array is stored and updated in ``dtype``; the forward pass sees it in ``compute`` (``None``: as stored), cast
    once a step. ``padding`` matrices at the end of a bank are used by nothing; they make its length a multiple of
    the devices that share it. ``every`` is the steps between two updates; the gradients of all of them are summed.
    ``twin`` names the row of the table that this one starts equal to.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    group: str
    compute: Any = None
    padding: int = 0
    dtype: Any = jnp.float32
    every: int = 1
    twin: str | None = None

    @property
    def size(self) -> int:
        """Number of elements, padding left out."""
        return (self.shape[0] - self.padding) * math.prod(self.shape[1:]) if self.shape else 1

    @property
    def stacks_layers(self) -> bool:
        """Whether the first axis goes through the layers."""
        return self.axes[:1] in (("layer",), ("matrix",))


def run_blocks(
    block: Callable[[dict[str, jax.Array], Any], Any],
    table: Mapping[str, ParamSpec],
    layers: int,
    params: Mapping[str, jax.Array],
    x: Any,
) -> Any:
    """Apply ``block(p, x)`` for every layer in order, ``p`` being its part of each of ``params`` that stacks layers.

    ``table`` describes ``params`` over all ``layers``: an array of one entry a layer gives that entry, one of k entries
    a layer gives ``[k, ...]``. A device that holds fewer layers applies those.
    """
    entries = {name: spec.shape[0] // layers for name, spec in table.items() if spec.stacks_layers}
    held = {params[name].shape[0] // k for name, k in entries.items()}
    for layer in range(*held):
        x = block(
            {
                name: params[name][layer] if k == 1 else params[name][k * layer : k * layer + k]
                for name, k in entries.items()
            },
            x,
        )
    return x


def _rows_of(table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
    return table_VD[ids_BT]


@dataclass(frozen=True)
class Context:
    """What ``forward`` and ``loss`` may know besides parameters and tokens; all but ``step`` fixed at compile time.

    ``attention`` is the backend to call :func:`jspeed.model.attention.attention` with. ``fp8`` says what FP8 matrix
    multiplication is on these devices: ``native``, ``emulated`` (same numbers, no speed) or ``missing``. In training
    ``step`` is the number of steps before this one, an int32 scalar, and ``phase`` its remainder by
    ``Recipe.period``. ``fetch(table, ids)`` looks up rows of a table with a ``row`` axis, wherever they lie.
    ``blocks`` is :func:`run_blocks`, or what the layout has in its place.
    """

    stage: Stage
    training: bool
    attention: str = "xla"
    fp8: str = "emulated"
    phase: int = 0
    step: Any = 0
    fetch: Callable[[jax.Array, jax.Array], jax.Array] = _rows_of
    blocks: Callable[..., Any] = run_blocks

    def use_fp8(self, asked: str) -> bool:
        """Decide on a recipe's FP8 field: ``on``, ``off``, or ``auto`` (in training, where it is native).

        Evaluation is never in FP8. Raises :class:`BadInput` for another word, or ``on`` where FP8 is missing.
        """
        if asked not in ("auto", "on", "off"):
            raise BadInput(f"field FP8 is {asked!r}; expected 'auto', 'on' or 'off'")
        if asked == "on" and self.fp8 == "missing":
            raise BadInput(
                "field FP8 is 'on' but these GPUs have no FP8 matrix multiplication (it needs compute capability 8.9 "
                "or newer: H100, H200, B200, L40S); set FP8=auto or FP8=off"
            )
        return self.training and (asked == "on" or (asked == "auto" and self.fp8 == "native"))


@dataclass(frozen=True)
class Data:
    """Which token shards a recipe reads and how batches are cut from them.

    ``name`` is ``stdlib`` (prepared on first use) or ``fineweb`` (any folder of FineWeb-format shards). Ids in
    the shards must be below ``vocab_size``. ``align="bos"`` starts every lane at a document; ``None`` reads
    contiguously. ``shuffle_block`` (tokens) permutes blocks of that length in every epoch; ``None`` keeps order.
    """

    name: str
    vocab_size: int
    bos_id: int
    align: str | None = None
    shuffle_block: int | None = None


@dataclass(frozen=True)
class Recipe:
    """One way to train one model to one target. ``recipes/NAME.py`` builds it and calls it ``RECIPE``.

    ``forward(params, tokens_BT, ctx)`` returns fp32 logits ``[B, T, V]``. ``loss(params, tokens_BT, targets_BT,
    weights_BT, ctx)`` returns the weighted sum of the token losses (a scalar with a gradient) and the losses
    themselves ``[B, T]`` in nats (fp32, no gradient). ``optimizer()`` returns an optax transformation over the
    whole parameter tree. The global batch is ``lanes`` rows of ``stage.lane_len`` tokens on any number of
    devices. Evaluation reads the first ``eval_tokens`` tokens of the validation shards in rows of ``eval_len``, with
    ``eval_windows`` where they are not those of the last stage.
    Where parameters have ``every`` above 1, ``optimizer().update`` is given ``due``: whether they are updated.
    ``alike`` says that the layers are one function of their parameters, which ``forward`` runs through ``ctx.blocks``:
    only such layers can be gathered, recomputed or spread over a pipeline one by one.
    """

    name: str
    parent: str | None
    track: str
    data: Data
    target_loss: float
    parameters: Mapping[str, Any]
    forward: Callable[..., jax.Array]
    loss: Callable[..., tuple[jax.Array, jax.Array]]
    optimizer: Callable[[], optax.GradientTransformation]
    stages: tuple[Stage, ...]
    lanes: int
    eval_every: int
    eval_tokens: int
    eval_len: int
    attention_width: int
    layers: int
    eval_windows: tuple[int, ...] = ()
    alike: bool = False

    @property
    def period(self) -> int:
        """Steps after which all parameters have been updated as often as their ``every`` says."""
        return math.lcm(*(spec.every for _, spec in leaves(self.parameters)))

    @property
    def steps(self) -> int:
        """Steps of all stages together."""
        return sum(stage.steps for stage in self.stages)

    def tokens_per_step(self, stage: Stage) -> int:
        """Tokens in one global batch of ``stage``."""
        return self.lanes * stage.lane_len

    @property
    def tokens(self) -> int:
        """Training tokens of the whole run."""
        return sum(stage.steps * self.tokens_per_step(stage) for stage in self.stages)

    def validate(self) -> None:
        """Raise :class:`BadInput` when the parts do not fit together."""
        for path, spec in leaves(self.parameters):
            if len(spec.axes) != len(spec.shape):
                raise BadInput(
                    f"recipe {self.name}: parameter {path} has shape {spec.shape} but names {len(spec.axes)} axes "
                    f"{spec.axes}; give one name for each dimension"
                )
        rows = dict(leaves(self.parameters))
        for path, spec in rows.items():
            if spec.every not in (1, self.period):
                raise BadInput(
                    f"recipe {self.name}: parameter {path} is updated every {spec.every} steps and others every "
                    f"{self.period}; give all slow parameters one number"
                )
            if spec.twin and (spec.twin not in rows or rows[spec.twin].shape != spec.shape):
                raise BadInput(
                    f"recipe {self.name}: parameter {path} starts as '{spec.twin}', which is no parameter of shape "
                    f"{spec.shape}; name one that is"
                )
        if not self.stages:
            raise BadInput(f"recipe {self.name}: STAGES is empty; a recipe needs at least one Stage")
        for number, stage in enumerate(self.stages, 1):
            if stage.steps < 1 or stage.lane_len < 1:
                raise BadInput(
                    f"recipe {self.name}: stage {number} has {stage.steps} steps of {stage.lane_len} tokens a lane; "
                    "both must be at least 1"
                )
            if stage.max_doc_len and stage.max_doc_len > stage.lane_len:
                raise BadInput(
                    f"recipe {self.name}: stage {number} cuts documents at {stage.max_doc_len} tokens but a lane has "
                    f"{stage.lane_len}; give a document length of at most {stage.lane_len}"
                )
            if stage.windows and max(stage.windows) > stage.lane_len:
                raise BadInput(
                    f"recipe {self.name}: stage {number} has an attention window of {max(stage.windows)} tokens but a "
                    f"lane has {stage.lane_len}; give windows of at most {stage.lane_len}"
                )
            if stage.windows and len(stage.windows) != self.layers:
                raise BadInput(
                    f"recipe {self.name}: stage {number} lists {len(stage.windows)} attention windows for "
                    f"{self.layers} layers; give one for each layer"
                )
        block = self.data.shuffle_block
        for stage in self.stages:
            if block and block % stage.lane_len:
                raise BadInput(
                    f"recipe {self.name}: shuffle block of {block} tokens is not a multiple of the lane length "
                    f"{stage.lane_len}; change one of them"
                )
        if self.lanes < 1 or self.eval_len < 1 or self.eval_tokens < self.eval_len:
            raise BadInput(
                f"recipe {self.name}: found lanes={self.lanes}, eval_tokens={self.eval_tokens}, "
                f"eval_len={self.eval_len}; all must be positive and eval_tokens at least eval_len"
            )


def leaves(parameters: Mapping[str, Any]) -> list[tuple[str, ParamSpec]]:
    """Return (slash-joined path, spec) for every row of a parameter table, in pytree order."""
    flat, _ = jax.tree.flatten_with_path(parameters, is_leaf=lambda x: isinstance(x, ParamSpec))
    return [("/".join(str(key.key) for key in path), spec) for path, spec in flat]


def map_specs(function: Callable[[ParamSpec], Any], parameters: Mapping[str, Any]) -> Any:
    """Apply ``function`` to every row of a parameter table and keep the tree."""
    return jax.tree.map(function, parameters, is_leaf=lambda x: isinstance(x, ParamSpec))


def groups(parameters: Mapping[str, Any]) -> Any:
    """Return the tree of optimizer group names that ``optax.partition`` takes."""
    return map_specs(lambda spec: spec.group, parameters)


def init_parameters(parameters: Mapping[str, Any], key: jax.Array) -> Any:
    """Draw every parameter, each from a key of its own (folded in by its place in the table) or its twin's."""
    rows = leaves(parameters)
    place = {path: n for n, (path, _) in enumerate(rows)}
    keys = [jax.random.fold_in(key, place[spec.twin or path]) for path, spec in rows]
    arrays = [spec.init(key, spec.shape, spec.dtype) for key, (_, spec) in zip(keys, rows, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(map_specs(lambda _: 0, parameters)), arrays)


def parameter_count(parameters: Mapping[str, Any]) -> int:
    """Number of stored parameters."""
    return sum(spec.size for _, spec in leaves(parameters))


def is_matrix(spec: ParamSpec) -> bool:
    """Whether tokens are multiplied by it: at least two axes besides those that stack, and no table of rows to add."""
    return len(set(spec.axes) - {"layer", "matrix", "table"}) >= 2 and not {"token", "position", "row"} & set(spec.axes)


def matmul_parameters(parameters: Mapping[str, Any]) -> int:
    """Number of parameters that multiply every token: matrices, not looked-up tables, positions or stacked vectors."""
    return sum(spec.size for _, spec in leaves(parameters) if is_matrix(spec))


def mean_context(stage: Stage, window: int | None) -> float:
    """Mean number of keys a query sees in a lane cut into pieces of ``max_doc_len`` (causal, itself included)."""
    length = min(stage.lane_len, stage.max_doc_len or stage.lane_len)
    window = min(window or length, length)
    return (window * (window + 1) / 2 + (length - window) * window) / length


def flops_per_token(recipe: Recipe, stage: Stage) -> float:
    """Training FLOPs per token, forward and backward: 6 per matmul parameter + 12 x width x keys seen, per layer.

    The attention term counts two matmuls (scores, values) of 2 x width FLOPs per key, three times (forward and
    two in the backward pass), for the keys that the causal mask and the window leave.
    """
    windows = stage.windows or (None,) * recipe.layers
    attention = sum(12 * recipe.attention_width * mean_context(stage, window) for window in windows)
    return 6 * matmul_parameters(recipe.parameters) + attention


def recipe_hash(source: str, fields: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a recipe's source text and resolved fields: two runs with one hash ran one recipe."""
    text = json.dumps({"fields": dict(fields), "source": source}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


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


def replace(recipe: Recipe, **changes: Any) -> Recipe:
    """Return a copy of ``recipe`` with other values for some of its attributes."""
    return dataclasses.replace(recipe, **changes)
