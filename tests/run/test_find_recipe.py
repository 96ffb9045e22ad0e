"""Recipes found by name or path, and fields set from the command line."""

import hashlib
import os
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from jspeed.board.records.remarks import RECORDS, name_clash
from jspeed.errors import Terminated
from jspeed.inference.model_config import same_function
from jspeed.recipes import FOLDER
from jspeed.run.clock import Clock
from jspeed.run.find_recipe import find
from jspeed.run.options import Options
from jspeed.run.setup import set_up

from ..data.on_disk import shard_bytes
from ..refusals import refused
from ..toys import TOYS


def test_a_copied_and_edited_file_runs_from_anywhere(tmp_path: Path):
    source = (FOLDER / "stdlib.py").read_text()
    copy = tmp_path / "mine.py"
    copy.write_text(re.sub(r"^WIDTH = .*$", "WIDTH = 96", source, flags=re.MULTILINE))
    mine, original = find(str(copy)), find("stdlib")
    assert mine.recipe.parameters["up"].shape[1] == 96
    assert mine.hash != original.hash
    copy.write_text(source)
    assert find(str(copy)).hash == original.hash


def edited(tmp_path: Path, *changes: tuple[str, str]) -> str:
    """The path of a copy of stdlib with lines changed."""
    source = (FOLDER / "stdlib.py").read_text()
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    path = tmp_path / "mine.py"
    path.write_text(source)
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("LANES = 16", "LANES = 64.0", "lanes is 64.0"),
        ('name="stdlib",', "name=7,", "name is 7"),
        ('name="stdlib",', 'name="../../evil",', "name is '../../evil'"),
        ("TARGET_LOSS = 1.4", 'TARGET_LOSS = float("nan")', "target_loss is nan"),
        ("TARGET_LOSS = 1.4", "TARGET_LOSS = 1e999", "target_loss is inf"),
        ("by_group = {", "import sys; sys.exit(0)\n    by_group = {", "ends the program at line 1"),
        ("optimizer=optimizer", "optimizer=list", "mine.py fails with AttributeError"),
        ('"blocks": muon', '"bloks": muon', "fails with ValueError: .*'bloks'"),
        ("forward=forward", "forward=lambda params, tokens, ctx: nothing", "mine.py .*NameError"),
        ("forward=forward", "forward=lambda params, tokens, ctx: tokens[0]", "forward returns"),
    ],
)
def test_refuses_what_a_copy_says(tmp_path: Path, old, new, words):
    said = refused(words, find, edited(tmp_path, (old, new)))
    assert "line ?" not in said


def test_a_run_traces_its_loss_once_and_a_faulty_one_is_said(tmp_path: Path, capsys):
    """Nothing is traced to be checked before it compiles; what a trace raises is the recipe's."""
    data, cap = tmp_path / "data", "    cap = sigmoid_cap(SOFTCAP)"
    data.mkdir()
    for name in ("t_train_000.bin", "t_val_000.bin"):
        (data / name).write_bytes(shard_bytes(np.arange(4000) % 256))

    def start(*changes: tuple[str, str]) -> None:
        how = dict(data=data, run_dir=tmp_path / "run", set_=(*TOYS["stdlib"], "EVAL_TOKENS=64"))
        set_up(Options(edited(tmp_path, *changes), **how), Clock(), Console()).directory.abandon()

    refused("mine.py fails at line .* NameError", start, (cap, cap.replace("CAP", "CAPS")))
    refused("fails with ValueError: .*'bloks'", start, ('"blocks": muon', '"bloks": muon'))
    refused(
        "loss returns shapes",
        start,
        ("    return cross_entropy(head, ", "    return x_BTD, x_BTD  # ("),
    )
    assert not (tmp_path / "run").exists()
    start((cap, f"    print('traced')\n{cap}"))
    assert capsys.readouterr().out.count("traced") == 1


def test_what_json_cannot_hold_is_no_field(tmp_path: Path):
    more = "STEPS = 250\nBYTES = b'x'\nNO_CAP = 1e999\nMANY = {1, 2}"
    found = find(edited(tmp_path, ("STEPS = 250", more)))
    assert found.hash and not {"BYTES", "NO_CAP", "MANY"} & found.fields.keys()


def test_an_edited_copy_with_its_parents_name_is_said(tmp_path: Path):
    def note(found):
        sha = hashlib.sha256(found.source.encode()).hexdigest()
        return name_clash(found.recipe.name, found.recipe.track, sha, tmp_path)

    assert note(find("stdlib", ["STEPS=3"])) is None and note(find(edited(tmp_path))) is None
    assert "a different source is named 'stdlib' too" in note(
        find(edited(tmp_path, ("STEPS = 250", "STEPS = 251")))
    )
    assert note(find(edited(tmp_path, ('name="stdlib"', 'name="mine"')))) is None


