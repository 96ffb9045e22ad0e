"""jspeed.join: a program of one's own on several processes; what it gathers, prints and leaves, and
how it fails."""

import json
import textwrap
import time
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

import jspeed
from jspeed.cluster import distributed
from jspeed.cluster.join import Processes
from jspeed.cluster.rank import Rank

from ..multi_process import ended, environment, said, start
from .test_failure import Store


def test_a_single_process_has_nothing_to_join(monkeypatch, tmp_path, capsys):
    with jspeed.join() as processes:
        assert (processes.index, processes.count) == (0, 1)
        found = dict(
            loss=np.float32(1.5), of=jnp.arange(2), at=(np.int64(3), None), good=np.bool_(True)
        )
        assert processes.gather(found) == [
            {"loss": 1.5, "of": [0, 1], "at": [3, None], "good": True}
        ]
        processes.result({"loss": 1})
        monkeypatch.setenv("JSPEED_RESULT", str(tmp_path / "result"))
        processes.result({"loss": jnp.float32(2.5)})
        print("heard")
        with pytest.raises(TypeError, match="is no JSON: a set"):
            processes.gather({1, 2})
    assert json.loads((tmp_path / "result").read_text()) == {"loss": 2.5}
    assert capsys.readouterr().out == "heard\n"
    with pytest.raises(ZeroDivisionError), jspeed.join():
        1 / 0  # noqa: B018
    for code in (None, 3):
        with pytest.raises(SystemExit) as end, jspeed.join():
            raise SystemExit(code)
        assert end.value.code == code

    @jspeed.join()
    def decorated():
        return "done"

    assert decorated() == "done"


def test_half_of_a_launchers_variables_is_a_sentence(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as end, jspeed.join():
        pass
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: RANK, WORLD_SIZE set without MASTER_")


@pytest.fixture
def store(monkeypatch):
    """This is process 1 of 11, and the others have said in the store what they have."""
    store = Store()
    store.wait_at_barrier = lambda *_: None
    monkeypatch.setattr(distributed, "_rank", Rank(1, 11, "here:1"))
    monkeypatch.setattr(distributed, "client", lambda: store)
    monkeypatch.setattr(distributed, "_gathered", Counter())
    for number in [index for index in range(11) if index != 1]:
        for meeting in ("gather or end", "gather or end, time 2"):
            text = "[]" if "time 2" in meeting and number == 10 else json.dumps([number])
            store[f"jspeed/{meeting}/{number}"] = json.dumps(text)
    return store


def test_a_gather_that_others_leave_out_is_a_sentence(store):
    """Process 10, whose key comes before that of 2, is at the end of its block while the others
    gather once more."""
    processes = Processes(1, 11)
    assert processes.gather(np.int32(1)) == list(range(11))
    assert "at the end of jspeed.join() (process 10)" in said(lambda: processes.gather(1))


def test_a_gather_after_the_end_is_an_error():
    with pytest.raises(RuntimeError, match="has ended; call gather"):
        Processes(0, 2).gather(1)


# A sum over the devices of both processes, again and again, until WRONG on one of them.
SUMS = """
import sys
import jax, numpy as np, jspeed
from jax.sharding import AxisType, NamedSharding, PartitionSpec

@jax.jit
def total(parts):
    return parts.sum()

with jspeed.join() as processes:
    mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(AxisType.Auto,))
    parts = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("rows")), \
np.ones(4, np.float32))
    print("sum", float(total(parts)))
    sys.stderr.write("wrong soon\\n")  # in one write, so that no other thread comes between
    WRONG
    while True:
        float(total(parts))
"""
RAISES = 'if processes.index == 1: raise ValueError("no such layer")'


@pytest.mark.parametrize(
    ("wrong", "code", "line"),
    [
        (RAISES, 70, "error: process 1: ValueError: no such layer"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (RAISES.replace("1", "0"), 70, "error: process 0: ValueError: no such layer"),
                ("if processes.index == 1: sys.exit(3)", 3, "error: process 1: sys.exit(3)"),
                ("if processes.index == 0: sys.exit('no')", 1, "error: process 0: no"),
                ("if processes.index == 0: break_", 70, "error: process 0: NameError"),
                (
                    "if processes.index == 1: __import__('os')._exit(5)",
                    5,
                    "error: process 1 exited",
                ),
                (
                    "if processes.index: processes.gather(1)\n    break_",
                    70,
                    "error: process 0: Name",
                ),
            ]
        ),
    ],
)
def test_an_error_on_one_ends_both_within_a_collective(tmp_path, wrong, code, line):
    (tmp_path / "sums.py").write_text(textwrap.dedent(SUMS).replace("WRONG", wrong))
    before = time.monotonic()
    flags = "--standalone --nproc-per-node 2 --prefix --results results.json sums.py".split()
    ((got, out, err),) = ended([start(tmp_path, environment(), *flags, script="launch.py")], 60)
    assert time.monotonic() - before < 30
    assert got == code and out == "[rank 0] sum 8.0\n", out + err
    (told,) = [words for words in err.splitlines() if "error: " in words]
    # the other may end before it prints that
    assert told.startswith(f"[rank 0] {line}") and "wrong soon" in err
    assert err.count("Traceback") == (code == 70) and "***" not in err and "SIG" not in err
    assert [one["exit_code"] for one in json.loads((tmp_path / "results.json").read_text())][0] != 0
