"""More ids than uint16 holds: prepared, trained, evaluated, sampled, exported."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from jspeed.corpus import tokenise
from jspeed.inference import score
from jspeed.inference.commands.export import export
from jspeed.inference.generate import Sampling, sample
from jspeed.inference.trained import load_model
from jspeed.parallel.mesh import make_mesh
from jspeed.recipe import Data
from jspeed.run import evaluate
from jspeed.run.compute import program
from jspeed.run.compute.device import Placement, device_of
from jspeed.run.find_recipe import find
from jspeed.run.options import Options
from jspeed.run.train import train

from ..refusals import refused
from ..toys import TOYS

IDS = 70_001


@pytest.fixture
def data(tmp_path):
    """Words w0 to w69999; texts are of a few of them, whose ids are above 65,535."""
    hf = pytest.importorskip("tokenizers", reason="the extra tokenizers is not installed")
    made = hf.Tokenizer(hf.models.WordLevel({f"w{n}": n for n in range(IDS - 1)}, unk_token="w0"))
    made.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "words.json"))
    drawn = np.random.default_rng(0).integers(0, 5, (200, 30))
    texts = [" ".join(f"w{69_000 + n}" for n in row) for row in drawn]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tokenise.prepare_text(
        [tmp_path / "a.jsonl"], tmp_path / "data", tokenise.Tokenising(str(tmp_path / "words.json"))
    )


def test_ids_reach_the_devices_whole():
    recipe = replace(find("stdlib", TOYS["stdlib"]).recipe, data=Data("mine", IDS, IDS - 1))
    mesh = make_mesh()
    rows = np.full((8, recipe.eval_len + 1), IDS - 1, np.uint32)
    np.testing.assert_array_equal(evaluate.to_devices(rows, 8, recipe, mesh).lanes, rows)
    traced = program.trace_step(
        recipe, recipe.stages[0], Placement(mesh, "zero1", device_of(mesh)), 1
    )
    assert traced.jaxpr.in_avals[-1].dtype == np.uint32
    padded, traced = program.trace_evaluation(
        recipe, Placement(mesh, "zero1", device_of(mesh)), 64, 8
    )
    assert {a.dtype for a in jax.tree.leaves(traced.lower().in_avals)[-2:]} == {np.dtype(np.uint32)}
    short = replace(recipe, data=Data("mine", 2**16, 0))
    assert evaluate.to_devices(rows, 8, short, mesh).lanes.dtype == np.uint16


@pytest.mark.slow
def test_a_vocabulary_above_uint16_from_text_to_text(data, tmp_path):
    source = find("stdlib").source.replace(
        'Data("stdlib", vocab_size=257, bos_id=256', f'Data("mine", {IDS}, {IDS - 1}'
    )
    (tmp_path / "mine.py").write_text(source)
    sets = "WIDTH=8 LAYERS=1 HEADS=2 MLP_WIDTH=8 LANES=8 LANE_LEN=16 EVAL_LEN=16 STEPS=4".split()
    sets += ["EVAL_TOKENS=160", "EVAL_EVERY=4", f"VOCAB={IDS}", "HEAD_LR=0.2"]
    options = Options(
        str(tmp_path / "mine.py"),
        data=data,
        run_dir=tmp_path / "run",
        set_=(*sets,),
        target_loss=11.0,
    )
    assert train(Options(**vars(options) | {"progress": False})) == 0  # reached: ln 70,001 is 11.2
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["reached"] and run["data"]["tokenizer"].startswith("tokenizer.json@")

    model = load_model(tmp_path / "run")
    assert score.validate(model, data).loss == pytest.approx(run["val_loss"], abs=1e-5)
    (text,) = sample(model, ["w69001 w69002"], 8, Sampling(temperature=0))
    assert set(text.split()) <= {f"w{69_000 + n}" for n in range(5)}

    export(tmp_path / "run", tmp_path / "out")
    (tmp_path / "words.json").unlink()
    exported = load_model(tmp_path / "out")
    np.testing.assert_array_equal(exported.tensors()["head"], model.tensors()["head"])
    assert sample(exported, ["w69001 w69002"], 8, Sampling(temperature=0)) == [text]
    (tmp_path / "out" / "tokenizer.json").unlink()
    refused(r"tokenizer\.json cannot be read", exported.tokenizer)
