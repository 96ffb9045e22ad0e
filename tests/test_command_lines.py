"""What command lines refuse before anything is compiled, and what their help says."""

import pytest

from jspeed.parallel.mesh import parse_mesh
from jspeed.run.find_recipe import find
from jspeed.run.options import Options

from .call_script import SCRIPTS, call


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["--mesh data=100000000", "devices"], ["--mesh", "data=100000000"]),
        (["--mesh data=1000", "at most 256"], ["--mesh", "data=1000"]),
        (["--mesh data=2,data=2", "twice"], ["--mesh", "data=2,data=2"]),
        (["--mesh ", "data=8"], ["--mesh", ""]),
        (
            ["--plan n=1000000000", "at most 1000 runs"],
            ["--plan", "n=1000000000,seeds=1..1000000000"],
        ),
        (
            ["--plan seeds=1..1000000000000", "at most 1000 runs"],
            ["--plan", "seeds=1..1000000000000"],
        ),
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
    done = call(tmp_path, "speedrun.py", *arguments)
    assert done.code == 2, done
    assert done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
    for word in words:
        assert word in done.err, done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--run-dir", "--data", "--init-from"])
def test_an_empty_path_is_not_the_current_folder(tmp_path, flag):
    done = call(tmp_path, "speedrun.py", flag, "")
    assert done.code == 2 and "an empty path; give a folder" in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--tokens", "--items"])
@pytest.mark.parametrize("count", [0, -1])
def test_evaluate_refuses_to_measure_nothing(tmp_path, flag, count):
    done = call(tmp_path, "evaluate.py", "here", flag, count)
    assert done.code == 2 and flag in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (
            "--data, --tokens, --accuracy would",
            "--hellaswag h.jsonl --data d --tokens 5 --accuracy",
        ),
        ("--tokens, --hellaswag would", "--tasks arc_easy --tokens 5 --hellaswag h.jsonl"),
        ("--items would have no effect", "--items 5"),
        ("--json no/f.json: there is no folder no", "--json no/f.json"),
    ],
)
def test_evaluate_refuses_what_would_have_no_effect(tmp_path, words, arguments):
    done = call(tmp_path, "evaluate.py", "here", *arguments.split())
    assert done.code == 2 and words in done.err and done.err.count("\n") == 1, done


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("cannot be accessed (File name too long)", ["sample.py", "x" * 5000]),
        ("cannot be accessed (File name too long)", ["leaderboard.py", "verify", "x" * 5000]),
        (
            "cannot be accessed (Too many levels of symbolic links)",
            ["leaderboard.py", "verify", "loop"],
        ),
        ("does not exist", ["launch.py", "x" * 5000]),
        ("does not exist", ["leaderboard.py", "compare", "x" * 5000 + ".py", "stdlib"]),
        ("no recipe '", ["leaderboard.py", "compare", "x" * 5000, "stdlib"]),
        (
            '--flags "\'": no closing quotation',
            ["leaderboard.py", "race", "stdlib", "stdlib", "--flags", "'"],
        ),
    ],
)
def test_words_that_the_system_refuses_are_a_sentence(tmp_path, words, arguments):
    """Path.exists() raises for names too long, and below a folder closed to search."""
    (tmp_path / "loop").symlink_to("loop")
    done = call(tmp_path, *arguments)
    assert done.code == 2 and words in done.err and done.err.count("\n") == 1, done


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("--number '1000000000'", "--number 1000000000"),
        ("--number '0'", "--number 0"),
        ("--tokens '0'", "--tokens 0"),
        ("holds more than 10,000,000 bytes", "--prompt-file /dev/zero"),
    ],
)
def test_sample_refuses_before_it_loads(tmp_path, words, arguments):
    done = call(tmp_path, "sample.py", "here", *arguments.split())
    assert done.code == 2 and words in done.err and done.err.count("\n") == 1, done


def test_plan_asks_for_the_folder_of_its_files_first(tmp_path):
    for flag in ("--json", "--svg", "--html"):
        done = call(tmp_path, "plan.py", "stdlib", flag, "no/file")
        assert done.code == 2
        assert done.err == f"error: {flag} no/file: there is no folder no; make it first\n"


def test_plan_refuses_what_a_recipe_says(tmp_path):
    done = call(tmp_path, "plan.py", "stdlib", "--no-compile", "--set", "EVAL_EVERY=0")
    assert done.code == 2 and "eval_every is 0" in done.err


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


def test_a_long_prompt_in_utf_8_is_called_long(tmp_path):
    # the byte after the limit is half a character
    (tmp_path / "long.txt").write_bytes("xé".encode() * 4_000_000)
    done = call(tmp_path, "sample.py", "here", "--prompt-file", "long.txt")
    assert done.code == 2 and "holds more than 10,000,000 bytes" in done.err


def test_export_looks_at_its_folder_before_it_loads(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    done = call(tmp_path, "export.py", "no_model", "--out", "out")
    assert done.code == 2 and "not empty" in done.err


def test_data_has_one_line_errors(tmp_path):
    for words in (["--nope"], [], ["here", "--verfy"]):
        done = call(tmp_path, "jspeed.data", *words)
        assert done.code == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1, done


def test_hidden_gpus_choose_the_recipe_for_cpus(tmp_path, monkeypatch):
    for visible, recipe in (("", "stdlib"), ("-1", "stdlib"), ("0", "r29")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert Options(data=tmp_path).recipe_or_default == recipe
