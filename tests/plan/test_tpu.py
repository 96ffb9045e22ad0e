"""A whole training step compiles for absent TPUs, and the plan reads it. Skipped without libtpu."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jspeed.plan.target import load_target, missing
from jspeed.recipe import leaves
from jspeed.record.sizes import is_matrix
from jspeed.run.find_recipe import find

from ..toys import TOYS

PLAN = Path(__file__).parents[2] / "scripts" / "plan.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target", "layout", "size"),
    [
        ("track3", "v5ex8", "zero1", "toy"),
        ("track3", "v6ex8", "zero1+scan", "toy"),
        ("r29", "v6ex4", "zero1", "toy"),
        ("r29", "v5px8", "zero1", "toy"),
        ("track3", "v4x1", "zero1", "toy"),
        ("track3", "v5ex8", "zero1", "full"),  # half a minute of a core
        ("track3", "v6ex8", "zero1", "full"),  # a minute
        ("r29", "v6ex8", "zero1", "full"),  # three minutes
    ],
)
def test_a_step_compiles_and_is_read(name, target, layout, size, tmp_path):
    if reason := missing(load_target(target.split("x")[0])):
        pytest.skip(reason)
    sets = (
        [text.replace("COMPUTE=float32", "COMPUTE=bfloat16") for text in TOYS[name]]
        if size == "toy"
        else []
    )
    # A process of its own: libtpu takes signals for itself, and JAX's settings of this one are for
    # CPUs.
    command = [
        sys.executable,
        str(PLAN),
        name,
        "--target",
        target,
        "--layout",
        layout,
        "--json",
        str(tmp_path / "plan.json"),
        "--set",
        *sets,
    ]
    environment = {
        k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    plan = json.loads((tmp_path / "plan.json").read_text())
    [stage, *_] = plan["stages"]
    recipe = find(name, sets).recipe
    matrices = sum(spec.size for _, spec in leaves(recipe.parameters) if is_matrix(spec))
    tokens = recipe.tokens_per_step(recipe.stages[0]) / plan["devices"]
    assert stage["flops"] > 6 * matrices * tokens  # and attention, and the optimizer
    assert plan["fits"] and stage["memory_bytes"]["peak"] > stage["memory_bytes"]["arguments"]
    # Attention forward and both of its backward kernels, each counted with its blocks.
    attending = {
        kind: stage["kernels"][kind] for kind in ("attention_forward", "attention_backward")
    }
    assert plan["attention"] == "splash" and attending["attention_forward"] > 0
    assert attending["attention_backward"] == 2 * attending["attention_forward"]
    assert any("not measured on TPUs" in text for text in plan["warnings"])
