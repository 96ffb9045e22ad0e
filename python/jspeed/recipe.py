"""What a recipe is: a table of parameters, a list of stages, three functions, and the numbers that follow from them."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspeed.errors import BadInput
from jspeed.fields import Count, CountOrZero, FolderName, FolderPath, NotNegative, integer, misfits
from jspeed.stage import Stage as Stage

Init = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]

ATTENTION = ("xla", "triton", "cudnn", "fa4", "splash")  # backends, as model/attention.py has them
MOST_LAYERS = 1000  # a recipe's functions are traced layer by layer
MOST_IDS = 2**31 - 1  # ids are int32 on devices


@dataclass(frozen=True)
class ParamSpec:
    """One parameter array before it exists: this table row gives its start, its sharding and its optimizer.

    ``axes`` names each dimension; layouts go by these names. Three carry meaning: ``matrix`` stacks matrices of one
    shape in a bank that Muon takes matrix by matrix, so a matrix is never cut; ``layer`` stacks whatever belongs to
    layers; and an array with a ``token``, ``position`` or ``row`` axis is a table whose rows are looked up, so it costs
    no matrix-multiplication FLOPs. Of a table with a ``row`` axis, its first, no device need ever hold all: its rows
    come through ``Context.fetch``. The last two axes of a bank's matrix are (in, out): it is used as ``x @ w``.

    The array is stored and updated in ``dtype``; the forward pass sees it in ``compute`` (``None``: as stored), cast
    once a step. ``padding`` matrices at the end of a bank are used by nothing; they make its length a multiple of
    the devices that share it. ``every`` is the steps between two updates; the gradients of all of them are summed.
    ``twin`` names the row of the table that this one starts equal to.
    """

    shape: tuple[CountOrZero, ...]
    axes: tuple[str, ...]
    init: Init
    group: str
    compute: Any = None
    padding: CountOrZero = 0
    dtype: Any = jnp.float32
    every: Count = 1
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
    entries = _entries(table, layers)
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


def scan_blocks(
    block: Callable[[dict[str, jax.Array], Any], Any],
    table: Mapping[str, ParamSpec],
    layers: int,
    params: Mapping[str, jax.Array],
    x: Any,
) -> Any:
    """Compute what :func:`run_blocks` does by ``jax.lax.scan``: the compiler sees one layer, however many there are.

    ``block`` must return an ``x`` of the shapes and dtypes that it is given.
    """
    stacked = {
        name: params[name] if k == 1 else params[name].reshape(-1, k, *params[name].shape[1:])
        for name, k in _entries(table, layers).items()
    }
    return jax.lax.scan(lambda x, p: (block(p, x), None), x, stacked)[0]


def _entries(table: Mapping[str, ParamSpec], layers: int) -> dict[str, int]:
    return {name: spec.shape[0] // layers for name, spec in table.items() if spec.stacks_layers}


def _rows_of(table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
    return table_VD[ids_BT]


@dataclass(frozen=True)
class Context:
    """What ``forward`` and ``loss`` may know besides parameters and tokens.

    All but ``step`` and ``first_row`` is fixed at compile time. ``attention`` is the backend to call
    :func:`jspeed.model.attention.attention` with. ``fp8`` says what FP8 matrix multiplication is on these devices:
    ``native``, ``emulated`` (no faster, operands widened to the compute dtype) or ``missing``; ``own_kernels`` whether
    those of :mod:`jspeed.model.kernels` for parts of a recipe run there, None: not known. ``blocks`` is
    :func:`run_blocks`, or what the layout has in its place. In training ``step`` is the number of steps before this
    and ``first_row`` that of the global batch's rows before those at hand, int32 scalars: they name a row's random
    numbers (:func:`jspeed.model.layers.row_keys`) on any mesh. ``phase`` is the step's remainder by ``Recipe.period``.
    Where lanes are cut, a row at hand is one of ``pieces`` of its lane. ``head_chunk``: the tokens of a row that a loss
    takes at once, None: all. ``fetch(table, ids)`` looks up rows of a table with a ``row`` axis, on any device.
    ``layer(f)`` is ``f``, one layer of a recipe that loops over them itself, or recomputes it for its gradient.
    """

    stage: Stage
    training: bool
    attention: str = "xla"
    fp8: str = "emulated"
    own_kernels: bool | None = None
    blocks: Callable[..., Any] = run_blocks
    phase: int = 0
    step: Any = 0
    first_row: Any = 0
    pieces: int = 1
    head_chunk: int | None = None
    fetch: Callable[[jax.Array, jax.Array], jax.Array] = _rows_of
    layer: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: f

    def use_fp8(self, asked: str) -> bool:
        """Decide on a recipe's field FP8: ``on``, ``off``, or ``auto`` (in training, where it is native).

        Evaluation is never in FP8. Raises :class:`BadInput` for another word, or ``on`` where FP8 is missing.
        """
        why = "these GPUs have no FP8 matrix multiplication (it needs compute capability 8.9 or newer: H100, L40S)"
        return self._use("FP8", asked, self.fp8 == "native", None if self.fp8 != "missing" else why)

    def use_own_kernels(self, asked: str) -> bool:
        """Decide likewise on OWN_KERNELS: kernels of :mod:`jspeed.model.kernels` in place of parts of a recipe."""
        why = "these devices do not run jspeed's own kernels, which are for Hopper (H100, H200)"
        own = bool(self.own_kernels)
        return self._use("OWN_KERNELS", asked, own, why if self.own_kernels is False else None) and own

    def _use(self, field: str, asked: str, automatic: bool, missing: str | None) -> bool:
        if asked not in ("auto", "on", "off"):
            raise BadInput(f"field {field} is {asked!r}; expected 'auto', 'on' or 'off'")
        if asked == "on" and missing and self.training:
            raise BadInput(f"field {field} is 'on' but {missing}; set {field}=auto or {field}=off")
        return self.training and (asked == "on" or (asked == "auto" and automatic))


@dataclass(frozen=True)
class Data:
    """Which token shards a recipe reads and how batches are cut from them.

    ``name`` is ``stdlib`` (prepared on first use) or what ``jspeed prepare`` calls the data set. Ids in the
    shards must be below ``vocab_size``. ``align="bos"`` starts every lane at a document; ``None`` reads
    contiguously. ``shuffle_block`` (tokens) permutes blocks of that length in every epoch; ``None`` keeps order.
    ``windows="random"`` starts every lane at a random token instead, drawn with replacement, as nanoGPT does.
    """

    name: FolderName
    vocab_size: Annotated[int, integer(1, MOST_IDS)]
    bos_id: Annotated[int, integer(0, MOST_IDS - 1)]
    align: Literal["bos"] | None = None
    shuffle_block: Count | None = None
    windows: Literal["random"] | None = None

    @property
    def dtype(self) -> Any:
        """How ids travel to the devices: uint16, or uint32 where there are more ids than that holds."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)


