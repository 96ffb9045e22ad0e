"""A run of two processes equals the run of one; an error on one of them ends both with one
message."""

import json
import socket
import subprocess
import sys
import textwrap
from contextlib import suppress

import numpy as np
import pytest

from jspeed.cluster import distributed
from jspeed.cluster.rank import Rank
from jspeed.cluster.rendezvous import free_port
from jspeed.corpus.tokenise import Tokenising, prepare_text
from jspeed.data import TokenLoader, open_shards

from ..multi_process import (
    REPOSITORY,
    ended,
    environment,
    metrics,
    places,
    shards,
    start,
    toy,
    words,
)


@pytest.fixture
def data(tmp_path):
    return shards(tmp_path / "shards")


@pytest.mark.slow
def test_two_processes_of_four_devices_are_one_of_one(tmp_path, data):
    arguments = ["--data", data, "--steps", 10, *toy("EVAL_EVERY=5")]
    # where nobody answers
    proxies = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    two = [
        start(tmp_path, place, "--run-dir", "two", "--mesh", "data=8", *arguments)
        for place in places(2, **proxies)
    ]
    results = ended(two)
    assert [code for code, _, _ in results] == [0, 0], results
    assert "10/10" in results[0][1] and "nats/" in results[0][1] and not results[1][2]
    assert results[1][1] == "" and "[Gloo]" not in results[0][1]
    ((code, _, err),) = ended([start(tmp_path, environment(), "--run-dir", "one", *arguments)])
    assert code == 0, err
    for kind in ("train_loss", "val_loss"):
        one, several = metrics(tmp_path / "one", kind), metrics(tmp_path / "two", kind)
        assert one.keys() == several.keys()
        np.testing.assert_allclose(list(several.values()), list(one.values()), atol=1e-5)
    run = json.loads((tmp_path / "two" / "run.json").read_text())
    # eight devices take part; of a CPU, a process's are counted as the one that it is
    assert run["devices"]["processes"] == 2 and run["mesh"] == {"data": 8}
    assert run["devices"]["count"] == 2
    assert all(probe["passed"] for probe in run["probes"].values())


def ended_pair(tmp_path, source, pair, *words):
    """How a program of two processes ended."""
    command = [sys.executable, "-c", textwrap.dedent(source), *words]
    pipes = {"cwd": tmp_path, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return ended([subprocess.Popen(command, env=place, **pipes) for place in pair], 120)


# Joins, places the first batch of 64 lanes on 8 devices, and says what of it lies here.
PLACES = """
    import json, pathlib, sys
    from jspeed.cluster import distributed
    distributed.initialise()
    import jax
    from jspeed.data import TokenLoader, open_shards
    from jspeed.parallel.mesh import batch_lanes, make_mesh, put_lanes

    place = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    with TokenLoader(open_shards([pathlib.Path(sys.argv[1])]), lanes=64, lane_len=31, **place) as \
loader:
        batch = next(loader)
    array = put_lanes(batch.tokens, batch_lanes(make_mesh({"data": 8})))
    parts = {shard.index[0].start or 0: shard.data.tolist() for shard in array.addressable_shards}
    print(json.dumps({"local": batch.tokens.shape, "global": array.shape, "parts": parts}))
"""


@pytest.mark.slow
def test_a_batch_of_two_processes_is_that_of_one(tmp_path, data):
    """A global array (64, 32) of 8 shards (8, 32), which in a row are the batch of one process, bit
    for bit."""
    shard = data / "toy_train_000001.bin"
    results = ended_pair(tmp_path, PLACES, places(2, JAX_NUM_CPU_DEVICES=4), str(shard))
    assert [code for code, _, _ in results] == [0, 0], results
    told = [json.loads(out.splitlines()[-1]) for _, out, _ in results]
    assert all(each["global"] == [64, 32] and each["local"] == [32, 32] for each in told)
    parts = {int(start): part for each in told for start, part in each["parts"].items()}
    assert [len(each["parts"]) for each in told] == [4, 4]
    assert sorted(parts) == list(range(0, 64, 8))
    assert {np.shape(part) for part in parts.values()} == {(8, 32)}
    with TokenLoader(open_shards([shard]), lanes=64, lane_len=31) as loader:
        np.testing.assert_array_equal(
            np.concatenate([parts[start] for start in sorted(parts)]), next(loader).tokens
        )


JOINS = """
    from jspeed.cluster import distributed
    distributed.initialise()
    import jax
    print([sorted(distributed.gather("index", jax.process_index() + n)) for n in (0, 1)])
"""


def has_ipv6():
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.slow
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_two_processes_join_over_ipv6(tmp_path):
    """torchrun's form of the address, without brackets: for rendezvous and JAX's service."""
    pair = [place | {"MASTER_ADDR": "::1", "JSPEED_WAIT_SECONDS": "30"} for place in places(2)]
    results = ended_pair(tmp_path, JOINS, pair)
    assert [(code, out.splitlines()[-1:]) for code, out, _ in results] == [
        (0, ["[[0, 1], [1, 2]]"])
    ] * 2, results


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "1", True),
        ("WORLD_SIZE", "2", True),
        ("RANK", "0", False),
        ("WORLD_SIZE", "1", False),
    ],
)
def test_one_variable_beside_a_launcher_of_one_process_is_noted(
    name, value, said, monkeypatch, capsys
):
    monkeypatch.setattr(distributed, "_rank", None)
    for part, its in {"RANK": "0", "SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{part}", its)
    monkeypatch.setenv(name, value)
    distributed.initialise()
    wanted = f"note: {name} is {value} but a launcher's other variables are not set: this process"
    assert capsys.readouterr().err == f"{wanted} runs alone\n" * said


