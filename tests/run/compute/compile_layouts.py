"""Compile recipes at toy size under layouts, four CPU devices; a process of its own, which XLA may abort.

``python -m tests.run.compute.compile_layouts RECIPE:DTYPE:LAYOUT ...`` prints one line before each and ``ok`` after it.
"""

import sys

import jax

from jspeed.parallel import layout as layouts
from jspeed.parallel.mesh import make_mesh
from jspeed.run.compute.device import device_of
from jspeed.run.compute.program import lower_evaluation, lower_step
from jspeed.run.find_recipe import find

from ...toys import TOYS

DTYPES = ("float32", "bfloat16")
ENDINGS = ("", "+remat", "+scan", "+remat+scan")


def mesh_for(layout):
    over = set(layouts.find_layout(layout).rules.values()) - {"data"}
    return make_mesh({"data": 2} | dict.fromkeys(over, 2) if over else {"data": 4}, jax.devices()[:4])


def toy(name, dtype):
    """The recipe at toy size; float32 is all that those without a field COMPUTE have."""
    computes = "COMPUTE" in find(name, trace=False).fields
    return find(name, [*TOYS[name], *[f"COMPUTE={dtype}"] * computes], trace=False).recipe


def compile_one(name, dtype, layout):
    """The last step of the last stage and, where nothing is recomputed for a gradient, an evaluation."""
    recipe, mesh = toy(name, dtype), mesh_for(layout)
    layouts.check_layout(layout, mesh, recipe)
    lower_step(recipe, recipe.stages[-1], mesh, layout, device_of(mesh), 1).compile()
    if not layouts.find_layout(layout).remat:
        lower_evaluation(recipe, mesh, layout, device_of(mesh), recipe.eval_len, 4)[1].compile()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    layouts.SMALL = 0
    for case in sys.argv[1:]:
        print(case, end=" ", flush=True)
        compile_one(*case.split(":"))
        print("ok", flush=True)
