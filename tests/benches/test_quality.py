"""Recipes compared at small size: schedules, texts, resuming, statistics."""

import json

import pytest

from jspeed.board.records.remarks import RECORDS
from jspeed.data import find_split
from jspeed.data.manifest import read_manifest
from jspeed.data.recipe_compatibility import check_compatible
from jspeed.errors import BadInput
from jspeed.run.find_recipe import find, load_recipe
from jspeed.run.options import Options

CHILD = str(RECORDS / "ideas" / "r89_averages.py")  # of a parent that has a small size


@pytest.mark.parametrize(
    "name", ["llmc", "track3", "track3-soap", "r21", "r29", "r62", "r89", "r92", "jspeed3", CHILD]
)
def test_recipes_at_small_size_keep_their_schedule(name):
    from benches.quality import settings, tokens_after

    full, small = (find(name, sets, trace=False).recipe for sets in ((), settings(name, 4.0)))
    assert small.steps == pytest.approx(full.steps / 4, abs=4)
    assert tokens_after(name, settings(name, 4.0))[-1] == small.tokens
    own = find(name, settings(f"{name}:EVAL_LEN=64", 4.0), trace=False)
    assert own.fields["EVAL_LEN"] == 64


def test_a_text_does_not_validate_what_it_trains(tmp_path, gpt2_vocabulary):
    from benches.quality import write_tokens

    (tmp_path / "a.txt").write_text("One document.")
    with pytest.raises(BadInput, match="give at least two"):
        write_tokens(tmp_path / "tokens", [tmp_path / "a.txt"], 1000)


def test_texts_become_a_folder_that_trains(tmp_path, gpt2_vocabulary):
    from benches.quality import VOCAB, settings, write_tokens

    for name, text in (
        ("a.txt", "One document.\n\nAnother one.\n"),
        ("b.txt", "To validate.\n" * 50),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "A long one. " * 200}) + "\n")
    texts = [tmp_path / name for name in ("a.jsonl", "a.txt", "b.txt")]
    folder = tmp_path / "tokens"
    lengths = write_tokens(folder, texts, 1000)
    splits = find_split(folder, "train"), find_split(folder, "val")
    assert lengths[0] == 256 > lengths[-1] and sum(lengths) == splits[0].num_tokens
    manifest = read_manifest(folder)
    assert manifest and manifest["bos_id"] == VOCAB - 1
    assert manifest["source"]["texts"] == [text.name for text in texts]
    recipe = load_recipe(
        Options("jspeed3", data=folder, set_=tuple(settings("jspeed3", 4.0)))
    ).recipe
    check_compatible(
        folder, manifest, splits, recipe.name, recipe.vocab_size, recipe.data.bos_id, True, "gpt2"
    )


def test_a_comparison_goes_on_where_it_stopped(monkeypatch, tmp_path):
    from benches import quality

    made = []

    def our_run(name, data, run_dir, seed, flags, sets):
        made.append((name, seed))
        return {"curve": [{"step": 0, "val_loss": 8.0}, {"step": 1, "val_loss": 5.0 - seed / 10}]}

    monkeypatch.setattr(quality, "our_run", our_run)
    monkeypatch.setattr(quality, "write_tokens", lambda out, texts, most: [256] * 2000)
    kept = tmp_path / "kept.json"
    quality.quality((), ("r29",), seeds=2, json_=kept)
    quality.quality((), ("r29", "r62"), seeds=2, json_=kept)
    assert made == [("r29", 1), ("r29", 2), ("r62", 1), ("r62", 2)]
    assert json.loads(kept.read_text())["compared"]["r29"]["losses"] == [4.9, 4.8]
    with pytest.raises(BadInput, match="2,000 documents have 512,000 .* more text"):
        quality.quality((), ("r29",), shorter=1.0)
    with pytest.raises(BadInput, match="is of --shorter 4.0, not 2.0"):
        quality.quality((), ("r29",), shorter=2.0, json_=kept)
    kept.write_text('{"shorter": 4.0, "curves": {}}')
    with pytest.raises(BadInput, match="is of other parts of documents than their first 256"):
        quality.quality((), ("r29",), json_=kept)


def test_a_change_of_a_recipe_may_hold_colons():
    from benches.quality import settings

    sets = settings("r89:COOLDOWN={400: 0.0, 1200: 1.0}:MUDD_WIDTH=8", 4.0)
    fields = find("r89", sets, trace=False).fields
    assert (fields["COOLDOWN"], fields["MUDD_WIDTH"]) == ({100: 0.0, 300: 1.0}, 8)


def test_curves_are_compared_with_the_first_recipe():
    from benches.quality import compare

    first, second = (
        [[(0, 8.0), (100, 4.0)], [(0, 8.0), (100, 4.2)]],
        [[(0, 8.0), (50, 4.0)], [(0, 8.0), (60, 4.0)]],
    )
    rows = compare({"one": first, "two": second, "three": [[(0, 8.0), (90, 5.0)]], "none yet": []})
    assert list(rows) == ["one", "two", "three"]
    assert rows["one"]["loss"] == pytest.approx(4.1) and rows["one"]["p"] is None
    # At 4.1, which the second run of "one" does not reach; "three" ends at 5.0.
    assert rows["two"]["fraction"] == pytest.approx((50 + 60) * (3.9 / 4) / (97.5 + 100))
    assert rows["three"]["fraction"] == pytest.approx(2 * 90 / (75 + 100 * 3 / 3.8))
    assert rows["two"]["p"] < 0.5 < rows["three"]["p"]
