"""Generate text with a trained model: batched autoregressive decoding with a KV cache."""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.errors import BadInput
from jspeed.inference.trained import Model
from jspeed.model.kv_cache import Cache, advance, empty
from jspeed.model.layers import key_of
from jspeed.parallel.mesh import replicated
from jspeed.recipe import ParamSpec, Recipe, map_specs
from jspeed.run.compute.device import device_of
from jspeed.run.compute.program import eval_context

PREFILL_CHUNK = 64  # tokens of a prompt in one prefill
STOPPED = -1
NOT_A_NUMBER = -2  # drawn where a logit is NaN
GREEDY = 1e-6  # a temperature below which fp32 has no softmax but the argmax


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: the argmax at a ``temperature`` below 1e-6, else from the
    softmax of logits over it.

    ``top_k``: among the k most probable. ``top_p``: among the fewest that together have this
    probability, after top_k. ``bos``: the token that begins a document comes before each prompt.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    bos: bool = True


def draw(sampling: Sampling, keys_B: jax.Array, logits_BV: jax.Array) -> jax.Array:
    """Draw a token of each row from fp32 ``logits_BV``, each with its own key: int32 ``[B]``,
    NOT_A_NUMBER for NaN."""
    nan_B = jnp.any(jnp.isnan(logits_BV), axis=-1)
    if sampling.temperature < GREEDY:
        drawn_B = jnp.argmax(logits_BV, axis=-1)
    else:
        logits_BV, ids_BV = logits_BV / sampling.temperature, None
        if sampling.top_k is not None or sampling.top_p is not None:
            vocabulary = logits_BV.shape[1]
            logits_BV, ids_BV = jax.lax.top_k(
                logits_BV, min(sampling.top_k or vocabulary, vocabulary)
            )
        if sampling.top_p is not None:
            p_BV = jax.nn.softmax(logits_BV, axis=-1)
            likelier_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
            logits_BV = jnp.where(likelier_BV < sampling.top_p, logits_BV, -jnp.inf)
        drawn_B = jax.vmap(jax.random.categorical)(keys_B, logits_BV)
        if ids_BV is not None:
            drawn_B = jnp.take_along_axis(ids_BV, drawn_B[:, None], axis=1)[:, 0]
    return jnp.where(nan_B, NOT_A_NUMBER, drawn_B.astype(jnp.int32))


def context_length(recipe: Recipe) -> int:
    """Context length: the longest document of the recipe's last stage, or its lane (row of a
    batch)."""
    last = recipe.stages[-1]
    return last.max_doc_len or last.lane_len


def _apart(recipe: Recipe, params: Any) -> Any:
    """Return ``params`` with a list of its layers for each bank.

    A matmul reads an array that begins where its operand does, so XLA copies each layer of a bank,
    at each token, before it reads it. A layer that is an array of its own is read where it lies.
    """

    def layers(spec: ParamSpec, bank: jax.Array) -> Any:
        return list(bank) if spec.stacks_layers else bank

    return map_specs(layers, recipe.parameters, params)


def _together(recipe: Recipe, params: Any) -> Any:
    """Return the parameters of which :func:`_apart` has made lists: in a program, XLA takes a layer
    of a stack for that layer."""

    def bank(spec: ParamSpec, layers: Any) -> jax.Array:
        return jnp.stack(layers) if spec.stacks_layers else layers

    return map_specs(bank, recipe.parameters, params)