def test_a_process_that_srun_did_not_start_says_that_it_is_alone(monkeypatch, capsys):
    monkeypatch.setattr(distributed, "_rank", None)
    for name, value in dict(
        SLURM_JOB_ID="7", SLURM_NTASKS="4", SLURM_PROCID="0", SLURM_LOCALID="0"
    ).items():
        monkeypatch.setenv(name, value)
    distributed.initialise()
    assert "one of the 4 tasks of Slurm's job: it runs alone\n" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_NTASKS", "1")
    distributed.initialise()
    assert distributed.single_process() and not capsys.readouterr().err


def test_joining_again_does_nothing(monkeypatch):
    """Neither by other flags nor by half of a launcher's variables, which would be bad input the
    first time."""
    monkeypatch.setattr(distributed, "_rank", Rank(1, 2, "here:1"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    distributed.initialise("there:2", 4, 3)
    assert distributed._rank == Rank(1, 2, "here:1") and not distributed.connections


@pytest.mark.slow
def test_launch_gathers_the_result_of_every_process(tmp_path):
    (tmp_path / "text.txt").write_bytes(words(8000, 0))
    data = prepare_text([tmp_path / "text.txt"], tmp_path / "data", Tokenising("bytes"))
    line = "--standalone --nproc-per-node 2 --results results.json".split()
    line += [REPOSITORY / "scripts/speedrun.py", "--data", data, "--steps", 4, "--run-dir", "run"]
    line += toy()[1:]
    ((code, out, err),) = ended([start(tmp_path, environment(), *line, script="launch.py")])
    assert code == 0, err
    first, second = json.loads((tmp_path / "results.json").read_text())
    assert (first["rank"], second["rank"], first["exit_code"], second["exit_code"]) == (0, 1, 0, 0)
    assert first["train_loss"] == second["train_loss"] == metrics(tmp_path / "run")[4]
    assert first["val_loss"] == second["val_loss"] and first["steps"] == 4
    assert first["status"] == "stopped"
    assert first["samples"] == (tmp_path / "run/samples.txt").read_text()
    assert "samples" not in second
    assert out.count("nats/") == 1


@pytest.mark.slow
def test_an_error_on_one_process_ends_both_with_its_sentence(tmp_path, data):
    """Another seed on process 1; and the data folder missing on process 1 only. Nothing is left
    behind."""
    for lines, word in [
        (["--seed", "2", "--data", data], "seed is 2 here but 1 on"),
        (["--data", "lost"], "lost"),
    ]:
        first, second = places(2)
        pair = [
            start(tmp_path, first, "--run-dir", "run", "--data", data, *toy()),
            start(tmp_path, second, "--run-dir", "run", *lines, *toy()),
        ]
        results = ended(pair, 60)
        assert [code for code, _, _ in results] == [2, 2], results
        errors = results[0][2] + results[1][2]
        assert errors.startswith("error: process 1: ") and errors.count("\n") == 1
        assert word in errors
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_nobody_at_the_coordinator_is_a_sentence_in_time(tmp_path):
    port = free_port()
    flags = ["--coordinator", f"127.0.0.1:{port}", "--processes", 2, "--process-id"]
    for index in (0, 1):
        ((code, _, err),) = ended(
            [start(tmp_path, environment(JSPEED_WAIT_SECONDS=2), *flags, index)], 60
        )
        assert (
            code == 2 and "waited 2 s" in err and err.startswith("error: ") and err.count("\n") == 1
        ), err
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", port))
        other.listen()
        ((code, _, err),) = ended([start(tmp_path, environment(), *flags, 0)], 60)
    assert code == 2 and str(port) in err and err.startswith("error: ") and err.count("\n") == 1, (
        err
    )