def test_a_signal_while_a_recipe_is_read_is_no_fault_of_it(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text("from jspeed.errors import Terminated\n\nraise Terminated(143)\n")
    with pytest.raises(Terminated):
        find(str(path))


def test_a_name_that_is_not_utf8(tmp_path: Path):
    """XLA ended with std::bad_cast when it met the name."""
    path = tmp_path / os.fsdecode(b"caf\xe9.py")
    path.write_text(
        (FOLDER / "stdlib.py").read_text() + "\n\n@jax.jit\ndef sine(x):\n    return jnp.sin(x)\n"
    )
    find(str(path)).recipe.forward.__globals__["sine"].lower(1.0)
    path.write_text("x = 1\nx.y\n")
    refused("fails at line 2 with AttributeError", find, str(path))


def test_set_reaches_everything_derived():
    found = find("stdlib", ["width=64", "HEADS=2", "MUON_LR=1"])
    assert found.recipe.parameters["query"].shape[1:] == (64, 64)
    assert found.overrides == {"WIDTH": 64, "HEADS": 2, "MUON_LR": 1.0}
    assert found.fields["WIDTH"] == 64 and found.fields["HEADS"] == 2


@pytest.mark.parametrize(
    ("name", "sets", "words"),
    [
        ("stdlb", (), "did you mean 'stdlib'"),
        ("fineweb_cpu", (), "did you mean 'fineweb-cpu'"),
        ("none.py", (), "does not exist"),
        ("stdlib", ("WIDHT=3",), "did you mean 'WIDTH'"),
        ("stdlib", ("0\n0=0",), r"has no field '0\\n0'; known: "),
        ("", (), "recipe '' is unknown; known recipes"),
        ("x/" + "y" * 5000, (), "does not exist"),
        ("stdlib", ("WIDTH",), r"--set WIDTH: there is no value; write WIDTH=VALUE \(now 192\)"),
        ("stdlib", ("WIDTH=",), "is a whole number .now 192., found ''; give a whole number"),
        ("stdlib", ("WIDTH=wide",), "is a whole number .now 192., found 'wide'"),
        ("stdlib", ("WIDTH=1.5",), "found '1.5'; give a whole number"),
        ("stdlib", ("WIDTH=True",), "found 'True'"),
        ("stdlib", ("MUON_LR=1e999",), "is a finite number .now 0.035., found '1e999'"),
        ("stdlib", ("MUON_LR=nan",), "found 'nan'"),
        ("stdlib", ("WIDTH={[]: 1}",), "found '{.]: 1}'"),
        ("stdlib", ("WIDTH=" + "(" * 500,), "give a whole number"),
        ("stdlib", ("WIDTH=0x" + "f" * 5000,), "give a whole number"),
        ("stdlib", ("HEADS=0",), "fails at line"),
        ("stdlib", ("EVAL_EVERY=0",), "eval_every is 0"),
        ("stdlib", ("EVAL_EVERY=-3",), "eval_every is -3"),
        ("stdlib", ("LAYERS=1000000000",), "layers is 1000000000"),
    ],
)
def test_refuses(name, sets, words):
    refused(words, find, name, sets)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "defines no RECIPE"),
        ("RECIPE = 1\n", "defines no RECIPE"),
        ("def\n", "cannot be read as Python"),
        ("import nothing_like_this\n", "fails at line 1 with ModuleNotFoundError"),
        ("import sys\n\nsys.exit(0)\n", r"ends the program at line 3 by sys.exit\(0\)"),
        ("raise GeneratorExit\n", "fails at line 1 with GeneratorExit"),
        ("return\n", r"cannot be read as Python: SyntaxError: 'return' outside function .* line 1"),
        ("x = '\0'\n", "cannot be read as Python"),
        ("A = {[1]: 2}\n", "fails at line 1 with TypeError"),
    ],
)
def test_refuses_files(tmp_path: Path, text, words):
    path = tmp_path / "mine.py"
    path.write_text(text)
    refused(words, find, str(path))


def test_recipes_that_compute_the_same_are_told_from_others(tmp_path: Path):
    """Whatever is about training alone is no difference; heads, of which parameters say nothing,
    are one."""
    toy = find("stdlib", TOYS["stdlib"]).recipe
    for sets, same in (
        (["MUON_LR=0.5", "LANES=16", "STEPS=3", "LANE_LEN=64"], True),
        (["HEADS=1"], False),
        (["SOFTCAP=20.0"], False),
    ):
        assert same_function(find("stdlib", [*TOYS["stdlib"], *sets]).recipe, toy) == same, sets
    assert same_function(
        find(str(RECORDS / "ideas" / "stdlib_adamw.py"), TOYS["stdlib"]).recipe, toy
    )
