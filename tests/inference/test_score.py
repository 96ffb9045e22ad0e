"""Validation loss, bits per byte, accuracy and HellaSwag's scoring against results worked out by
hand."""

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.corpus import tokenizers
from jspeed.data.errors import TokenRangeError
from jspeed.data.manifest import manifest_of
from jspeed.errors import BadInput
from jspeed.inference import score
from jspeed.inference.trained import Model
from jspeed.parallel.mesh import make_mesh
from jspeed.run.compute.device import device_of
from jspeed.run.compute.program import eval_context
from jspeed.run.find_recipe import find

from ..data.on_disk import shard_bytes
from ..refusals import refused
from ..toys import TOYS, first_parameters

BYTES = tokenizers.bytes_tokenizer()


def model(name="stdlib", facts=None):
    found = find(name, TOYS[name])
    params = first_parameters(found.recipe)
    return Model(found, params, make_mesh({"data": 1}, jax.devices()[:1]), facts or BYTES.facts)


# Losses of letters in nats, whatever is before them; the space before each ending costs 1.
COST = dict.fromkeys(range(256), 9.0) | {ord(" "): 1.0, ord("a"): 1.0, ord("b"): 2.0, ord("c"): 4.0}
ITEMS = [
    # Totals 1+1=2, 1+2=3, 1+4=5, 1+9=10; means 1, 1.5, 2.5, 5: both choose the first, which is
    # right.
    {"ctx": "zz", "label": 0, "endings": ["a", "b", "c", "q"]},
    # Totals 1+2=3, 1+1*4=5, 9, 10; means 1.5, 1.0, ...: acc chooses 0, acc_norm 1; 1 is right.
    {"ctx": "z", "label": "1", "endings": ["b", "aaaa", "cc", "q"]},
    # Totals 1+4=5, 1+2+2=5 -> the first; means 2.5, 5/3: acc_norm chooses 1; 2 is right: neither.
    {"ctx": "zzz", "label": 2, "endings": ["c", "bb", "q", "qq"]},
]


def table_losses(rows):
    return np.array([[COST[token] for token in row[1:]] for row in rows.tolist()], np.float32)


def chosen(model, item):
    """The endings chosen by total and by mean loss: labels with which the item is right."""
    counts = [next(score.hellaswag(model, [replace(item, label=label)])) for label in range(4)]
    return tuple([count[n] for count in counts].index(1) for n in (1, 2))