@dataclass(frozen=True)
class Sample:
    """What a finished run says: ``number`` texts of at most ``tokens`` new tokens, each after ``prompt``."""

    number: CountOrZero = 1
    tokens: Count = 128
    temperature: NotNegative = 0.8
    top_k: Count | None = None
    prompt: str = ""


@dataclass(frozen=True)
class Recipe:
    """One way to train one model to one target. ``recipes/NAME.py`` builds it and calls it ``RECIPE``.

    ``forward(params, tokens_BT, ctx)`` returns fp32 logits ``[B, T, V]``. ``loss(params, tokens_BT, targets_BT,
    weights_BT, ctx)`` returns the weighted sum of the token losses, or what training descends on instead (a scalar with
    a gradient), and the losses themselves ``[B, T]`` in nats (fp32, no gradient). In training both may be estimates, of
    a sampled softmax: ``train_loss`` is then an estimate too; ``val_loss`` never is. ``optimizer()`` returns an optax
    transformation over the whole parameter tree. The global batch is ``lanes`` rows of ``stage.lane_len`` tokens on any
    number of devices. Evaluation reads the first ``eval_tokens`` tokens of the validation shards in rows of
    ``eval_len``, with ``eval_windows`` where they are not those of the last stage.

    ``alike`` says that the layers are one function of their parameters, which ``forward`` runs through ``ctx.blocks``:
    only such layers can be gathered, recomputed or spread over a pipeline one by one.
    ``weigh(tokens_BT, targets_BT)`` returns how much each target counts (fp32 ``[B, T]``, 0 or more): losses are then
    weighted means, over the whole global batch in training. None: all count alike. ``heads`` of attention are named
    where a recipe is to be exported as GPT-2. ``sample`` is what a finished run says.
    Where parameters have ``every`` above 1, ``optimizer().update`` is given ``due``: whether they are updated.
    """

    name: FolderName
    parent: FolderName | None
    track: FolderPath
    data: Data
    target_loss: float
    parameters: Mapping[str, Any]
    forward: Callable[..., jax.Array]
    loss: Callable[..., tuple[jax.Array, jax.Array]]
    optimizer: Callable[[], optax.GradientTransformation]
    stages: tuple[Stage, ...]
    lanes: Count
    eval_every: Count
    eval_tokens: Count
    eval_len: Count
    attention_width: Count
    layers: Annotated[int, integer(1, MOST_LAYERS)]
    eval_windows: tuple[Count, ...] = ()
    alike: bool = False
    heads: Count | None = None
    weigh: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    sample: Sample = Sample()

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
        """Raise :class:`BadInput` for a field of another type or range than it declares, or parts that do not fit."""
        for where, expected, found in misfits(self, Recipe):
            raise BadInput(f"recipe {self.name}: {where} is {found}; expected {expected}")
        for path, spec in leaves(self.parameters):
            for where, expected, found in misfits(spec, ParamSpec, f"parameter {path}"):
                raise BadInput(f"recipe {self.name}: {where} is {found}; expected {expected}")
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
        if self.data.windows and (block or self.data.align):
            raise BadInput(
                f"recipe {self.name}: windows='random' starts lanes at any token, which neither align nor "
                "shuffle_block can order; leave them out of Data"
            )
        for stage in self.stages:
            if block and block % stage.lane_len:
                raise BadInput(
                    f"recipe {self.name}: shuffle block of {block} tokens is not a multiple of the lane length "
                    f"{stage.lane_len}; change one of them"
                )
        if self.eval_tokens < self.eval_len:
            raise BadInput(
                f"recipe {self.name}: eval_tokens is {self.eval_tokens}, less than one row of "
                f"eval_len={self.eval_len}; give at least as many"
            )


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return (slash-joined path, leaf) of every row of a parameter table, or of any tree, in pytree order."""
    flat = jax.tree.leaves_with_path(tree)
    return [("/".join(str(getattr(key, "key", key)) for key in path), leaf) for path, leaf in flat]


def map_specs(function: Callable[..., Any], parameters: Mapping[str, Any], *trees: Any) -> Any:
    """Apply ``function`` to every row of a parameter table, and the leaves of ``trees`` like it; keep the tree."""
    return jax.tree.map(function, parameters, *trees)


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


def replace(recipe: Recipe, **changes: Any) -> Recipe:
    """Return a copy of ``recipe`` with other values for some of its attributes."""
    return dataclasses.replace(recipe, **changes)
