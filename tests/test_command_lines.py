"""What command lines refuse before anything is compiled, and what their help says."""

import shlex

import pytest

from jspeed.parallel.mesh import parse_mesh
from jspeed.run.find_recipe import find
from jspeed.run.options import Options

from .call_script import SCRIPTS, call


def refuses(folder, *line, words):
    """A command line must end in one sentence, which has these words."""
    done = call(folder, *line)
    assert done.code == 2, done
    assert done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
    for word in words:
        assert word in done.err, done.err


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["stdlbi", "did you mean 'stdlib'"], ["stdlbi"]),
        (["mine.py", "does not exist"], ["mine.py"]),
        (["WIDHT", "did you mean 'WIDTH'"], ["--set", "WIDHT=3"]),
        (["WIDTH=wide", "whole number"], ["--set", "WIDTH=wide"]),
        (["nowhere", "jspeed prepare"], ["--data", "nowhere"]),
        (["2048 tokens", "100"], ["--micro-batch", "100"]),
        (["--layout tpp", "dp"], ["--layout", "tpp"]),
        (["--steps", "0"], ["--steps", "0"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["fineweb", "--data DIR"], ["fineweb-cpu"]),
        (["--mesh data=100000000", "devices"], ["--mesh", "data=100000000"]),
        (["--mesh data=1000", "at most 256"], ["--mesh", "data=1000"]),
        (["--mesh data=2,data=2", "twice"], ["--mesh", "data=2,data=2"]),
        (["--mesh ", "data=8"], ["--mesh", ""]),
        (["--plan n=1001", "at most 1000 runs"], ["--plan", "n=1001"]),
        (["--plan ", "such as n=4"], ["--plan", ""]),
        (["--target-loss", "a finite number"], ["--target-loss", "nan"]),
        (["--target-loss", "a finite number"], ["--target-loss", "inf"]),
        (["--max-minutes", "above 0"], ["--max-minutes", "nan"]),
        (["--max-minutes", "above 0"], ["--max-minutes", "0"]),
        (["--checkpoint-every", "from 0"], ["--checkpoint-every", "-1"]),
        (["--attention nope", "xla"], ["--attention", "nope"]),
        (["--log  is unknown"], ["--log", ""]),
        (["recipe '' is unknown", "stdlib"], [""]),
        (["eval_every is 0"], ["--set", "EVAL_EVERY=0"]),
        (["--set LANES", "no value", "LANES=VALUE (now 16)"], ["--set", "LANES"]),
    ],
)
def test_speedrun_refuses(tmp_path, words, arguments):
    refuses(tmp_path, "speedrun.py", *arguments, words=words)
    assert not list(tmp_path.iterdir())


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("word", "line"),
    [
        *(
            ("an empty path; give a folder", f"speedrun.py {flag} ''")
            for flag in ("--run-dir", "--data", "--init-from")
        ),
        *(
            (flag, f"evaluate.py here {flag} {count}")
            for flag in ("--tokens", "--items")
            for count in (0, -1)
        ),
        (
            "--data, --tokens, --accuracy would",
            "evaluate.py here --hellaswag h.jsonl --data d --tokens 5 --accuracy",
        ),
        (
            "--tokens, --hellaswag would",
            "evaluate.py here --tasks arc_easy --tokens 5 --hellaswag h.jsonl",
        ),
        ("--items would have no effect", "evaluate.py here --items 5"),
        ("--json no/f.json: there is no folder no", "evaluate.py here --json no/f.json"),
        # Path.exists() raises for names too long, and below a folder closed to search.
        ("cannot be accessed (File name too long)", f"sample.py {LONG}"),
        ("cannot be accessed (File name too long)", f"leaderboard.py verify {LONG}"),
        ("accessed (Too many levels of symbolic links)", "leaderboard.py verify loop"),
        ("does not exist", f"launch.py {LONG}"),
        ("does not exist", f"leaderboard.py compare {LONG}.py stdlib"),
        ("no recipe '", f"leaderboard.py compare {LONG} stdlib"),
        ('--flags "\'": no closing quotation', 'leaderboard.py race stdlib stdlib --flags "\'"'),
        # Before a model is loaded.
        ("--number '1000000000'", "sample.py here --number 1000000000"),
        ("--number '0'", "sample.py here --number 0"),
        ("--tokens '0'", "sample.py here --tokens 0"),
        ("holds more than 10,000,000 bytes", "sample.py here --prompt-file /dev/zero"),
        ("holds more than 10,000,000 bytes", "sample.py here --prompt-file long.txt"),
        ("not empty", "export.py no_model --out out"),
        *(
            (f"{flag} no/file: there is no folder no; make it", f"plan.py stdlib {flag} no/file")
            for flag in ("--json", "--svg", "--html")
        ),
        ("eval_every is 0", "plan.py stdlib --no-compile --set EVAL_EVERY=0"),
        *(("error: ", f"jspeed.data {line}") for line in ("--nope", "", "here --verfy")),
    ],
)
def test_other_commands_refuse(tmp_path, word, line):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    # the byte after the limit is half a character
    (tmp_path / "long.txt").write_bytes("xé".encode() * 4_000_000)
    refuses(tmp_path, *shlex.split(line), words=[word])


def test_help(tmp_path):
    recipes = call(tmp_path, "speedrun.py", "--help")
    assert recipes.code == 0 and "shakespeare-char" in recipes.out and "--no-sample" in recipes.out
    evaluate = call(tmp_path, "evaluate.py", "--help")
    assert evaluate.code == 0 and "hellaswag_val.jsonl, or download" in evaluate.out
    launch = call(tmp_path, "launch.py", "--help")
    assert launch.code == 0 and "--standalone, --no-standalone" in launch.out
    assert "--node-rank R " in launch.out


def test_a_recipe_is_printed_to_be_copied(tmp_path):
    done = call(tmp_path, "speedrun.py", "shakespeare-char", "--show-recipe")
    assert done.code == 0 and done.out == find("shakespeare-char", trace=False).path.read_text()
    (tmp_path / "mine.py").write_text(done.out)
    assert call(tmp_path, "speedrun.py", "mine.py", "--show-recipe").out == done.out
    wrong = call(tmp_path, "speedrun.py", "shakespear-char", "--show-recipe")
    assert wrong.code == 2 and "shakespeare-char" in wrong.err and not wrong.out


def test_the_meshes_of_the_quick_start_fit_its_recipe():
    """What the layout of tp needs besides what load_recipe_and_placement checks: heads that the
    model axis divides."""
    page = (SCRIPTS.parent / "docs" / "start.md").read_text()
    lines = [
        line.partition("#")[0].split()[2:]
        for line in page.splitlines()
        if "jspeed run --mesh" in line
    ]
    assert len(lines) == 2
    found = find("stdlib")
    for arguments in lines:
        axes = parse_mesh(arguments[arguments.index("--mesh") + 1])
        assert found.recipe.lanes % axes["data"] == 0
        assert found.fields["HEADS"] % axes.get("model", 1) == 0


def test_hidden_gpus_choose_the_recipe_for_cpus(tmp_path, monkeypatch):
    for visible, recipe in (("", "stdlib"), ("-1", "stdlib"), ("0", "r29")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert Options(data=tmp_path).recipe_or_default == recipe
