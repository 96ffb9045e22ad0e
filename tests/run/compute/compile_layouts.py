"""Compile recipes at toy size under layouts, on four CPU devices; a process of its own, which XLA
may abort.

``python -m tests.run.compute.compile_layouts RECIPE:DTYPE:LAYOUT ...`` prints each one, and ``ok``
after it.
"""

import sys
from dataclasses import replace

import jax
import optax

from jspeed.parallel import layout as layouts
from jspeed.parallel.mesh import make_mesh
from jspeed.run.compute.device import Placement, device_of
from jspeed.run.compute.program import trace_evaluation, trace_step
from jspeed.run.find_recipe import find

from ...toys import TOYS

DTYPES = ("float32", "bfloat16")
ENDINGS = ("", "+remat", "+scan", "+remat+scan")


def mesh_for(layout):
    over = set(layouts.find_layout(layout).rules.values()) - {"data"}
    return make_mesh(
        {"data": 2} | dict.fromkeys(over, 2) if over else {"data": 4}, jax.devices()[:4]
    )


def computes(name):
    """The dtypes that a recipe computes in: all where it has a field for that."""
    return DTYPES if "COMPUTE" in find(name, trace=False).fields else DTYPES[:1]


def toy(name, dtype):
    sets = [f"COMPUTE={dtype}"] if len(computes(name)) > 1 else []
    return find(name, [*TOYS[name], *sets], trace=False).recipe


def compile_one(name, dtype, layout):
    """The last step of the last stage, and an evaluation.

    Endings change how a gradient is computed: with one the evaluation is left out, and the update
    is the simplest.
    """
    recipe, mesh = toy(name, dtype), mesh_for(layout)
    layouts.check_layout(layout, mesh, recipe)
    if layout in layouts.LAYOUTS:
        placed = Placement(mesh, layout, device_of(mesh))
        trace_evaluation(recipe, placed, recipe.eval_len, 4)[1].lower().compile()
    else:
        recipe = replace(recipe, optimizer=lambda: optax.sgd(0.1))
    trace_step(
        recipe, recipe.stages[-1], Placement(mesh, layout, device_of(mesh)), 1
    ).lower().compile()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    layouts.SMALL = 0
    for case in sys.argv[1:]:
        print(case, end=" ", flush=True)
        compile_one(*case.split(":"))
        print("ok", flush=True)
