"""A recipe on other tokens than its own takes vocabulary and separator from the manifest of its
data."""

import json
from pathlib import Path

import pytest

from jspeed.board.series.preregistered import _data
from jspeed.corpus import tokenise
from jspeed.data.tokens import GPT2
from jspeed.errors import BadInput
from jspeed.inference import score
from jspeed.inference.commands.export import export
from jspeed.inference.generate import Sampling, sample
from jspeed.inference.trained import load_model
from jspeed.recipes import known_recipes
from jspeed.run.find_recipe import GPT2_TABLE, find, for_tokens, load_recipe
from jspeed.run.options import Options
from jspeed.run.train import train

from ..refusals import refused
from ..toys import TOYS

MINE = {"tokenizer": "tokenizer.json@0123", "vocab_size": 300, "bos_id": 7}
SMALL = [name for name in TOYS["fineweb-cpu"] if not name.startswith(("VOCAB", "BOS"))]


@pytest.fixture
def data(tmp_path):
    """Texts of five words as tokens of an own tokenizer.json, whose separator has an own name."""
    hf = pytest.importorskip("tokenizers", reason="the extra tokenizers is not installed")
    words = ["a", "quick", "brown", "fox", "jumps"]
    made = hf.Tokenizer(
        hf.models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="a")
    )
    made.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<|start|>"])
    made.save(str(tmp_path / "mine.json"))
    texts = [" ".join(words[(n + k * n) % 5] for k in range(20)) for n in range(60)]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"{text} fox"}) + "\n" for text in texts)
    )
    tokenizer = str(tmp_path / "mine.json")
    inputs = [tmp_path / "a.jsonl"]
    options = tokenise.Tokenising(tokenizer, 0.3, separator_token="<|start|>")
    return tokenise.prepare_text(inputs, tmp_path / "data", options)


@pytest.mark.slow
def test_from_text_to_text_with_an_own_tokenizer(data, tmp_path, capsys):
    """It took a copied recipe with four lines edited."""
    sets = (*SMALL, "STEPS=4", "EVAL_EVERY=4")
    options = Options(
        "fineweb-cpu",
        data=data,
        run_dir=tmp_path / "run",
        set_=sets,
        target_loss=9.0,
        progress=False,
    )
    assert train(options) == 0
    name = json.loads((data / "manifest.json").read_text())["tokenizer"]
    line = (
        f"note: the data hold 6 ids of {name}, and so VOCAB=128 BOS=5: other tokens than recipe"
        " fineweb-cpu's, so on"
    )
    assert line in capsys.readouterr().out
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    tokens = {"tokenizer": name, "vocab_size": 6, "bos_id": 5}
    changed = {"VOCAB": 128, "BOS": 5, "tokens": tokens}
    assert run["track"] == "own-tokens"
    assert {key: run["overrides"][key] for key in changed} == changed
    assert run["recipe_hash"] == load_recipe(options).hash != find("fineweb-cpu", sets).hash

    model = load_model(tmp_path / "run")
    assert model.found.hash == run["recipe_hash"] and model.recipe.data.bos_id == 5
    assert score.validate(model, data).loss == pytest.approx(run["val_loss"], abs=1e-5)
    (text,) = sample(model, ["quick fox"], 4, Sampling(temperature=0))
    export(tmp_path / "run", tmp_path / "out")
    exported = load_model(tmp_path / "out")
    assert sample(exported, ["quick fox"], 4, Sampling(temperature=0)) == [text]
    assert exported.found.hash == run["recipe_hash"]


@pytest.mark.parametrize("name", known_recipes())
@pytest.mark.parametrize("ids", [300, 60_001])
def test_every_recipe_takes_other_tokens_or_says_why_not(name, ids):
    sets = [text for text in TOYS[name] if not text.startswith(("VOCAB", "BOS"))]
    found, facts = find(name, sets, trace=False), MINE | {"vocab_size": ids, "bos_id": ids - 1}
    if GPT2_TABLE in found.source:
        refused(f"recipe {name} uses a table of GPT-2's", for_tokens, found, sets, facts)
        return
    fitted = for_tokens(found, sets, facts)
    data, vocab = fitted.recipe.data, fitted.fields["VOCAB"]
    padded = found.fields["VOCAB"] > found.recipe.data.vocab_size
    assert (data.vocab_size, data.bos_id) == (ids, ids - 1)
    assert ids < vocab if padded else ids == vocab
    assert {spec.shape[0] for path, spec in fitted.recipe.parameters.items() if path == "head"} <= {
        vocab
    }
    assert fitted.recipe.track == "own-tokens" and fitted.hash != found.hash


@pytest.mark.parametrize(
    ("recipe", "facts"),
    [
        ("fineweb-cpu", GPT2),
        ("fineweb-cpu", GPT2 | {"bos_id": None}),  # --end-of-text none
        ("stdlib", {"tokenizer": "bytes", "vocab_size": 257, "bos_id": 256}),
        ("r89", GPT2),
        ("nanogpt", {"tokenizer": "symbols", "vocab_size": 65, "bos_id": None}),
    ],
)
def test_on_its_own_tokens_a_recipe_stays_as_it_is(recipe, facts):
    found = find(recipe, trace=False)
    assert for_tokens(found, [], facts) is found


