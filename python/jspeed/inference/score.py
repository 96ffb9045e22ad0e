"""Evaluate a trained model: loss, bits per byte and accuracy on any text; HellaSwag."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jspeed.base.files import EVALUATION_OF_LLM_C, read_input, read_text
from jspeed.cli.satellites import hooks
from jspeed.corpus.download import Download
from jspeed.corpus.tokenizers import Tokenizer, gpt2_byte_pairs
from jspeed.data import find_split
from jspeed.data.manifest import Split, read_folder
from jspeed.errors import BadInput
from jspeed.inference.generate import context_length
from jspeed.inference.trained import Model
from jspeed.parallel import DEFAULT_LAYOUT
from jspeed.recipe import Context, Recipe
from jspeed.run import evaluate
from jspeed.run.compute.device import Placement, device_of
from jspeed.run.compute.gradients import weigh
from jspeed.run.compute.program import compile_evaluation, eval_context
from jspeed.run.compute.score import losses as losses_of_logits
from jspeed.run.setup import open_stream

COMMIT = "a29ff8e9a04bba4bd6588223785ce105328adc57"
HELLASWAG = Download(  # of that commit, as evaluations on it publish
    "hellaswag_val.jsonl",
    f"https://raw.githubusercontent.com/rowanz/hellaswag/{COMMIT}/data/hellaswag_val.jsonl",
    "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588",
)
ROWS = 32  # sequences that are scored at once
BUCKET = 32  # tokens; sequences are padded to a multiple, so that few programs are compiled

Losses = Callable[[np.ndarray], np.ndarray]
"""int32 tokens ``[ROWS, T + 1]`` -> fp32 loss of each but the first in nats, ``[ROWS, T]``."""


@dataclass(frozen=True)
class Validation:
    """``loss`` in nats per token over ``tokens``, which stand for ``bytes`` of text;
    ``bits_per_byte`` of that.

    ``accuracy`` is the share of targets that are the argmax; None: not asked for.
    """

    loss: float
    tokens: int
    bytes: int
    bits_per_byte: float
    accuracy: float | None = None


def validate(
    model: Model, folder: Path, tokens: int | None = None, accurate: bool = False
) -> Validation:
    """Evaluate on the first ``tokens`` (default: the recipe's) validation tokens of ``folder``, as
    a run does.

    ``accurate``: measure accuracy too, which doubles the time. Raises BadInput when the folder's
    tokens are not the model's, by its manifest or by the ids themselves. What a recipe wants
    beside tokens is known of the folder's training tokens (:func:`stream_of`).
    """
    reads: tuple[Split, ...] = ("train", "val") if model.recipe.beside else ("val",)
    manifest: Mapping[str, Any] = read_folder(folder, reads) or {}
    theirs = {name: manifest[name] for name in ("tokenizer", "symbols") if name in manifest}
    ours = {name: model.facts[name] for name in ("tokenizer", "symbols") if name in model.facts}
    if theirs and theirs != ours:
        raise BadInput(
            f"{folder} holds tokens of {theirs['tokenizer']} but the model reads"
            f" {ours['tokenizer']}, or a different symbol list; prepare the text with the model's"
            " tokenizer"
        )
    tokenizer = model.tokenizer()
    known = replace(
        model.recipe.data, vocab_size=min(model.recipe.vocab_size, tokenizer.vocab_size)
    )
    recipe = replace(model.recipe, data=known, eval_tokens=tokens or model.recipe.eval_tokens)
    if recipe.eval_tokens < recipe.eval_len:
        raise BadInput(
            f"--tokens {tokens}: the model is evaluated in lanes of {recipe.eval_len}; give at"
            " least as many"
        )
    rows = evaluate.read_lanes(find_split(folder, "val"), recipe)
    placement = Placement(model.mesh, DEFAULT_LAYOUT, device_of(model.mesh, recipe=recipe))
    console = Console(stderr=True, highlight=False)
    placement = hooks().preflight(recipe, placement, console)
    evaluate.check_documents(rows, recipe, eval_context(recipe, placement.device).stage.max_docs)
    recipe = replace(recipe, eval_max_doc_len=evaluate.longest_document(rows, recipe))
    padded, run = compile_evaluation(recipe, placement, placement.device.at_once, len(rows))
    validation = evaluate.to_devices(rows, padded, recipe, model.mesh)
    if pairs := evaluate.byte_pairs(recipe, tokenizer.name, gpt2_byte_pairs):
        validation.tokenizer_mask = evaluate.tokenizer_mask(recipe, pairs, model.mesh)
    if loader := stream_of(model, folder):
        with loader:
            evaluate.look_up(validation, rows, loader, model.mesh)
    loss = evaluate.validation_loss(run, model.params, validation)
    if not math.isfinite(loss):
        raise BadInput(
            f"the loss of {model.recipe.name} on {folder} is {loss}: no figure of a model; give"
            " another"
        )
    found = in_bytes(recipe, tokenizer, rows, loss)
    if not found.bytes:
        raise BadInput(
            f"{folder}: the first {found.tokens:,} validation tokens are of no text; prepare a"
            " folder with text"
        )
    return replace(found, accuracy=accuracy(model, rows)) if accurate else found


def stream_of(model: Model, folder: Path) -> Any:
    """Return the batches of ``folder`` as the run of ``model`` had read them at its end, for what
    they tell of tokens.

    None where the recipe asks for nothing, and where the run's seed and steps are not known."""
    if model.recipe.beside is None or model.trained is None:
        return None
    seed, steps = model.trained
    loader = open_stream(model.recipe, find_split(folder, "train"), seed, steps)
    loader.read(steps)
    return loader


def accuracy(model: Model, rows: np.ndarray) -> float:
    """Return the (weighted) share of targets of ``rows`` (ids ``[N, T + 1]``) that are the argmax
    there.

    Rows longer than the model's context are cut into rows of that length. What is left over at the
    end of each is not counted: the logits of a whole row would not fit in memory.
    """
    recipe, limit, choices = model.recipe, context_length(model.recipe), greedy_tokens(model)
    if (length := rows.shape[1] - 1) > limit:
        rows = np.concatenate(
            [rows[:, at : at + limit + 1] for at in range(0, length - limit + 1, limit)]
        )
    right = total = 0.0
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS].astype(np.int32)
        best = choices(np.pad(part, ((0, ROWS - len(part)), (0, 0))))[: len(part)]
        weights = target_weights(recipe, part)
        right, total = (
            right + float(np.sum(weights * (best == part[:, 1:]))),
            total + float(np.sum(weights)),
        )
    return right / total