def items_file(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_hellaswag_by_hand(tmp_path, monkeypatch):
    items = score.read_hellaswag(items_file(tmp_path / "h.jsonl", ITEMS))
    assert [item.label for item in items] == [0, 1, 2]
    assert score.encode_item(BYTES, items[0])[0] == ([122, 122], [32, 97])
    monkeypatch.setattr(score, "token_losses", lambda _: table_losses)
    assert [chosen(model(), item) for item in items] == [(0, 0), (0, 1), (0, 1)]
    *_, (done, right, right_mean) = score.hellaswag(model(), items * 5)
    assert (done, right, right_mean) == (15, 5, 10)


def test_rows_are_no_longer_than_the_model_looks_back():
    rows = score.padded_batch([[5] * 17, [7]], 16)
    assert rows.shape == (score.ROWS, 17) and rows[0].all() and rows[1:].sum() == 7
    assert score.padded_batch([[5] * 9], 100).shape == (score.ROWS, score.BUCKET + 1)


# 40: longer than the model's context, cut into 16 and 16
@pytest.mark.parametrize("length", [16, 40])
def test_accuracy_is_the_share_of_targets_that_are_the_argmax(length):
    # padding, 27, counts for nothing
    own = model("microgpt-names", facts={"bos_id": 26, "vocab_size": 28})
    rng = np.random.default_rng(0)
    own.params["head"] += rng.normal(0, 1, own.params["head"].shape)
    rows = rng.integers(0, 6, (35, length + 1)).astype(np.uint16)  # more than are taken at once
    rows[:, 9:12] = 27
    right = total = 0
    ctx = score.scoring_context(own, 16)
    forward = jax.jit(lambda row: own.recipe.forward(own.params, row, ctx))
    for row in rows:
        for piece in [row[:17], row[16:33]][: length // 16]:
            best = np.asarray(forward(piece[None, :-1].astype(np.int32)))[0, :, :28].argmax(-1)
            counts = np.asarray(own.recipe.weigh(piece[None, :-1], piece[None, 1:]))[0]
            right, total = right + np.sum(counts * (best == piece[1:])), total + np.sum(counts)
    found = score.accuracy(own, rows)
    assert 0 < found < 1 and found == pytest.approx(right / total)


@pytest.mark.slow
def test_losses_of_a_staged_recipe_are_those_of_evaluation():
    """Record 62's forward pass reads its stage's number, and evaluates with own windows."""
    staged = model("r62")
    recipe = staged.recipe
    rows = np.asarray(jax.random.randint(jax.random.key(0), (2, recipe.eval_len + 1), 6, 257))
    found = score.token_losses(staged)(rows)
    ctx = eval_context(recipe, device_of(staged.mesh, "xla"))
    log_p = jax.nn.log_softmax(recipe.forward(staged.params, rows[:, :-1], ctx))
    own = jnp.take_along_axis(log_p, rows[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(found, -own, rtol=1e-5, atol=1e-6)


def test_a_recipe_does_not_score_itself_in_hellaswag_either():
    honest = model()
    cheats = dataclasses.replace(honest.recipe, loss=lambda *given: (jnp.zeros(()), 0.3 * given[2]))
    dishonest = dataclasses.replace(honest, found=dataclasses.replace(honest.found, recipe=cheats))
    rows = np.random.default_rng(0).integers(0, 256, (2, 33)).astype(np.int32)
    np.testing.assert_array_equal(
        score.token_losses(dishonest)(rows), score.token_losses(honest)(rows)
    )


def test_what_is_longer_than_the_context_is_cut_from_the_left(monkeypatch):
    """The toy's context is 16: a context is cut, and of an ending of more than 16 ids the last 16
    are scored."""
    rows = []
    monkeypatch.setattr(
        score, "token_losses", lambda _: lambda batch: rows.append(batch) or table_losses(batch)
    )
    short, long = score.scorer(model())(
        [(list(b"abcdefghijklmnop"), list(b" qr")), (list(b"z"), list(b"b" * 20))]
    )
    assert bytes(rows[0][0, :17].tolist()) == b"cdefghijklmnop qr" and short.loss == 1 + 9 + 9
    assert long.loss == 16 * 2 and long.mean == 2 and short.greedy is None
    endings = ("b" * 40, "a", "q", "c")
    assert chosen(model(), score.Item("z", endings, 0)) == (1, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no items"),
        ("{}\n", "line 1 of .* is no HellaSwag item"),
        (json.dumps(ITEMS[0]) + '\n{"ctx": "a", "endings": ["b"], "label": 0}\n', "line 2 .* four"),
        ("nonsense", "line 1 of"),
        *(
            (json.dumps(ITEMS[0] | wrong) + "\n", "line 1 of")
            for wrong in ({"ctx": 3}, {"endings": [1, 2, 3, 4]})
        ),
        *(
            (json.dumps(ITEMS[0] | {"label": label}) + "\n", "line 1 of")
            for label in (float("inf"), 1.9, 4, -1, None)
        ),
        ("[" * 100_000, "line 1 of"),
    ],
)
def test_bad_items(tmp_path, text, words):
    (tmp_path / "h.jsonl").write_text(text)
    refused(words, score.read_hellaswag, tmp_path / "h.jsonl")
    refused("cannot be read", score.read_hellaswag, tmp_path / "none.jsonl")
    refused("not a regular file", score.read_hellaswag, Path("/dev/zero"))
    (tmp_path / "h.jsonl").write_text(json.dumps(ITEMS[0] | {"label": "2"}))
    assert score.read_hellaswag(tmp_path / "h.jsonl")[0].label == 2


def test_bits_per_byte_count_bytes_and_what_counts():
    # Ids of 1, 2, 3 and 0 bytes; a mark at the end has none.
    tokenizer = tokenizers.symbols_tokenizer("symbols", ["a", "é", "€"], 4, 3)
    rows = np.array([[0, 0, 1, 2, 3]], np.uint16)
    found = score.in_bytes(model().recipe, tokenizer, rows, 1.5)
    assert (found.tokens, found.bytes) == (4, 6)
    assert found.bits_per_byte == pytest.approx(1.5 * 4 / 6 / math.log(2))
    weighing = dataclasses.replace(
        model().recipe, weigh=lambda tokens, targets: (targets != 1).astype("float32")
    )
    found = score.in_bytes(weighing, tokenizer, rows, 1.5)
    assert (found.tokens, found.bytes) == (3, 4)
    assert found.bits_per_byte == pytest.approx(1.5 * 3 / 4 / math.log(2))


def test_validation_of_a_uniform_model_is_eight_bits_and_a_bit(tmp_path):
    """A zero head gives every one of 272 ids the same probability, on any number of rows."""
    tokens = np.random.default_rng(0).integers(0, 256, 2000)
    (tmp_path / "t_val_000000.bin").write_bytes(shard_bytes(tokens))
    for count in (160, 1000):
        found = score.validate(model(), tmp_path, count)
        assert found.loss == pytest.approx(math.log(272), abs=1e-5)
        assert found.tokens == found.bytes == count // 16 * 16
        assert found.bits_per_byte == pytest.approx(math.log2(272), abs=1e-5)
    refused("--tokens 8: .* lanes of 16", score.validate, model(), tmp_path, 8)
    record = {"name": "t_val_000000.bin", "split": "val", "bytes": 5024, "sha256": "0" * 64}
    facts = {"tokenizer": "gpt2", "vocab_size": 50_257, "bos_id": 50_256, "source": {}}
    manifest = manifest_of([record | {"tokens": 2000, "documents": 0}], facts)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    refused("holds tokens of gpt2 but the model reads bytes", score.validate, model(), tmp_path)


@pytest.mark.parametrize(("sets", "most"), [((), 257), (("VOCAB=200", "BOS=5"), 200)])
def test_ids_unknown_to_model_or_tokenizer_are_refused(tmp_path, sets, most):
    """The table gave NaN for them, or another id's row; where the padded table has them, the
    tokenizer has no text."""
    found = find("gpt2", [*TOYS["gpt2"], *sets])
    own = replace(model(), found=found, params=first_parameters(found.recipe))
    tokens = np.arange(199)
    for odd, fits in ((most - 1, True), (most, False)):
        (tmp_path / "t_val_000000.bin").write_bytes(
            shard_bytes([*tokens[:100], odd, *tokens[100:]])
        )
        if fits:
            assert math.isfinite(score.validate(own, tmp_path, 160).loss)
        else:
            with pytest.raises(
                TokenRangeError, match=f"token id {most} at token position 100, .* {most}"
            ):
                score.validate(own, tmp_path, 160)


def test_tokens_that_stand_for_no_text_are_no_figure(tmp_path):
    """There were nan bits a byte, with exit code 0."""
    (tmp_path / "t_val_000000.bin").write_bytes(shard_bytes([256] * 200))
    refused("the first 160 validation tokens", score.validate, model(), tmp_path, 160)


def test_scores_that_are_not_numbers_are_refused(monkeypatch):
    """The least of four of them was an answer."""
    monkeypatch.setattr(
        score, "token_losses", lambda _: lambda rows: np.full(rows[:, 1:].shape, np.nan)
    )
    with pytest.raises(BadInput, match="model stdlib .* not numbers"):
        chosen(model(), score.Item("z", ("a", "b", "c", "d"), 0))
