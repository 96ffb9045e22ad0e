"""Saved tables go on with the same bits, also after a kill; files that were changed are refused."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspeed.errors import BadInput
from jspeed.host_table import RowTable, checkpoint, load, save

RATES = {"learning_rate": 0.02, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.5}
ROWS, WIDTH = 500, 24


def train(table, until):
    """Updates from where the table stands, each with rows and gradients of its own."""
    while table.updates < until:
        rng = np.random.default_rng(table.updates)
        rows = rng.integers(0, ROWS, 60)
        gradients = rng.standard_normal((60, WIDTH), np.float32)
        table.update(table.updates, rows, gradients, **RATES)
    return table


def everything(table):
    part = table.read(0, ROWS)
    arrays = (part.rows, part.weights, part.squares, part.updates, table.betas)
    return [array.tobytes() for array in arrays]


@pytest.mark.parametrize("piece", [1, 7 * 2 * WIDTH, 2**26])
def test_a_loaded_table_goes_on_with_the_same_bits(piece, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PIECE", piece)
    table = train(RowTable(ROWS, WIDTH, capacity=ROWS - 1), 3)
    save(table, tmp_path / "a")
    copy = load(tmp_path / "a", threads=1)
    assert everything(copy) == everything(table) and copy.capacity == ROWS - 1
    assert everything(train(copy, 6)) == everything(train(table, 6))


def test_an_empty_table_is_saved_too(tmp_path):
    save(RowTable(ROWS, WIDTH), tmp_path / "a")
    found = load(tmp_path / "a", capacity=9)
    assert (found.used, found.updates, found.capacity, found.num_rows) == (0, 0, 9, ROWS)


def test_the_file_is_one_of_safetensors(tmp_path):
    table = train(RowTable(ROWS, WIDTH), 3)
    save(table, tmp_path / "a")
    found, part = load_file(tmp_path / "a"), table.read(0, ROWS)
    assert found["weights"].dtype == ml_dtypes.bfloat16
    for name in ("rows", "weights", "squares", "updates"):
        assert found[name].tobytes() == getattr(part, name).tobytes()
    assert (found["betas"] == table.betas).all()


def refused(words, call):
    with pytest.raises(BadInput) as error:
        call()
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_a_file_that_was_changed_is_refused(tmp_path):
    path = tmp_path / "a"
    save(train(RowTable(ROWS, WIDTH), 3), path)
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    ends = json.loads(whole[8:start])
    for name in ("rows", "weights", "squares", "updates", "betas"):
        at = start + ends[name]["data_offsets"][1] - 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(BadInput):  # by the hash, or by what cannot be
            load(path)
    at = start + ends["weights"]["data_offsets"][0]
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    refused(["changed", "weights"], lambda: load(path))
    path.write_bytes(whole[:-1])
    refused(["bytes but has"], lambda: load(path))
    for content in (b"", b"{}", whole[:100], b"\xff" * 200):
        path.write_bytes(content)
        refused(["no table"], lambda: load(path))
    save_file({"rows": np.zeros(3)}, path)
    refused(["no table"], lambda: load(path))
    refused(["cannot be read"], lambda: load(tmp_path / "nowhere"))
    refused(["capacity", "larger"], lambda: load(_again(path, whole), capacity=3))


def _again(path, content):
    path.write_bytes(content)
    return path


def test_an_update_meanwhile_leaves_the_old_file(tmp_path):
    table = train(RowTable(ROWS, WIDTH), 2)
    save(table, tmp_path / "a")
    before = (tmp_path / "a").read_bytes()

    class Changing:
        def __getattr__(self, name):
            return getattr(table, name)

        def read(self, first, count):
            train(table, table.updates + 1)
            return table.read(first, count)

    refused(["update 3", "after 2"], lambda: save(Changing(), tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


KILLED = """
    import sys
    from pathlib import Path
    import numpy as np
    from jspeed.host_table import RowTable, load, save
    sys.path.insert(0, sys.argv[2])
    from test_checkpoint import ROWS, WIDTH, train
    path = Path(sys.argv[1])
    table = load(path) if path.exists() else RowTable(ROWS, WIDTH)
    while True:
        save(train(table, table.updates + 1), path)
        print(table.updates, flush=True)
"""


def test_a_killed_program_goes_on_from_its_last_file(tmp_path):
    path, here = tmp_path / "a", os.path.dirname(__file__)
    for _ in range(3):
        words = [sys.executable, "-c", textwrap.dedent(KILLED), str(path), here]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as program:
            for _ in range(5):
                program.stdout.readline()
            program.send_signal(signal.SIGKILL)
    table = load(path)
    assert table.updates >= 15
    assert everything(table) == everything(train(RowTable(ROWS, WIDTH), table.updates))