def target_weights(recipe: Recipe, rows: np.ndarray) -> np.ndarray:
    """Return the weight in the loss of each target of ``rows`` (ids ``[N, T + 1]``): float64 ``[N,
    T]``."""
    return np.asarray(weigh(recipe, jnp.asarray(rows), jnp.ones(rows[:, 1:].shape)), np.float64)


def in_bytes(recipe: Recipe, tokenizer: Tokenizer, rows: np.ndarray, loss: float) -> Validation:
    """Return ``loss`` over the targets of ``rows`` (ids ``[N, T + 1]``) that count, and what it is
    in bits per byte."""
    weights = target_weights(recipe, rows)
    count = int(np.sum(tokenizer.byte_lengths()[rows[:, 1:]] * weights))
    bits = loss * np.sum(weights) / math.log(2) / count if count else math.nan
    return Validation(loss, int(np.sum(weights)), count, bits)


LABELS = ("0", "1", "2", "3")  # a number in HellaSwag's own file, text in Hugging Face's


@dataclass(frozen=True)
class Item:
    """A context, four endings, and the index of the right one."""

    context: str
    endings: tuple[str, ...]
    label: int


def read_hellaswag(path: Path) -> list[Item]:
    """Read HellaSwag's own .jsonl. Raises BadInput with the line that is not of it."""
    items = []
    remedy = "give hellaswag_val.jsonl"
    if read_input(path, remedy)[:4] == EVALUATION_OF_LLM_C:
        raise BadInput(f"{path} is llm.c's file of tokens; {remedy}, which it is made from")
    lines = read_text(path, remedy).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            item = Item(record["ctx"], tuple(record["endings"]), LABELS.index(str(record["label"])))
            if (
                len(item.endings) != 4
                or not item.context
                or {*map(type, (item.context, *item.endings))} != {str}
            ):
                raise ValueError("expected a context, four endings and a label from 0 to 3")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadInput(
                f"line {number} of {path} is no HellaSwag item ({type(error).__name__}: {error});"
                " fetch the file again"
            ) from None
        items.append(item)
    if not items:
        raise BadInput(f"{path} holds no items; give hellaswag_val.jsonl")
    return items


class HellaSwag(NamedTuple):
    """Items so far, and how many of them were right by total loss and by mean loss."""

    items: int = 0
    right: int = 0
    right_by_mean: int = 0


