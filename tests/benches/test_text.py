"""Tokenising is timed as ``jspeed prepare`` does it."""

from pathlib import Path


def test_tokenising_is_measured_beside_a_plain_loop(tmp_path: Path, gpt2_vocabulary: None, capsys):
    from benches.text import tokenise

    (tmp_path / "a.txt").write_text("One document of nine tokens, or so.\n" * 50)
    tokenise((tmp_path / "a.txt",), processes=1, rounds=1)
    assert "prepare.py, 1 process(es)" in capsys.readouterr().out
