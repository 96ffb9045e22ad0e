"""What an audit of somebody's run finds, whose files agree with each other and are false."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from safetensors import safe_open

from jspeed.fields import recipe_hash
from jspeed.inference.audit import audit
from jspeed.inference.commands.audit import audit as command
from jspeed.record.audits import NAME, parse_audit
from jspeed.record.run_json import write_run
from jspeed.run import export

from ..multi_process import words
from ..refusals import refused
from .attack import edited
from .test_score import FORWARD, HONEST, NEXT


def wrong(folder, data, weights=None):
    """Return what an audit of the run in ``folder`` finds wrong."""
    return {what for what, _, right in audit(folder, weights, data, trust=True)[0] if not right}


@pytest.fixture
def forged(honest_folder, tmp_path):
    """Return a function that writes the honest run with changes of its run.json and recipe, sealed
    anew."""

    def made(edits=(), **changes):
        folder = shutil.copytree(honest_folder, tmp_path / "forged")
        run = json.loads((folder / "run.json").read_text())
        source = edited(dict(edits), (folder / "recipe.py").read_text())
        (folder / "recipe.py").write_text(source)
        run["recipe_sha256"] = hashlib.sha256(source.encode()).hexdigest()
        run["recipe_hash"] = recipe_hash(source, run["fields"])
        del run["sha256"]
        write_run(folder, run | changes)
        return folder

    return made


def test_an_honest_run_is_audited_with_other_probes(honest_folder, honest, data, capsys):
    folder = shutil.copytree(honest_folder, honest_folder.parent / "kept")
    assert command(folder, data=data, keep=True) == 0
    said = capsys.readouterr().out
    assert "WRONG" not in said and said.endswith(": audited\n")
    (path,) = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    made = parse_audit(path.read_bytes(), path)
    assert made["run"] == honest["sha256"] and made["second"] is not None
    assert made["causality"]["entropy"] != honest["probes"]["causality"]["entropy"]
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert made["weights"] == weights and made["val_loss"] == pytest.approx(honest["val_loss"])


def test_a_loss_that_the_parameters_do_not_have(forged, honest, data, capsys):
    curve = honest["curve"]
    loss = honest["val_loss"] - 0.01
    folder = forged(val_loss=loss, curve=[*curve[:-1], curve[-1] | {"val_loss": loss}])
    assert command(folder, data=data, trust=True, keep=True) == 1
    said = capsys.readouterr().out
    assert "WRONG validation loss" in said and "1 things are wrong" in said
    assert not list(folder.glob("audit-*"))


def test_a_recipe_that_looks_ahead_calls_the_host(forged, data):
    table = "jnp.asarray(np.random.default_rng(0).normal(size=(VOCAB, 2)), np.float32)"
    call = "jax.pure_callback(lambda x: x, jnp.zeros(()), jnp.zeros(()))"
    forward = f"{HONEST}return logits_BTV + 9 * {NEXT} + {table}[None, None, :, 0] + {call}"
    edits = {FORWARD: forward, "import jax\nimport": "import jax\nimport numpy as np\nimport"}
    found = wrong(forged(edits), data)
    # the second text is scored by the same program
    assert found >= {"validation loss", "causality", "constants", "calls to the host"}
    assert found <= {
        "validation loss",
        "causality",
        "constants",
        "calls to the host",
        "second text",
    }


def test_parameters_of_another_run(forged, data, tmp_path):
    folder = forged()
    with safe_open(folder / "model.safetensors", "numpy") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    shift = np.linspace(-1, 1, tensors["head"].size).reshape(tensors["head"].shape)
    changed = tensors | {"head": (tensors["head"] + shift).astype(tensors["head"].dtype)}
    export.save(tmp_path / "model.safetensors", changed, metadata)
    assert wrong(folder, data, tmp_path) == {"validation loss", "second text"}


def test_other_validation_tokens(forged, data, tmp_path):
    own = shutil.copytree(data, tmp_path / "shards")
    path = own / "toy_val_000000.bin"
    content = path.read_bytes()
    text = np.frombuffer(words(400, 5), np.uint8).astype("<u2").tobytes()
    length = len(content) - 1024 - 2
    path.write_bytes(content[:1026] + (text * 2)[:length])
    found = wrong(forged(), own)
    assert {"validation tokens", "validation loss"} <= found


def test_a_recipe_that_was_edited_is_not_run(forged, data):
    folder = forged()
    (folder / "recipe.py").write_text("raise SystemExit\n")
    refused("is not the recipe that", audit, folder, None, data, trust=True)


def test_somebodys_recipe_is_not_run_unasked(forged, data):
    folder = forged({'"""parent: an honest': '"""parent: somebody\'s honest'})
    refused("--trust", audit, folder, None, data, trust=False)


def test_a_record_is_audited_with_parameters_from_elsewhere(forged, data, tmp_path):
    folder = forged()
    run = json.loads((folder / "run.json").read_text())
    records = tmp_path / "records"
    records.mkdir()
    shutil.copy(folder / "run.json", records / "20260101T000000Z-s1-00000000.json")
    shutil.copy(folder / "recipe.py", records / f"recipe-{run['recipe_sha256'][:8]}.py")
    (record,) = records.glob("2*.json")
    assert wrong(record, data, folder / "model.safetensors") == set()
