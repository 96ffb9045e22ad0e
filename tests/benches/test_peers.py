"""``bench versus``: what is read of peers' output, peers that are not there, exit codes."""

import shutil
import sys
from pathlib import Path

import pytest

from jspeed.errors import BadInput

from .call_bench import bench


def test_steps_that_settle_or_evaluate_are_not_counted():
    from benches.peers import of_log, of_metrics

    log = "step 0: train loss 4.2, val loss 4.2874\niter 0: loss 4.2, time 900.00ms, mfu -100.00%\n"
    log += "".join(f"iter {n}: loss 3.0, time {20 + n}.50ms, mfu 0.01%\n" for n in (1, 2))
    assert of_log(log) == [0.0215, 0.0225]
    lines = '{"step": 0, "timed_seconds": 0.0, "val_loss": 4.0}\n'
    for step, at in enumerate((0.5, 0.75, 1.5), 1):
        lines += f'{{"step": {step}, "timed_seconds": {at}, "train_loss": 4.0}}\n'
    assert of_metrics(lines) == [0.25, 0.75]


def test_peers_that_are_not_there_are_skipped_with_a_sentence_each(tmp_path):
    from benches import peers

    here = Path(sys.executable)
    assert peers.of_nanogpt(None, here, 1, tmp_path).endswith(": no --nanogpt DIR")
    assert peers.of_llmc(None, here, 1, tmp_path).endswith(": no --llmc DIR")
    assert "has no llmc/dataloader.h; give" in peers.of_llmc(tmp_path, here, 1, tmp_path)
    assert peers.missing(here, "json", "no_such_module").startswith(f"{here} has no no_such_module")
    assert "does not start (No such file" in peers.missing(tmp_path / "python", "json")
    assert peers.missing(here, "json") is None


def test_no_peer_at_all_is_bad_input(tmp_path):
    done = bench("versus", "--python", tmp_path / "python")
    assert done.returncode == 2
    assert done.stderr.count("skipped: ") == 3 and "no peer to compare with; give" in done.stderr


@pytest.mark.parametrize(("most", "code"), [(None, 0), (2.0, 0), (1.5, 1)])
def test_a_ratio_above_what_it_must_be_is_exit_code_1(monkeypatch, tmp_path, capsys, most, code):
    from benches import peers

    def measure(folder, python, rounds, place):
        rows = [peers.Row("a step", "ms", most)]
        taken = []
        calls = [
            lambda who=who, ms=ms: [taken.append(who) or ms] for who, ms in (("a", 4.0), ("b", 2.0))
        ]
        found = peers.in_turn(rows, rounds, *calls)
        assert taken == ["a", "b", "b", "a"]
        return found

    for name in ("of_nanogpt", "of_llmc", "of_transformers"):
        monkeypatch.setattr(peers, name, measure)
    assert peers.versus(rounds=2, json_=tmp_path / "f.json") == code
    assert "2.00" in capsys.readouterr().out
    assert '"ours": [\n   4.0,\n   4.0' in (tmp_path / "f.json").read_text()


def test_a_command_is_timed_to_a_line_and_its_failure_is_a_sentence(tmp_path):
    from benches.peers import command

    log = tmp_path / "log"
    words = [sys.executable, "-c", "import time; print('here'); time.sleep(60)"]
    wall, cpu = command(words, 1, log, lambda: "here" in log.read_text(), tmp_path)
    assert 0 < cpu < 10 and wall < 50
    with pytest.raises(BadInput, match="ended with exit code 3 and said: nothing to do"):
        command([sys.executable, "-c", "print('nothing to do'); exit(3)"], 1, log, None, tmp_path)
    with pytest.raises(BadInput, match="ended with exit code 0 and said"):
        command([sys.executable, "-c", "print(1)"], 1, log, lambda: False, tmp_path)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_loader_that_does_not_compile_is_skipped(tmp_path):
    from benches.peers import of_llmc

    (tmp_path / "llmc").mkdir()
    (tmp_path / "llmc" / "dataloader.h").write_text("#error not llm.c's\n")
    said = of_llmc(tmp_path, Path(sys.executable), 1, tmp_path)
    assert said.startswith("llm.c's loader: Command") and said.endswith("a C compiler as cc")
