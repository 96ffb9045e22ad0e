"""The second validation range: read after the first, evaluated once at the end, and of no effect on
the run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jspeed.record.run_json import read_run
from jspeed.run.hooks import Hooks
from jspeed.run.options import Options
from jspeed.run.train import train

from ..multi_process import TOY, shards

HEADER = 1024  # bytes


def run(folder: Path, data: Path, second: int | None = None) -> dict:
    """The record of three steps, with a second range from token ``second`` on."""
    options = Options(
        "stdlib",
        data=data,
        run_dir=folder,
        set_=(*TOY, "LAYERS=1", "STEPS=3"),
        progress=False,
        sample=False,
    )
    train(options, Hooks(second_range=lambda _: second))
    return read_run(folder)


def training(folder: Path) -> list[tuple]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["train_loss"]) for line in found if "train_loss" in line]


@pytest.mark.slow
def test_the_second_range_is_the_first_of_shards_from_there(tmp_path, capsys):
    """An oracle: the same training, validated on a shard without the tokens before ``first``."""
    data = shards(tmp_path / "data")
    without = run(tmp_path / "without", data)
    first, tokens = 1280, without["data"]["val_tokens"]
    assert "holdout" not in without and tokens == 256
    found = run(tmp_path / "with", data, first)
    assert training(tmp_path / "with") == training(tmp_path / "without")
    assert found["reached"] == without["reached"]
    losses = [[point["val_loss"] for point in each["curve"]] for each in (found, without)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    (entry,) = [entry for entry in found["ledger"] if entry["name"] == "second range"]
    after = found["ledger"][found["ledger"].index(entry) :]
    assert not any(each["timed"] for each in after), "it comes after the clock has stopped"

    shutil.copytree(data, tmp_path / "later")
    (val,) = (tmp_path / "later").glob("*_val_*.bin")
    content = val.read_bytes()
    header = np.frombuffer(content[:HEADER], "<i4").copy()
    header[2] -= first
    val.write_bytes(header.tobytes() + content[HEADER + 2 * first :])
    said = (
        "note: the validation shards end before token 1,280: the track's second range is not"
        " evaluated"
    )
    assert said not in capsys.readouterr().out
    later = run(tmp_path / "end", tmp_path / "later", first)
    assert "holdout" not in later and said in capsys.readouterr().out, (
        "what is left of the shard ends before"
    )
    expected = {"first": first, "tokens": tokens, "sha256": later["data"]["val_sha256"]}
    assert found["holdout"] == expected | {"val_loss": pytest.approx(later["val_loss"], abs=1e-6)}
