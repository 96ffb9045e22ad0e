"""The Recipe type: a table of parameters, a list of stages, and the functions forward, loss and
optimizer."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspeed.errors import BadInput
from jspeed.fields import Count, CountOrZero, FolderName, FolderPath, NotNegative, integer
from jspeed.fields import Stage as Stage

if TYPE_CHECKING:
    from jspeed.model.custom_kernels import Kernel

Init = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]

MOST_LAYERS = 1000  # a recipe's functions are traced layer by layer
SMALL = 65_536  # elements; smaller arrays are not worth a reduce-scatter and a gather of their own
MOST_IDS = 2**31 - 1  # ids are int32 on devices


@dataclass(frozen=True)
class ParamSpec:
    """Declares one parameter: shape, logical axes, initialiser, optimizer group and dtypes.

    ``axes`` names each dimension; layouts shard by these names. Three carry meaning: ``matrix``
    stacks matrices of one shape in a bank that Muon updates matrix by matrix; ``layer`` stacks
    whatever belongs to layers; and an array with a ``token``, ``position`` or ``row`` axis is a
    table whose rows are looked up, so it costs no matmul FLOPs. A table with a ``row`` axis, its
    first, is never gathered: its rows are read through ``Context.fetch``. The last two axes of a
    bank's matrix are (in, out): it is used as ``x @ w``.

    The array is stored and updated in ``dtype``; the forward pass sees it in ``compute`` (``None``:
    as stored), cast once a step. ``padding`` matrices at the end of a bank are unused; they make
    its length a multiple of the devices that share it. FLOPs leave out ``unread`` numbers.
    ``every`` is the steps between two updates; the gradients of all of them are summed.
    ``init_like`` names the parameter whose initial value this one copies.

    A table with a ``row`` axis is sparse where ``sparse_rows`` is not 0: each token names so many
    of its rows, in one call of ``Context.fetch``. Its own optimizer (``Recipe.row_optimizers``)
    reads and writes only rows that have been named. It may then be larger than what a gradient of
    its size would leave room for. With ``on_host`` it is in no state and no program: the host gives
    a step the rows that its tokens name (``Recipe.named_rows``), and updates them.

    Slow tables side by side, ``[V, N, D]``, that :func:`jspeed.model.layers.look_up_all` alone
    reads, once, may have ``grad_accum_fp32``: each step adding the rows that its tokens name. Other
    gradients are as large as the tables.
    """

    shape: tuple[CountOrZero, ...]
    axes: tuple[str, ...]
    init: Init
    group: str
    compute: Any = None
    padding: CountOrZero = 0
    dtype: Any = jnp.float32
    every: Count = 1
    init_like: str | None = None
    sparse_rows: CountOrZero = 0
    unread: CountOrZero = 0
    grad_accum_fp32: bool = False
    on_host: bool = False

    @property
    def sparse(self) -> bool:
        """Whether it is a sparse table that the devices hold."""
        return self.sparse_rows > 0 and not self.on_host

    def updated_after(self, stage: Stage) -> int:
        """Return the steps between two updates in ``stage``."""
        return min(self.every, stage.every or self.every)

    @property
    def size(self) -> int:
        """Number of elements, padding left out."""
        return (self.shape[0] - self.padding) * math.prod(self.shape[1:]) if self.shape else 1

    @property
    def stacks_layers(self) -> bool:
        """Whether the first axis indexes layers."""
        return self.axes[:1] in (("layer",), ("matrix",))


def run_blocks(
    block: Callable[[dict[str, jax.Array], Any], Any],
    table: Mapping[str, Any],
    layers: int,
    params: Mapping[str, jax.Array],
    x: Any,
) -> Any:
    """Apply ``block(p, x)`` for every layer in order; ``p`` holds its part of each parameter that
    stacks layers.

    ``table`` describes ``params`` over all ``layers``. A parameter of one entry per layer gives
    that entry, one of k entries per layer gives ``[k, ...]``. A device that holds fewer layers
    applies only those.
    """
    entries = entries_of(table, layers)
    (layers_here,) = {params[name].shape[0] // k for name, k in entries.items()}
    for layer in range(layers_here):
        x = block(
            {
                name: params[name][layer] if k == 1 else params[name][k * layer : k * layer + k]
                for name, k in entries.items()
            },
            x,
        )
    return x


def entries_of(table: Mapping[str, Any], layers: int) -> dict[str, int]:
    """Return how many entries a layer has of each parameter that stacks layers."""
    return {name: spec.shape[0] // layers for name, spec in table.items() if spec.stacks_layers}


@dataclass(frozen=True)
class Context:
    """What ``forward`` and ``loss`` get besides parameters and tokens.

    All but ``step`` and ``first_lane`` is fixed at compile time. ``attention`` is the backend to
    call :func:`jspeed.model.attention.attention` with. ``fp8`` says how these devices multiply FP8
    matrices: ``native``, ``emulated`` (operands widened to the compute dtype, no faster) or
    ``missing``; ``kernels`` are those that may replace parts of the recipe
    (:mod:`jspeed.model.custom_kernels`), None: not known. ``blocks`` is :func:`run_blocks`, or what
    the layout puts in its place.
    In training ``step`` is the number of steps before this one and ``first_lane`` the global index
    of this micro-batch's first lane (int32 scalars); random keys derive from both
    (:func:`jspeed.model.layers.lane_keys`), so they are the same on any mesh.
    ``sub_lanes``: into how many sub-lanes each lane is split (1: not split).
    ``head_chunk``: how many tokens of a lane a loss computes logits for at once, None: all.
    ``fetch(table, ids, kernel=None)`` looks up rows of a table with a ``row`` axis, on any
    device; ``owners`` devices share its rows. ``layer(f)``, for a recipe that loops over its layers
    itself, returns ``f``, or ``jax.checkpoint(f)`` under remat. ``tokenizer_mask``, in an
    evaluation of a ``canonical`` recipe: uint8 ``[V, V / 8]``, in whose row p the bits of ids that
    never follow id p are set. ``beside``: what is known of the inputs beside themselves, of a
    recipe that asks for it; None where nothing knows it, as in ``jspeed sample``.
    """

    stage: Stage
    training: bool
    attention: str = "xla"
    fp8: str = "emulated"
    kernels: "Mapping[str, Kernel] | None" = None
    blocks: Callable[..., Any] = run_blocks
    step: jax.Array | int = 0
    first_lane: jax.Array | int = 0
    sub_lanes: int = 1
    head_chunk: int | None = None
    fetch: Callable[..., jax.Array] = lambda table_VD, ids_BT, kernel=None: table_VD[ids_BT]
    owners: int = 1
    layer: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: f
    tokenizer_mask: jax.Array | None = None
    beside: Any = None

    def use_fp8(self, asked: str) -> bool:
        """Whether to use FP8 by a recipe's field FP8: ``on``, ``off``, or ``auto`` (in training,
        where it is native).

        Evaluation is never in FP8. Raises :class:`BadInput` for another value, or ``on`` where FP8
        is missing.
        """
        why = (
            "these devices have no FP8 matmuls (an NVIDIA GPU of compute capability 8.9 has: L40S,"
            " H100)"
        )
        return self._use("FP8", asked, self.fp8 == "native", None if self.fp8 != "missing" else why)

    def kernel(self, asked: str, name: str) -> "Kernel | None":
        """Likewise by the field OWN_KERNELS: the kernel that replaces a part of the recipe."""
        why = "these devices do not run jspeed's custom kernels, which are for Hopper (H100, H200)"
        missing = self.kernels is not None and not self.kernels
        found = (self.kernels or {}).get(name)
        used = self._use("OWN_KERNELS", asked, found is not None, why if missing else None)
        return found if used else None

    def _use(self, field: str, asked: str, automatic: bool, missing: str | None) -> bool:
        if asked not in ("auto", "on", "off"):
            raise BadInput(f"field {field} is {asked!r}; expected 'auto', 'on' or 'off'")
        if asked == "on" and missing and self.training:
            raise BadInput(f"field {field} is 'on' but {missing}; set {field}=auto or {field}=off")
        return self.training and (asked == "on" or (asked == "auto" and automatic))


@dataclass(frozen=True)
class Data:
    """Which token shards a recipe reads and how batches are made of them.

    ``name`` is ``stdlib`` (prepared on first use) or the data set's name in ``jspeed prepare``. Ids
    in the shards must be below ``vocab_size``; ``bos_id`` starts a document. ``align="bos"`` starts
    every lane (a row of the batch, with its packed documents) at a document; ``None`` reads
    contiguously. ``shuffle_block`` (tokens) permutes blocks of that length in every epoch; ``None``
    keeps order. ``windows="random"`` starts every lane at a random token instead, drawn with
    replacement, as nanoGPT does.
    """

    name: FolderName
    vocab_size: Annotated[int, integer(1, MOST_IDS)]
    bos_id: Annotated[int, integer(0, MOST_IDS - 1)]
    align: Literal["bos"] | None = None
    shuffle_block: Count | None = None
    windows: Literal["random"] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of ids on their way to the devices: uint16, or uint32 for a larger
        vocabulary."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)


@dataclass(frozen=True)
class Sample:
    """Text sampled after a run: ``number`` samples of at most ``tokens`` new tokens after
    ``prompt``."""

    number: CountOrZero = 1
    tokens: Count = 128
    temperature: NotNegative = 0.8
    top_k: Count | None = None
    prompt: str = ""


@dataclass(frozen=True)
class Recipe:
    """One way to train one model to one target: the ``RECIPE`` of ``recipes/NAME.py``.

    ``forward(params, tokens_BT, ctx)`` returns fp32 logits ``[B, T, V]``, or with a large
    vocabulary ``hidden`` and ``logits`` do, from which :mod:`jspeed.run.compute.score` computes
    ``val_loss``. ``loss(params, tokens_BT, targets_BT, weights_BT, ctx)``, for training alone,
    returns the weighted sum of the token losses or another objective, and the losses ``[B, T]``.
    These are in nats (fp32, no gradient), maybe estimates by a sampled softmax. ``optimizer()``
    returns an optax transformation over the whole parameter tree. The global batch is ``lanes``
    lanes of ``stage.lane_len`` tokens on any number of devices. Evaluation reads the first
    ``eval_tokens`` tokens of the validation shards in lanes of ``eval_len``, with ``eval_windows``
    instead of the last stage's windows if given. A run sets ``eval_max_doc_len``, their longest
    document in tokens, by its data.

    ``attention_width`` (of all heads, the mean of queries and values) counts FLOPs, or
    ``attention_widths`` of each layer. ``alike``: all layers are the same function, applied by
    ``ctx.blocks``. Only such layers can be gathered one by one, or spread over a pipeline.
    ``weigh(tokens_BT, targets_BT)`` returns the weight of each target (fp32 ``[B, T]``, 0 or more):
    losses are then weighted means, over the whole global batch in training. None: equal weights.
    ``heads``, the number of attention heads, is needed for an export as GPT-2. ``sample``: what to
    sample after a run. Where parameters have ``every`` above 1, ``optimizer().update`` is given
    ``due``: it updates those whose ``every`` divides it. ``row_optimizers()`` gives the optimizer
    of each sparse table (:class:`jspeed.optim.rows`), which ``optimizer()`` does not see;
    ``named_rows`` the function that gives the rows, int32 ``[B, sparse_rows x T]``, which tokens
    ``[B, T]`` name, as ``ctx.fetch`` is called with: such a table may lie in the host's memory.
    ``averages`` (:class:`jspeed.optim.averages.Average`) of parameters take their place after the
    last step, on the clock, those in ``keep_norm`` with the norm from before. ``canonical``:
    evaluations get ``Context.tokenizer_mask``, what GPT-2's tokenizer never writes; the data must
    be its tokens. ``beside`` (:class:`jspeed.base.beside.Beside`): steps and evaluations get
    ``Context.beside``, from a loader of its own.
    """

    name: FolderName
    parent: FolderName | None
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
    track: FolderPath | None = None
    attention_widths: tuple[CountOrZero, ...] = ()
    eval_windows: tuple[Count, ...] = ()
    eval_max_doc_len: Count | None = None
    alike: bool = False
    heads: Count | None = None
    weigh: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    sample: Sample = Sample()
    row_optimizers: Callable[[], Mapping[str, Any]] = dict
    named_rows: Mapping[str, Callable[[jax.Array], jax.Array]] = field(default_factory=dict)
    averages: tuple[Any, ...] = ()
    keep_norm: tuple[str, ...] = ()
    canonical: bool = False
    beside: Any = None
    hidden: Callable[..., Any] | None = None
    logits: Callable[..., jax.Array] | None = None
    pointer: Callable[..., tuple[Any, Mapping[str, Any]]] | None = None

    @property
    def sparse(self) -> tuple[str, ...]:
        """Paths of the sparse tables on the devices."""
        return tuple(path for path, spec in leaves(self.parameters) if spec.sparse)

    @property
    def on_host(self) -> dict[str, ParamSpec]:
        """The tables that lie in the host's memory, by their paths."""
        return {path: spec for path, spec in leaves(self.parameters) if spec.on_host}

    @property
    def vocab_size(self) -> int:
        """How many ids there are room for: what the data say, but not more than a ``vocab`` axis is
        long."""
        sizes = [
            dict(zip(spec.axes, spec.shape, strict=True)) for _, spec in leaves(self.parameters)
        ]
        return min([self.data.vocab_size, *(axes["vocab"] for axes in sizes if "vocab" in axes)])

    @cached_property
    def period(self) -> int:
        """Steps after which all parameters have been updated as often as their ``every`` says."""
        return math.lcm(*(spec.every for _, spec in leaves(self.parameters)))

    @property
    def steps(self) -> int:
        """Steps of all stages together."""
        return sum(stage.steps for stage in self.stages)

    def lane_words(self, length: int) -> int:
        """Numbers of a lane of ``length`` inputs on its way to the devices: its tokens, one more,
        and what is beside them."""
        return length + 1 + length * (self.beside.words if self.beside else 0)

    def tokens_per_step(self, stage: Stage) -> int:
        """Tokens in one global batch of ``stage``."""
        return self.lanes * stage.lane_len

    @property
    def tokens(self) -> int:
        """Training tokens of the whole run."""
        return sum(stage.steps * self.tokens_per_step(stage) for stage in self.stages)


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return (slash-joined path, leaf) of every ParamSpec of a table, or of any tree, in pytree
    order."""
    flat = jax.tree.leaves_with_path(tree)
    return [("/".join(str(getattr(key, "key", key)) for key in path), leaf) for path, leaf in flat]


def map_specs(function: Callable[..., Any], parameters: Mapping[str, Any], *trees: Any) -> Any:
    """Apply ``function`` to every ParamSpec of a table, and the leaves of ``trees`` like it;
    keep the tree."""
    return jax.tree.map(function, parameters, *trees)


def groups(parameters: Mapping[str, Any]) -> Any:
    """Return the tree of optimizer group names that ``optax.partition`` takes, None for sparse
    tables."""
    return map_specs(lambda spec: None if spec.sparse_rows else spec.group, parameters)


def without_sparse(recipe: Recipe, tree: Any) -> Any:
    """Return ``tree`` with None in place of each sparse table: what ``recipe.optimizer()``
    sees."""
    return map_specs(lambda spec, part: None if spec.sparse_rows else part, recipe.parameters, tree)


def init_parameters(parameters: Mapping[str, Any], key: jax.Array) -> Any:
    """Draw every parameter, each with its own key (its index in the table folded in), or that of
    the one that it is ``init_like``."""
    specs = leaves(parameters)
    index = {path: n for n, (path, _) in enumerate(specs)}
    keys = [jax.random.fold_in(key, index[spec.init_like or path]) for path, spec in specs]
    arrays = [
        spec.init(key, spec.shape, spec.dtype) for key, (_, spec) in zip(keys, specs, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(map_specs(lambda _: 0, parameters)), arrays)
