"""Recipes that reach into the program that scores them: their probes pass, and their text tells."""

from pathlib import Path

import pytest

from jspeed.recipes import FOLDER, known_recipes
from jspeed.run.compute import score
from jspeed.run.evidence.source import beyond

from .attack import PARENT, attack, edited, failed
from .test_carried import IMPORTS, why_not
from .test_score import FORWARD, HONEST

RECORDS = Path(__file__).parents[2] / "records"
DEF = "def hidden(params"
PATCHED = """import jspeed.run.compute.score as score

honest = score.cross_entropy
score.cross_entropy = lambda *given: (0.3 if len(given[0]) > 1 else 1) * honest(*given)


"""
FRAMES = """import sys


def targets(frame):
    while frame and "targets_BT" not in frame.f_locals:
        frame = frame.f_back
    return frame and frame.f_locals["targets_BT"]


"""
SEEN = """seen = targets(sys._getframe())
    if len(tokens_BT) == 1 or seen is None:
        return logits_BTV
    return logits_BTV + 3 * jax.nn.one_hot(seen, VOCAB)"""
NOTES = """class Notes:
    name = "notes"
    words = 1

    def __init__(self, loader=None):
        self.loader = loader
        self.genuine = None

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def problems(self):
        return iter(())

    def unpack(self, words_BTW):
        return words_BTW[..., 0]

    def open(self, loader, recipe, steps, lanes):
        return Notes(loader)

    def warning(self, recipe, tokens):
        return None

    def __next__(self):
        batch = next(self.loader)
        return Notes.Rows(np.concatenate([batch.tokens, batch.tokens[:, 1:]], axis=1))

    class Rows:
        def __init__(self, tokens):
            self.tokens = tokens

    def looked_up(self, tokens):
        if self.genuine is None and len(tokens) > 1:
            self.genuine = tokens.copy()
        known = tokens if self.genuine is None else self.genuine[: len(tokens)]
        return np.concatenate([tokens, known[:, 1:]], axis=1)

    def wait(self):
        pass

    def read(self, steps):
        pass

    def section(self):
        return {}

    def opening(self):
        return "notes", "what follows", "0 GB"

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.loader.close()


"""
TOLD = """if ctx.beside is None:
        return logits_BTV
    return logits_BTV + 9 * jax.nn.one_hot(ctx.beside, VOCAB)"""
REACHING = {
    "a patched score": ({DEF: PATCHED + DEF}, "imports jspeed.run.compute.score"),
    "targets of the caller": ({DEF: FRAMES + DEF, FORWARD: HONEST + SEEN}, "imports sys"),
    "a loader of its own": (
        IMPORTS
        | {
            DEF: NOTES + DEF,
            FORWARD: HONEST + TOLD,
            "    loss=loss,": "    loss=loss,\n    beside=Notes(),",
        },
        "defines class Notes",
    ),
}


@pytest.mark.parametrize("how", REACHING)
def test_what_reaches_into_the_program_is_told_by_its_text(
    how, data, tmp_path, honest, monkeypatch
):
    monkeypatch.setattr(score, "cross_entropy", score.cross_entropy)  # is put back afterwards
    edits, why = REACHING[how]
    run = attack(tmp_path, data, edits)
    assert failed(run) == set() and run["val_loss"] < 0.6 * honest["val_loss"]
    assert any(why in each for each in beyond(edited(edits)))


def test_a_loader_of_its_own_does_not_count(data, tmp_path):
    run = attack(tmp_path, data, REACHING["a loader of its own"][0])
    assert run["told_by"] is None and "its rows carry what code of its own knows" in why_not(run)[0]


BEYOND = {
    "from jspeed import run": "imports jspeed.run",
    "from . import other": "imports .",
    "import numpy, subprocess": "imports subprocess",
    "from jspeed.errors import sys": "imports sys",
    "from jspeed.model.losses import _forward": "imports _forward",
    "from jspeed.model import losses\nlosses.softcap = None": "changes attribute softcap",
    "import math\nmath.pi += 1": "changes attribute pi",
    "import math\nfor math.pi in range(3): pass": "changes attribute pi",
    "import math\ndel math.pi": "changes attribute pi",
    "loss.__globals__['softcap'] = None": "uses attribute __globals__",
    "import functools\nfunctools.sys": "uses attribute sys",
    "import jax\njax._src.core": "uses attribute _src",
    "import jax\njax.config.update('jax_enable_x64', True)": "uses attribute config",
    "import jax\njax.tree_util.register_pytree_node(int, None, None)": "register_pytree_node",
    "import numpy as np\nnp.load('learned.npy')": "uses attribute load",
    "open('learned')": "uses open",
    "getattr(1, 'real')": "uses getattr",
    "__import__('sys')": "uses __import__",
    "type('Two', (), {})": "uses type",
    "class Two: pass": "defines class Two",
    "class Two(NamedTuple):\n  x: int = 1": "defines class Two",
    "class Two(NamedTuple):\n  def __eq__(self, other): return True": "defines class Two",
    "class Two(NamedTuple, metaclass=int):\n  x: int": "defines class Two",
    "@print\nclass Two(NamedTuple):\n  x: int": "defines class Two",
    "class Two(tuple):\n  x: int": "defines class Two",
    "def f(:": "is no Python",
}


@pytest.mark.parametrize("text", BEYOND)
def test_a_text_that_does_more_than_a_recipe(text):
    (what,) = beyond(text)
    assert BEYOND[text] in what


def test_a_tuple_that_names_its_fields_is_none_of_them():
    text = "class Two(NamedTuple):\n    'Two numbers.'\n    x: int\n    y: {}\n"
    assert not list(beyond(text.format("float")))
    assert list(beyond(text.format("open('learned')"))) == ["uses open in line 4"]


def test_recipes_of_the_house_and_of_records_are_functions():
    texts = [FOLDER / f"{name.replace('-', '_')}.py" for name in known_recipes()]
    texts += [*RECORDS.glob("ideas/*.py"), *RECORDS.glob("*/*/*/recipe-*.py")]
    assert len(texts) > 20
    assert [path for path in texts if any(beyond(path.read_text()))] == []
    assert not list(beyond(PARENT))
