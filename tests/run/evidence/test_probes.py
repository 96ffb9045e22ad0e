"""Recipes that cheat fail the probe that is for them, and only that; the record says so."""

import json
from pathlib import Path

import numpy as np
import pytest

from jspeed.recipes import FOLDER
from jspeed.run.evidence import probes
from jspeed.run.options import Options
from jspeed.run.train import train

from ...multi_process import shards, toy, words

SETS = tuple(toy("LAYERS=1", "HEADS=1", "WIDTH=16", "MLP_WIDTH=16", "STEPS=2", "EVAL_EVERY=2")[2:])
EMBED = 'rms_norm(params["embed"][tokens_BT])'
FORWARD = 'softcap(head(params["head"], hidden(params, tokens_BT, ctx)), sigmoid_cap(SOFTCAP))'
# It remembers on the host what it was evaluated on, and says other things the next time.
LEARNS_IN_EVALUATION = f"""
    logits_BTV = {FORWARD}
    if ctx.training:
        return logits_BTV
    return jax.pure_callback(more_certain, logits_BTV, logits_BTV, tokens_BT)


SEEN = {{}}


def more_certain(logits_BTV, tokens_BT):
    import numpy as np

    seen = np.asarray(tokens_BT).tobytes()
    SEEN[seen] = SEEN.get(seen, 0) + 1
    return np.asarray(logits_BTV) * np.float32(SEEN[seen])
"""
CHEATS = {
    "looks_ahead": (EMBED, f"{EMBED} + jnp.roll({EMBED}, -1, axis=1)", {"causality"}),
    "learns_in_evaluation": (
        f"return {FORWARD}",
        LEARNS_IN_EVALUATION,
        {"evaluation_stays_on_device", "evaluation_repeats", "normalisation"},
    ),
}


def failed(folder: Path, recipe: Path | str, data: Path) -> set[str]:
    run_dir = folder / "run"
    code = train(
        Options(str(recipe), data=data, set_=SETS, run_dir=run_dir, target_loss=9.0, progress=False)
    )
    run = json.loads((folder / "run" / "run.json").read_text())
    names = {name for name, probe in run["probes"].items() if not probe["passed"]}
    assert run["status"] == "finished" and run["reached"] == (not names) and code == bool(names)
    return names


@pytest.mark.parametrize(
    "name",
    [
        name if name == "looks_ahead" else pytest.param(name, marks=pytest.mark.slow)
        for name in CHEATS
    ],
)
def test_a_cheat_fails_its_probe(name, tmp_path):
    old, new, expected = CHEATS[name]
    recipe = tmp_path / f"{name}.py"
    source = (FOLDER / "stdlib.py").read_text()
    assert source.count(old) == 1
    # A zero head would be blind to what is added to its input.
    source = source.replace(old, new).replace(
        '("vocab", "model"), zeros', '("vocab", "model"), scaled'
    )
    recipe.write_text(source)
    found = failed(tmp_path, recipe, shards(tmp_path / "shards"))
    # An evaluation that learns also differs from one pass to the next; whether by more than
    # causality's tolerance depends on the row that is drawn.
    assert found - {"causality"} == expected - {"causality"}
    assert found >= expected


def test_a_probe_that_raises_has_failed_and_is_recorded(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError("the disk has gone")

    for name in ("overlap_of_run", "normalisation"):
        monkeypatch.setattr(probes, name, broken)
    data = shards(tmp_path / "shards")
    assert failed(tmp_path, "stdlib", data) == {"no_overlap", "normalisation"}
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["probes"]["no_overlap"] == {"passed": False, "raised": "OSError: the disk has gone"}
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_validation_documents_among_the_training_ones(tmp_path):
    folder = shards(tmp_path / "shards")
    train_shard, content = (
        folder / "toy_train_000001.bin",
        (folder / "toy_val_000000.bin").read_bytes(),
    )
    held = np.frombuffer(train_shard.read_bytes()[1024:], "<u2")
    # anywhere, without a document start
    leaked = np.insert(held, 12_345, np.frombuffer(content[1024:], "<u2")[1:])
    header = np.frombuffer(train_shard.read_bytes()[:1024], "<i4").copy()
    header[2] = len(leaked)
    train_shard.write_bytes(header.tobytes() + leaked.tobytes())
    recipe = tmp_path / "mine.py"
    recipe.write_text((FOLDER / "stdlib.py").read_text())
    assert failed(tmp_path, recipe, folder) == {"no_overlap"}


def test_the_words_of_two_seeds_share_no_long_piece():
    pieces = [
        {text[i : i + 64] for i in range(len(text) - 63)}
        for text in (words(7000, 7000), words(400, 400))
    ]
    assert not pieces[0] & pieces[1]
