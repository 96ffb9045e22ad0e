"""The end of a run: its record first, its picture last, and what could not be written is said."""

import errno
import json
import os
import tempfile

import pytest

from jspeed.record.runfile import read_run
from jspeed.run.setup import Options
from jspeed.run.train import train

from ..several import TOY, said, shards


@pytest.fixture
def full_for(monkeypatch: pytest.MonkeyPatch):
    """Have no room for files of these names; returns the names asked for, in order."""
    real, asked = tempfile.mkstemp, []

    def fix(*names: str) -> list[str]:
        def mkstemp(*arguments, prefix="", **more):
            asked.append(prefix.strip("."))
            if asked[-1] in names:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, prefix=prefix, **more)

        monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
        return asked

    return fix


def test_the_record_is_written_though_model_and_picture_are_not(tmp_path, full_for, capsys):
    data, run_dir, told = shards(tmp_path / "shards"), tmp_path / "run", []
    options = Options("stdlib", data=data, run_dir=run_dir, sets=(*TOY, "STEPS=3"), target_loss=9.0, progress=False)
    asked = full_for("model.safetensors", "loss.svg")
    sentence = said(lambda: train(options, told.append))
    assert asked[-3:] == ["run.json", "model.safetensors", "loss.svg"]
    for name in asked[-2:]:
        assert f"{run_dir / name} cannot be written (No space left on device)" in sentence
    run = read_run(run_dir)
    assert run["status"] == "finished" and run["reached"] and not told
    assert sorted(path.name for path in run_dir.iterdir()) == ["config.json", "metrics.jsonl", "recipe.py", "run.json"]
    out = capsys.readouterr().out.splitlines()
    assert any(line.endswith("run: run.json, metrics.jsonl") for line in out)
    assert out[-1].startswith(f"{run['val_loss']:.4f} nats/")

    # Work that prints nothing itself says how long it takes.
    for words in ("compiling ...", "warming up ...", "final evaluation ...", "validity probes ...", "evidence"):
        (line,) = [line for line in out if line.startswith(words)]
        assert line.endswith(" s"), line

    # Without room for the record itself the result is still said, and the model kept.
    again = Options(**vars(options) | {"run_dir": tmp_path / "again", "sets": (*TOY, "STEPS=3")})
    full_for("run.json")
    assert f"{tmp_path / 'again' / 'run.json'} cannot be written" in said(lambda: train(again, told.append))
    assert (tmp_path / "again" / "model.safetensors").exists() and (tmp_path / "again" / "loss.svg").exists()
    assert " nats/token <= 9.0 in" in capsys.readouterr().out
    assert json.loads((tmp_path / "again" / "config.json").read_text())["recipe"] == "stdlib" and not told
