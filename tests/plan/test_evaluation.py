"""The evaluation of a small recipe, compiled for this CPU and priced for H100s; and how many a run
makes, counted."""

import io
import json

import pytest
from rich.console import Console

from jspeed.fields import check_json
from jspeed.plan.describe import describe_evaluation
from jspeed.plan.schema import EvaluationPlan
from jspeed.plan.views import terminal
from jspeed.run import train
from jspeed.run.compute import program
from jspeed.run.evidence.probes import evaluations_after

from ..attacks.attack import attack
from ..multi_process import shards
from .test_plan import FOUND, placement_here


def test_an_evaluation_is_priced_and_counted():
    recipe = FOUND.recipe
    found = describe_evaluation(recipe, placement_here())
    assert json.loads(json.dumps(found)) == found  # all of it is plain
    check_json(found, EvaluationPlan)
    assert found["tokens"] == recipe.eval_tokens and found["fits"]
    one, at_most = found["seconds"]
    assert 0 < one <= at_most
    assert found["seconds_after_the_clock"][0] == pytest.approx(found["after_the_clock"] * one)
    console = Console(file=io.StringIO(), width=200)
    terminal.print_evaluation(found, console)
    said = console.file.getvalue()
    assert f"{recipe.eval_tokens:,} tokens" in said
    assert f"a run makes {found['after_the_clock']}:" in said


class Counting:
    """A compiled evaluation that counts its calls."""

    def __init__(self, compiled):
        self.compiled = compiled
        self.calls = 0

    def __call__(self, *given):
        self.calls += 1
        return self.compiled(*given)

    def __getattr__(self, name):
        return getattr(self.compiled, name)


def test_a_run_makes_as_many_after_its_clock_as_the_plan_says(tmp_path, monkeypatch):
    """The honest parent of the attacks: its 8 rows have 8 passes of causality."""
    compile_evaluation = program.compile_evaluation
    counting = []
    before = []

    def compiled(*given, **named):
        padded, evaluation = compile_evaluation(*given, **named)
        counting.append(Counting(evaluation))
        return padded, counting[-1]

    finish = train.finish

    def at_the_end(*given):
        before.append(sum(each.calls for each in counting))
        return finish(*given)

    monkeypatch.setattr(program, "compile_evaluation", compiled)
    monkeypatch.setattr(train, "finish", at_the_end)
    run = attack(tmp_path, shards(tmp_path / "shards"), {})
    after = sum(each.calls for each in counting) - before[0]
    assert (run.get("holdout") or run.get("unread")) and run["probes"]["causality"]["passed"]
    assert after == evaluations_after(8)
