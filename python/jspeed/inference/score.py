"""How good a trained model is: its loss and bits per byte on any text, and HellaSwag."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jspeed.corpus.download import fetch
from jspeed.corpus.tokenizers import Tokenizer
from jspeed.data import find_split
from jspeed.data.manifest import read_manifest
from jspeed.errors import BadInput
from jspeed.files import cache_folder, read_regular
from jspeed.inference.generate import context_length
from jspeed.inference.trained import Model
from jspeed.parallel import DEFAULT_LAYOUT
from jspeed.recipe import Context, Recipe
from jspeed.run import evaluate
from jspeed.run.compute.device import device_of
from jspeed.run.compute.preflight import preflight
from jspeed.run.compute.program import compiled, eval_context, lower_evaluation
from jspeed.run.compute.step import computing

HELLASWAG_URL = "https://raw.githubusercontent.com/rowanz/hellaswag/a29ff8e9a04bba4bd6588223785ce105328adc57/data/hellaswag_val.jsonl"
HELLASWAG_BLOB = "0f5ee25d72216f12317d5d8a7b92deafa423d81e"  # git's name of that file's contents
ROWS = 32  # sequences that are scored at once
BUCKET = 32  # tokens; sequences are padded to a multiple, so that few programs are compiled

Losses = Callable[[np.ndarray], np.ndarray]
"""int32 tokens ``[ROWS, T + 1]`` -> fp32 loss of each but the first in nats, ``[ROWS, T]``."""


@dataclass(frozen=True)
class Validation:
    """``loss`` in nats per token over ``tokens``, which stand for ``bytes`` of text; ``bits_per_byte`` of that.

    ``accuracy`` is the share of them that the model held for the likeliest; None: not asked for.
    """

    loss: float
    tokens: int
    bytes: int
    bits_per_byte: float
    accuracy: float | None = None


def validate(model: Model, folder: Path, tokens: int | None = None, accurate: bool = False) -> Validation:
    """Evaluate on the first ``tokens`` (default: the recipe's) validation tokens of ``folder``, as a run does.

    ``accurate``: measure accuracy too, which takes as long again. Raises BadInput when the folder's tokens are not the
    model's.
    """
    manifest: Mapping[str, Any] = read_manifest(folder) or {}
    theirs = {name: manifest[name] for name in ("tokenizer", "symbols") if name in manifest}
    ours = {name: model.facts[name] for name in ("tokenizer", "symbols") if name in model.facts}
    if theirs and theirs != ours:
        raise BadInput(
            f"{folder} holds tokens of {theirs['tokenizer']} but the model reads {ours['tokenizer']}, or other symbols "
            "of it; prepare the text with the model's"
        )
    recipe = replace(model.recipe, eval_tokens=tokens or model.recipe.eval_tokens)
    if recipe.eval_tokens < recipe.eval_len:
        raise BadInput(f"--tokens {tokens}: the model is evaluated in rows of {recipe.eval_len}; give at least as many")
    rows = evaluate.read_rows(find_split(folder, "val"), recipe)
    device = device_of(model.mesh, recipe=recipe)
    device = preflight(recipe, model.mesh, device, {}, Console(stderr=True, highlight=False)).device
    evaluate.check_documents(rows, recipe, eval_context(recipe, device).stage.max_docs)
    padded, lowered = lower_evaluation(recipe, model.mesh, DEFAULT_LAYOUT, device, device.micro_batch, len(rows))
    validation = evaluate.place(rows, padded, recipe, model.mesh)
    loss = evaluate.validation_loss(compiled(lowered, device), model.params, validation)
    found = in_bytes(recipe, model.tokenizer(), rows, loss)
    return replace(found, accuracy=accuracy(model, rows)) if accurate else found


def accuracy(model: Model, rows: np.ndarray) -> float:
    """Return the (weighted) share of targets of ``rows`` (ids ``[N, T + 1]``) that are the likeliest id there.

    Rows longer than the model looks back on are cut into such that are not: all their logits would not fit.
    """
    recipe, limit, choices = model.recipe, context_length(model.recipe), likeliest(model)
    if (length := rows.shape[1] - 1) > limit:
        rows = np.concatenate([rows[:, at : at + limit + 1] for at in range(0, length - limit + 1, limit)])
    right = total = 0.0
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS].astype(np.int32)
        best = choices(np.pad(part, ((0, ROWS - len(part)), (0, 0))))[: len(part)]
        weights = np.ones(best.shape)
        if recipe.weigh:
            weights = np.asarray(recipe.weigh(jnp.asarray(part[:, :-1]), jnp.asarray(part[:, 1:])), np.float64)
        right, total = right + float(np.sum(weights * (best == part[:, 1:]))), total + float(np.sum(weights))
    return right / total


def in_bytes(recipe: Recipe, tokenizer: Tokenizer, rows: np.ndarray, loss: float) -> Validation:
    """Return ``loss`` over the targets of ``rows`` (ids ``[N, T + 1]``) that count, and what it is in bits per byte."""
    weights = np.ones(rows[:, 1:].shape)
    if recipe.weigh:
        weights = np.asarray(recipe.weigh(jnp.asarray(rows[:, :-1]), jnp.asarray(rows[:, 1:])), np.float64)
    count = int(np.sum(tokenizer.byte_lengths()[rows[:, 1:]] * weights))
    bits = loss * np.sum(weights) / math.log(2) / count if count else math.nan
    return Validation(loss, int(np.sum(weights)), count, bits)


LABELS = ("0", "1", "2", "3")  # a number in HellaSwag's own file, text in Hugging Face's


@dataclass(frozen=True)
class Item:
    """A beginning, four ways to go on, and which of them is right (0 to 3)."""

    context: str
    endings: tuple[str, ...]
    label: int


def read_hellaswag(path: Path) -> list[Item]:
    """Read HellaSwag's own .jsonl. Raises BadInput with the line that is not of it."""
    items = []
    try:
        lines = read_regular(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read as UTF-8 ({error}); give hellaswag_val.jsonl") from None
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            item = Item(record["ctx"], tuple(record["endings"]), LABELS.index(str(record["label"])))
            if len(item.endings) != 4 or not item.context or {*map(type, (item.context, *item.endings))} != {str}:
                raise ValueError("it wants a beginning, four endings and a label from 0 to 3")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadInput(f"line {number} of {path} is no HellaSwag item ({type(error).__name__}: {error})") from None
        items.append(item)
    if not items:
        raise BadInput(f"{path} holds no items; give hellaswag_val.jsonl")
    return items


def fetch_hellaswag() -> Path:
    """Fetch HellaSwag's validation items to the cache folder and return the file."""
    path = cache_folder() / "downloads" / "hellaswag_val.jsonl"
    return fetch(HELLASWAG_URL, path, HELLASWAG_BLOB, digest=git_blob)


def git_blob(path: Path) -> str:
    """Return git's SHA-1 of a file's contents."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def hellaswag(model: Model, items: Iterable[Item]) -> Iterator[tuple[int, int, int]]:
    """Yield (items so far, right by total loss, right by mean loss) as groups of items are scored.

    The standard scoring, as llm.c and build-nanogpt have it: the model reads beginning + " " + ending, and chooses the
    ending whose tokens have the least total loss ("acc"), or the least mean loss ("acc_norm").
    """
    tokenizer = model.tokenizer()
    encoded = [encode_item(tokenizer, item, context_length(model.recipe)) for item in items]
    order = sorted(range(len(encoded)), key=lambda n: max(len(ids) for ids, _ in encoded[n][0]))
    losses = token_losses(model)
    done = right = right_mean = 0
    for start in range(0, len(order), ROWS // 4):
        group = [encoded[n] for n in order[start : start + ROWS // 4]]
        for choice, choice_mean, label in score(group, losses, context_length(model.recipe)):
            done, right, right_mean = done + 1, right + (choice == label), right_mean + (choice_mean == label)
        yield done, right, right_mean


Encoded = tuple[list[tuple[list[int], int]], int]
"""For each ending (ids of beginning and ending, how many of them are the beginning's), and the label."""


def encode_item(tokenizer: Tokenizer, item: Item, limit: int) -> Encoded:
    """Tokenise an item; what a model of ``limit`` tokens cannot look back on is left out, from the left."""
    context = tokenizer.encode(item.context.encode()).tolist()
    sequences = []
    for ending in item.endings:
        ids = tokenizer.encode(f" {ending}".encode()).tolist()
        cut = max(0, len(context) + len(ids) - limit - 1)
        kept = context[min(cut, len(context) - 1) :]
        sequences.append((kept + ids, len(kept)))
    return sequences, item.label


def filled(sequences: Sequence[Sequence[int]], limit: int) -> np.ndarray:
    """Return int32 ``[ROWS, T + 1]``: at most ROWS sequences of at most ``limit + 1`` ids, and 0 behind them.

    T is the same for sequences of about the same length, and at most ``limit``.
    """
    length = min(limit, -(-max(map(len, sequences)) // BUCKET) * BUCKET)
    rows = np.zeros((ROWS, length + 1), np.int32)
    for row, ids in zip(rows, sequences, strict=False):
        row[: len(ids)] = ids
    return rows


def score(group: Sequence[Encoded], losses: Losses, limit: int) -> list[tuple[int, int, int]]:
    """Return for each item (choice by total loss, choice by mean loss, label); the model looks back on ``limit``."""
    sequences = [sequence for item, _ in group for sequence in item]
    found = losses(filled([ids for ids, _ in sequences], limit))
    sums, means = [], []
    for row, (ids, begins) in zip(found, sequences, strict=False):
        part = row[begins - 1 : len(ids) - 1].astype(np.float64)
        sums.append(part.sum())
        means.append(part.mean())
    by_item = zip(np.reshape(sums, (-1, 4)), np.reshape(means, (-1, 4)), group, strict=True)
    return [(int(np.argmin(total)), int(np.argmin(mean)), label) for total, mean, (_, label) in by_item]


def scoring_context(model: Model, length: int) -> Context:
    """Return what forward passes over rows of ``length`` tokens run in: evaluation, of any number of documents."""
    base = eval_context(model.recipe, device_of(model.mesh, "xla"))
    return replace(base, stage=replace(base.stage, lane_len=length, max_docs=None))


def token_losses(model: Model) -> Losses:
    """Return what gives the model's loss of every token."""
    recipe = model.recipe
    params = jax.jit(lambda p: computing(recipe, p))(model.params)

    @jax.jit
    def run(params: Any, rows: jax.Array) -> jax.Array:
        ctx = scoring_context(model, rows.shape[1] - 1)
        return recipe.loss(params, rows[:, :-1], rows[:, 1:], jnp.ones(rows[:, 1:].shape, jnp.float32), ctx)[1]

    return lambda rows: np.asarray(run(params, rows))


def likeliest(model: Model) -> Callable[[np.ndarray], np.ndarray]:
    """Return what gives the likeliest id after each of int32 ``[B, T + 1]`` but the last: int32 ``[B, T]``."""
    recipe, vocabulary = model.recipe, model.facts["vocab_size"]
    params = jax.jit(lambda p: computing(recipe, p))(model.params)

    @jax.jit
    def run(params: Any, rows: jax.Array) -> jax.Array:
        ctx = scoring_context(model, rows.shape[1] - 1)
        # Row by row: the logits of all at once would be gigabytes.
        return jax.lax.map(
            lambda row: jnp.argmax(recipe.forward(params, row[None, :-1], ctx)[0, :, :vocabulary], axis=-1), rows
        )

    return lambda rows: np.asarray(run(params, rows))