def hellaswag(model: Model, items: Sequence[Item]) -> Iterator[HellaSwag]:
    """Yield the counts so far as groups of items are scored.

    The standard scoring, as llm.c and build-nanogpt have it: the model reads context + " " +
    ending. It chooses the ending whose tokens have the least total loss ("acc"), or the least mean
    loss ("acc_norm").
    """
    tokenizer, scored, counts = model.tokenizer(), scorer(model), HellaSwag()
    encoded = [encode_item(tokenizer, item) for item in items]
    order = sorted(
        range(len(items)), key=lambda n: max(len(given + after) for given, after in encoded[n])
    )
    for start in range(0, len(order), ROWS // 4):
        numbers = order[start : start + ROWS // 4]
        found = scored([pair for n in numbers for pair in encoded[n]])
        for row, n in enumerate(numbers):
            four = found[4 * row : 4 * row + 4]
            chosen = (
                int(np.argmin([each.loss for each in four])),
                int(np.argmin([each.mean for each in four])),
            )
            right, right_by_mean = (choice == items[n].label for choice in chosen)
            counts = HellaSwag(
                counts.items + 1, counts.right + right, counts.right_by_mean + right_by_mean
            )
        yield counts


Pair = tuple[list[int], list[int]]
"""Ids that are given, and ids that are scored after them."""


def encode_item(tokenizer: Tokenizer, item: Item) -> list[Pair]:
    """Tokenise an item: its context, and each ending after it."""
    context = tokenizer.encode(item.context.encode()).tolist()
    return [(context, tokenizer.encode(f" {ending}".encode()).tolist()) for ending in item.endings]


class Score(NamedTuple):
    """Total and mean loss of the scored ids in nats, and whether each is the argmax (None: not
    asked for)."""

    loss: float
    mean: float
    greedy: bool | None


def scorer(model: Model, greedy: bool = False) -> Callable[[Sequence[Pair]], list[Score]]:
    """Return a function that scores pairs, with ``greedy`` in two forward passes.

    Of a pair longer than the model's context the last ids count: the given ones are cut from the
    left, and of an ending that is longer itself its last ids are scored.
    """
    limit, losses = context_length(model.recipe), token_losses(model)
    choices = greedy_tokens(model) if greedy else None

    def scored(pairs: Sequence[Pair]) -> list[Score]:
        sequences = [
            ((given + after)[-(limit + 1) :], min(len(after), limit)) for given, after in pairs
        ]
        found: dict[int, Score] = {}
        order = sorted(range(len(pairs)), key=lambda n: len(sequences[n][0]))
        for start in range(0, len(order), ROWS):
            numbers = order[start : start + ROWS]
            rows = padded_batch([sequences[n][0] for n in numbers], limit)
            per_token, best = losses(rows), choices(rows) if choices else None
            for row, n in enumerate(numbers):
                ids, count = sequences[n]
                part = slice(len(ids) - 1 - count, len(ids) - 1)
                nats = per_token[row, part].astype(np.float64)
                if not np.all(np.isfinite(nats)):
                    raise BadInput(
                        f"model {model.recipe.name} gives losses that are not numbers; give another"
                    )
                equal = (
                    None if best is None else bool(np.all(best[row, part] == rows[row, 1:][part]))
                )
                found[n] = Score(float(nats.sum()), float(nats.mean()), equal)
        return [found[n] for n in range(len(pairs))]

    return scored


def padded_batch(sequences: Sequence[Sequence[int]], limit: int) -> np.ndarray:
    """Return int32 ``[ROWS, T + 1]``: at most ROWS sequences of at most ``limit + 1`` ids, and 0
    behind them.

    T is the same for sequences of about the same length, and at most ``limit``.
    """
    length = min(limit, -(-max(map(len, sequences)) // BUCKET) * BUCKET)
    rows = np.zeros((ROWS, length + 1), np.int32)
    for row, ids in zip(rows, sequences, strict=False):
        row[: len(ids)] = ids
    return rows


def scoring_context(model: Model, length: int) -> Context:
    """Return what forward passes over rows of ``length`` tokens run in: evaluation, of any number
    of documents."""
    base = eval_context(model.recipe, device_of(model.mesh, "xla"))
    return replace(base, stage=replace(base.stage, lane_len=length, max_docs=None))


def token_losses(model: Model) -> Losses:
    """Return a function from rows to the model's loss of every target, as a run scores them."""
    recipe = model.recipe

    @jax.jit
    def run(params: Any, rows: jax.Array) -> jax.Array:
        ctx = scoring_context(model, rows.shape[1] - 1)
        return losses_of_logits(recipe, params, rows[:, :-1], rows[:, 1:], ctx)

    return lambda rows: np.asarray(run(model.compute_params, rows))


def greedy_tokens(model: Model) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from int32 ``[B, T + 1]`` to the argmax after each id but the last: int32
    ``[B, T]``."""
    recipe, vocabulary = model.recipe, model.facts["vocab_size"]

    @jax.jit
    def run(params: Any, rows: jax.Array) -> jax.Array:
        ctx = scoring_context(model, rows.shape[1] - 1)
        # Row by row: the logits of all at once would be gigabytes.
        return jax.lax.map(
            lambda row: jnp.argmax(
                recipe.forward(params, row[None, :-1], ctx)[0, :, :vocabulary], axis=-1
            ),
            rows,
        )

    return lambda rows: np.asarray(run(model.compute_params, rows))
