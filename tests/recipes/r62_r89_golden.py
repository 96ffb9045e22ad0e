"""Small r62 and r89: fields, initial parameters, golden values."""

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspeed.recipe import Context, Recipe, leaves
from jspeed.run.find_recipe import find

from . import golden

HEADS = 6


@dataclass(frozen=True)
class Size:
    """What is smaller than in the records; lane lengths and documents in tokens, ``steps`` without
    the last stage's."""

    vocab: int = 512
    bos: int = 500
    head: int = 16
    bigrams: int = 64
    block: int = 8
    composed: int = 11
    lanes: tuple[int, ...] = (112, 160, 192, 192)
    documents: tuple[int, int] = (96, 112)
    eval_len: int = 256
    steps: int = 9
    extra: int = 2
    warmup: int = 4
    end: int = 3

    @property
    def width(self) -> int:
        return HEADS * self.head

    def sets(self, name: str) -> list[str]:
        """The fields of our recipe at this size."""
        a, b, steps = round(self.steps / 3), round(2 * self.steps / 3), self.steps
        whole, last = steps + self.extra, (b if name == "r89" else -(-2 * steps // 3)) | 1
        fall = 1 - {"r62": 0.55, "r89": 0.60}[name]
        fall = fall * steps if name == "r62" else int(fall * steps)
        cut = self.documents if name == "r89" else (self.documents[1],) * 2
        fields: dict[str, Any] = {"VOCAB": self.vocab, "BOS": self.bos, "WIDTH": self.width}
        fields |= {"MLP_WIDTH": 4 * self.width, "BIGRAMS": self.bigrams, "BLOCK": self.block}
        fields |= {"STEPS": (a, b - a, steps - b, self.extra), "LANE_LENS": self.lanes}
        fields["MAX_DOCS"] = (64,) * 4
        fields |= {"MAX_DOC_LENS": (cut[0], *(cut[1],) * 3), "LAST_TIED": last}
        fields["SHARES"] = ({0: 1.0}, {a: 0.5, b: 0.0}, {0: 0.25, a: 0.0})
        fields["COOLDOWN"] = {fall: 0.0, steps: 1.0}
        fields |= {"MOMENTUM": {0: 0.85, self.warmup: 0.95, whole - self.end: 0.95, whole: 0.85}}
        fields |= {"EVAL_LEN": self.eval_len, "EVAL_TOKENS": 8 * self.eval_len}
        fields |= {"COMPUTE": "float32", "FP8": "off"}
        if name == "r89":
            fields |= {"PREFIX_SHARE": {a: 0.25, b: 0.0}, "DC_WINDOW": self.composed}
        return [f"{field}={value}" for field, value in fields.items()]


FULL = {
    "r62": Size(steps=1560, extra=40, warmup=300, end=50),
    "r89": Size(steps=1270, extra=15, warmup=300, end=50),
}

# Of the golden numbers.
SMALL = Size(
    384, 300, head=8, block=3, composed=5, lanes=(48,) * 4, documents=(48, 48), eval_len=64
)
ROWS = 2
STEPS = 3

# Mean and standard deviation of a parameter where they are not 0 and SPREAD; matrices have 1 /
# sqrt(in). Gates that were louder would make losses so sensitive that rounding alone differs by
# 1e-5.
SPREAD = 0.3
VALUES = {
    "layer_scales": (1.05, 0.1),
    "post_scales": (1.0, 0.1),
    "start_scales": (0.1, 0.1),
    "bigram_scales": (0.1, 0.1),
    "attention_scales": (0.6, 0.1),
    "skip_scale": (-1.0, 0.1),
    "backout_scale": (0.5, 0.1),
    "mudd_up": (0.0, 0.05),
    "mudd_down": (0.0, 0.05),
    "mudd_bias": (5.0, 2.0),
    "gates_up": (0.0, 0.05),
    "gates_down": (0.0, 0.05),
    "gates_bias": (5.0, 2.0),
    "gates_scale": (0.1, 0.01),
    "largest": (0.0, 0.0),  # no parameter; FP8 alone reads it
}


def filled(recipe: Recipe, seed: int = 0) -> dict[str, Any]:
    """Values for every parameter of a recipe; embedding and head are equal."""
    tree = {}
    for name, spec in leaves(recipe.parameters):
        # its numbers never change
        rng = np.random.RandomState([seed, crc32((spec.init_like or name).encode())])
        usual = 0.0, spec.shape[-2] ** -0.5 if "matrix" in spec.axes else SPREAD
        mean, spread = VALUES.get(name, usual)
        value = np.asarray(mean + spread * rng.standard_normal(spec.shape), np.float32)
        if spec.padding:
            value[-spec.padding :] = 0
        tree[name] = value
    return tree


def draw_tokens() -> np.ndarray:
    """Lanes of the golden numbers, ``[B, T + 1]``: all start with a document, as does every
    sixteenth token or so."""
    rng = np.random.RandomState(0)
    shape = ROWS, SMALL.lanes[0] + 1
    starts = rng.random_sample(shape) < 1 / 16
    starts[:, 0] = True
    return np.where(starts, SMALL.bos, rng.randint(0, SMALL.bos, shape)).astype(np.int32)


def draw_prefixes() -> np.ndarray:
    """In place of r89's table of longest prefixes, which needs GPT-2's vocabulary: -1 for about two
    tokens in five."""
    return np.maximum(np.random.RandomState(1).randint(-200, SMALL.bos, SMALL.vocab), -1)


def tied(grads: dict[str, Any]) -> dict[str, Any]:
    """While embedding and head are one table only the sum of their gradients is known; maxima for
    FP8 have none."""
    apart = "embed", "head", "largest"
    rest = {name: value for name, value in grads.items() if name not in apart}
    return rest | {"words": grads["embed"] + grads["head"]}


def summary(
    losses: Any, total: float, grads: dict[str, Any], params: list[dict[str, Any]]
) -> dict[str, Any]:
    """The golden numbers: of losses ``[B, T]`` and gradients of step 0, and of parameters before
    every step. What a step does not move is left out."""
    kept = [{name: a for name, a in tree.items() if name != "largest"} for tree in params]
    found = golden.summary(losses, tied(grads), kept)
    for update in ("first update", "three updates"):
        found[update] = {name: norm for name, norm in found[update].items() if norm}
    return found | {"sum over a lane, all targets": float(total)}


def measure(name: str) -> dict[str, Any]:
    """Return the golden numbers of our recipe: steps 0, 1 and 2 on one batch, Adam's only update
    after step 1."""
    recipe = find(name, SMALL.sets(name), trace=False).recipe
    recipe.loss.__globals__["gpt2_prefixes"] = lambda ordinary, size: draw_prefixes()
    tokens = jnp.asarray(draw_tokens())
    weights = jnp.full((ROWS, SMALL.lanes[0]), 1 / (ROWS * SMALL.lanes[0]))
    optimizer = recipe.optimizer()

    @jax.jit
    def gradients(params: Any, step: Any) -> Any:
        ctx = Context(recipe.stages[0], training=True, step=step)

        def loss(params: Any) -> Any:
            total, losses = recipe.loss(params, tokens[:, :-1], tokens[:, 1:], weights, ctx)
            return total, (total, losses)

        return jax.grad(loss, has_aux=True)(params)

    def update(params: Any, state: Any, grads: Any, due: bool) -> Any:
        changes, state = optimizer.update(grads, state, params, due=1 + due)
        return optax.apply_updates(params, changes), state

    jitted = jax.jit(update, static_argnames="due")
    params, state, before = [filled(recipe)], optimizer.init(filled(recipe)), None
    first: Any = None
    for step in range(STEPS):
        grads, (total, losses) = gradients(params[-1], jnp.int32(step))
        first = first or (losses, total, grads)
        due = step % 2 == 1
        # only what is slow is due, NorMuon is not
        sums = jax.tree.map(jnp.add, grads, before) if due else grads
        specs = recipe.parameters.items()
        given = {key: (sums if spec.every > 1 else grads)[key] for key, spec in specs}
        before = grads
        after, state = jitted(params[-1], state, given, due=due)
        params.append(jax.tree.map(np.asarray, after))
    return summary(*first, params)