@pytest.mark.parametrize(
    ("recipe", "sets", "facts", "fields", "data"),
    [
        # Names and characters of another text: the data set's own kind of tokens, but other ones.
        ("microgpt-names", [], {"tokenizer": "symbols", "vocab_size": 9, "bos_id": 7, "pad_id": 8},
         {"VOCAB": 9, "BOS": 7, "PAD": 8}, (9, 7)),
        ("nanogpt", [], {"tokenizer": "symbols", "vocab_size": 40, "bos_id": None}, {"VOCAB": 40},
        (40, 0)),
        ("stdlib", [], GPT2, {"VOCAB": 50_272}, (50_257, 50_256)),
        ("fineweb-cpu", [], MINE, {"VOCAB": 384, "BOS": 7}, (300, 7)),
        ("fineweb-cpu", ["vocab=512"], MINE, {"VOCAB": 512, "BOS": 7}, (300, 7)),
        ("fineweb-cpu", ["BOS=3"], MINE, {"VOCAB": 384, "BOS": 3}, (300, 3)),
        ("fineweb-cpu", ["BOS=400"], MINE, {"VOCAB": 512, "BOS": 400}, (401, 400)),
        # Without a separator, BOS is an id that no text has.
        ("fineweb-cpu", [], MINE | {"vocab_size": 384, "bos_id": None}, {"VOCAB": 512, "BOS": 384},
        (385, 384)),
    ],
)  # fmt: skip
def test_what_is_taken(recipe, sets, facts, fields, data):
    fitted = for_tokens(find(recipe, sets, trace=False), sets, facts)
    assert {name: fitted.fields[name] for name in fields} == fields
    assert (fitted.recipe.data.vocab_size, fitted.recipe.data.bos_id) == data and fitted.note


ROWS = dict(
    tokenizer="symbols", vocab_size=28, bos_id=26, pad_id=27, source={"kind": "names", "row": 8}
)


@pytest.mark.parametrize(
    ("sets", "facts", "lengths", "note"),
    [
        ([], {}, (8, 8, 2632), "rows of 8, and so LANE_LEN=8 EVAL_LEN=8 EVAL_TOKENS"),
        (["EVAL_TOKENS=80"], {}, (8, 8, 80), "rows of 8, and so LANE_LEN=8 EVAL_LEN=8: other"),
        ([], {"vocab_size": 9, "bos_id": 7, "pad_id": 8}, (8, 8, 2632), "VOCAB=9 BOS=7 PAD=8"),
        # two names in a lane: as asked
        (["LANE_LEN=16", "EVAL_LEN=16"], {}, (16, 16, 10_528), None),
        ([], {"source": {"kind": "names", "row": 32}}, (32, 32, 10_528), None),
        ([], {"source": {"kind": "names", "row": "8"}}, (32, 32, 10_528), None),
    ],
)
def test_a_lane_is_as_long_as_the_rows_of_the_data(sets, facts, lengths, note):
    """`prepare names --row 8` printed a command that trained rows of 32."""
    found = find("microgpt-names", sets, trace=False)
    fitted = for_tokens(found, sets, ROWS | facts)
    recipe = fitted.recipe
    assert (recipe.stages[0].lane_len, recipe.eval_len, recipe.eval_tokens) == lengths
    assert recipe.data.shuffle_block == recipe.parameters["positions"].shape[0] == lengths[0]
    assert (note in fitted.note and recipe.track == "own-tokens") if note else fitted is found


def test_other_recipes_take_rows_as_text():
    assert for_tokens(found := find("stdlib", trace=False), [], ROWS) is not found
    assert for_tokens(found, [], ROWS).recipe.stages[0].lane_len == found.recipe.stages[0].lane_len


def test_a_given_vocabulary_must_hold_the_ids():
    with pytest.raises(BadInput, match="VOCAB=299 is too small; give VOCAB=300"):
        for_tokens(find("fineweb-cpu", ["VOCAB=299"], trace=False), ["VOCAB=299"], MINE)


def test_an_own_recipe_with_room_stays_as_it_is(tmp_path):
    """Its author said which tokens it is for: only what does not fit changes."""
    source = find("stdlib", trace=False).source.replace(
        'Data("stdlib", vocab_size=257', 'Data("mine", vocab_size=272'
    )
    (tmp_path / "mine.py").write_text(source)
    found = find(str(tmp_path / "mine.py"), trace=False)
    assert for_tokens(found, [], MINE | {"vocab_size": 260}) is found
    assert for_tokens(found, [], MINE).fields["VOCAB"] == 300


def test_the_data_of_a_race_are_those_of_its_flags():
    assert (
        _data(["--micro-batch", "64", "--data", "a b"])
        == Path("a b")
        == _data(["--data=a b", "--no-sample"])
    )
    assert _data(["--no-sample"]) is None is _data(["--data"])