class Generator:
    """Compiled prefill and decode of a model for ``rows`` sequences.

    Prefill reads ``PREFILL_CHUNK`` tokens of each prompt; decode reads one token of each text and
    draws the next. A text depends on its prompt, its row and the seed, not on the other rows.
    """

    def __init__(self, model: Model, rows: int, sampling: Sampling) -> None:
        recipe = model.recipe
        self.tokenizer = model.tokenizer  # called by what writes text: it may have to be fetched
        self.rows, self.limit = rows, context_length(recipe)
        bos_id = model.facts["bos_id"]
        self.bos_id = bos_id if sampling.bos else None
        self.ends = model.facts.get("end_ids", [] if bos_id is None else [bos_id])
        slots = -(-self.limit // PREFILL_CHUNK) * PREFILL_CHUNK
        context = eval_context(recipe, device_of(model.mesh, "xla"))
        one_device = model.mesh.size == 1
        self._params = _apart(recipe, model.compute_params) if one_device else model.compute_params
        self._name = recipe.name
        vocabulary = model.facts["vocab_size"]

        def forward(params: Any, tokens_BT: jax.Array) -> jax.Array:
            whole = _together(recipe, params) if one_device else params
            return recipe.forward(whole, tokens_BT, context)

        def prefill(params: Any, cache: Cache, start_B: jax.Array, tokens_BT: jax.Array) -> Cache:
            return advance(lambda tokens: forward(params, tokens), cache, start_B, tokens_BT)[0]

        def decode(
            params: Any, cache: Cache, start_B: jax.Array, tokens_B: jax.Array, number: jax.Array
        ) -> tuple[Cache, jax.Array]:
            cache, logits_B1V = advance(
                lambda tokens: forward(params, tokens), cache, start_B, tokens_B[:, None]
            )
            key = jax.random.fold_in(key_of(sampling.seed), number)
            keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))
            return cache, draw(sampling, keys_B, logits_B1V[:, 0, :vocabulary])

        def second(params: Any, cache: Cache, two_B2: jax.Array) -> tuple[jax.Array, jax.Array]:
            ones = jnp.ones(rows, jnp.int32)
            last_B1 = two_B2[:, 1:]
            alone_B1V = advance(lambda tokens: forward(params, tokens), cache, ones, last_B1)[1]
            return forward(params, two_B2)[:, 1], alone_B1V[:, 0]

        self._second = jax.jit(second)
        # Where the first cache lies as later ones do, decode is compiled once.
        self._empty = jax.jit(
            lambda params: empty(lambda tokens: forward(params, tokens), rows, slots),
            out_shardings=replicated(model.mesh) if one_device else None,
        )
        self.prefill, self.decode = (
            jax.jit(prefill, donate_argnums=1),
            jax.jit(decode, donate_argnums=1),
        )

    def __call__(self, prompts: Sequence[Sequence[int]], tokens: int) -> Iterator[np.ndarray]:
        """Yield the next token of each row, int32 ``[rows]``, ``tokens`` times or until every row
        has ended.

        A row ends at the BOS token, or those that the tokenizer's facts name instead, and yields
        ``STOPPED`` from there on. When a text outgrows the model's context, its later half is
        prefilled again.
        """
        texts = [self._with_bos(prompt) for prompt in prompts]
        running = np.ones(self.rows, bool)
        cache, lengths = self._prefill(texts)
        cache = self._check_cache(cache, texts)
        for number in range(tokens):
            if lengths.max() > self.limit:
                texts = [
                    text[-max(1, self.limit // 2) :] if len(text) > self.limit else text
                    for text in texts
                ]
                cache, lengths = self._prefill(texts)
            last = np.array([text[-1] for text in texts], np.int32)
            cache, drawn = self.decode(self._params, cache, lengths - 1, last, np.int32(number))
            new = np.asarray(drawn)
            if (new == NOT_A_NUMBER).any():
                raise BadInput(
                    f"model {self._name} gives logits that are not numbers after {number} tokens;"
                    " give another"
                )
            running &= ~np.isin(new, self.ends)
            for text, token, runs in zip(texts, new.tolist(), running, strict=True):
                text += [token] if runs else []
            lengths = np.where(running, lengths + 1, lengths).astype(np.int32)
            yield np.where(running, new, STOPPED)
            if not running.any():
                return

    def _with_bos(self, prompt: Sequence[int]) -> list[int]:
        bos = [] if self.bos_id is None else [self.bos_id]
        if not bos and not prompt:
            raise BadInput(
                f"without a BOS token model {self._name} has nothing to continue; give a --prompt"
            )
        room = self.limit - len(bos)
        return [*bos, *prompt[-room:]] if room else [*bos, *prompt][-1:]

    def _prefill(self, texts: Sequence[Sequence[int]]) -> tuple[Cache, np.ndarray]:
        """Fill the cache with all of each text but its last token, which the next decode reads."""
        lengths = np.array([len(text) for text in texts], np.int32)
        cache = self._empty(self._params)
        for start in range(0, int(lengths.max()) - 1, PREFILL_CHUNK):
            chunk = np.zeros((self.rows, PREFILL_CHUNK), np.int32)
            for row, text in zip(chunk, texts, strict=True):
                part = text[start : start + PREFILL_CHUNK]
                row[: len(part)] = part
            cache = self.prefill(self._params, cache, np.full(self.rows, start, np.int32), chunk)
        return cache, lengths

    def _check_cache(self, cache: Cache, texts: Sequence[Sequence[int]]) -> Cache:
        """Raise BadInput unless the last cached entry of a token is the same from prefill and from
        decode; where a recipe caches nothing, unless the logits after two tokens are.

        If not, the recipe mixes positions in a way that the cache does not see. Decodes the second
        token of each text once more; returns the cache. Rounding of bf16 explains far less than the
        5 % allowed.
        """
        row = next((row for row, text in enumerate(texts) if len(text) > 1), None)
        if row is None:
            return cache
        two = np.array([text[:2] if len(text) > 1 else [0, 0] for text in texts], np.int32)
        if cache.kept:
            ones = np.ones(self.rows, np.int32)
            read = np.asarray(cache.kept[-1])[row, 1].astype(np.float32)
            cache, _ = self.decode(self._params, cache, ones, two[:, 1], np.int32(0))
            alone = np.asarray(cache.kept[-1])[row, 1].astype(np.float32)
        else:
            both = self._second(self._params, cache, two)
            read, alone = (np.asarray(logits_BV)[row].astype(np.float32) for logits_BV in both)
        if np.max(np.abs(read - alone)) > 0.05 * (1 + np.max(np.abs(read))):
            raise BadInput(
                f"recipe {self._name} mixes positions outside the primitives of jspeed.model"
                " (model/kv_cache.py lists them), which the key-value cache cannot follow; use"
                " those primitives"
            )
        return cache


def write(
    generator: Generator, prompts: Sequence[str], tokens: int, stops: Sequence[str] = ()
) -> Iterator[list[str]]:
    """Yield, token by token, the new text of each row of ``generator``, prompts left out.

    A text also ends before the first of ``stops`` in it. Only whole characters are yielded; invalid
    UTF-8 becomes U+FFFD.
    """
    tokenizer = generator.tokenizer()
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in prompts]
    held = [""] * len(prompts)  # what may be the start of a stop
    ended = [False] * len(prompts)

    def released(row: int, text: str, last: bool) -> str:
        if ended[row]:
            return ""
        held[row] += text
        if ends := [at for stop in stops if (at := held[row].find(stop)) >= 0]:
            ended[row] = True
            return held[row][: min(ends)]
        starts = [n for stop in stops for n in range(1, len(stop)) if held[row].endswith(stop[:n])]
        keep = 0 if last else max(starts, default=0)
        out, held[row] = held[row][: len(held[row]) - keep], held[row][len(held[row]) - keep :]
        ended[row] = last
        return out

    for new in generator(
        [tokenizer.encode(prompt.encode()).tolist() for prompt in prompts], tokens
    ):
        texts = []
        for row, token in enumerate(new.tolist()):
            over = token == STOPPED
            text = decoders[row].decode(b"" if over else tokenizer.decode([token]), final=over)
            texts.append(released(row, text, over))
        yield texts
        if all(ended):
            return
    yield [
        released(row, decoder.decode(b"", final=True), True) for row, decoder in enumerate(decoders)
    ]


def joined(texts: Sequence[str]) -> str:
    """Return several texts as one: a line each where they are lines, else with a rule between
    them."""
    lines = all("\n" not in text.strip("\n") for text in texts)
    return "\n".join(text.strip("\n") for text in texts) if lines else f"\n{'-' * 15}\n".join(texts)


def sample(model: Model, prompts: Sequence[str], tokens: int, sampling: Sampling) -> list[str]:
    """Return whole texts, prompts included."""
    texts = list(prompts)
    for new in write(Generator(model, len(prompts), sampling), prompts, tokens):
        texts = [text + more for text, more in zip(texts, new, strict=True)]
    return texts
