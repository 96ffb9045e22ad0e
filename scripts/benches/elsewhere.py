"""Does a GPU load and run what was compiled for it where there was none?

``python -m benches.elsewhere FOLDER`` makes programs, where JAX has its plugin for CUDA;
``scripts/gpu_day.sh pack`` calls it. The day's first part loads them. Attention by cuDNN is left
out: XLA looks up graphs when it first runs, and builds them only where a GPU is.
"""

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.base.compiler import GPU_OPTIONS
from jspeed.base.jax_versions import from_machine_code, machine_code
from jspeed.errors import BadInput, run_script, type_and_line
from jspeed.model import fp8
from jspeed.parallel.mesh import make_mesh, replicated

TOY = os.environ.get("GPU_DAY") == "toy"
TARGET = "h100"
PREFIX = "made elsewhere: "
ENDING = ".elsewhere"
BF16, FP32 = jnp.bfloat16, jnp.float32
Case = tuple[Callable[..., Any], list[tuple[tuple[int, ...], Any]]]


def multiplied_in_fp8(x: jax.Array, w: jax.Array) -> jax.Array:
    """A matmul of FP8 by cuBLASLt."""
    return fp8.matmul(x, w, fp8.Scales(1 / 64, 1 / 64, 1 / 8192))


def own_value(y: jax.Array, v: jax.Array, a: jax.Array) -> jax.Array:
    """A kernel of ours in Triton."""
    from jspeed.kernels.own_value import subtract_own_value

    return subtract_own_value(y, v, a)


def fused_mlp(x: jax.Array, w: jax.Array, scales: jax.Array) -> Any:
    """A kernel of ours in Mosaic."""
    from jspeed.kernels.fused_mlp import squared_relu_matmul_fp8

    return squared_relu_matmul_fp8(x, w, scales)


CASES: dict[str, Case] = {
    "XLA": (lambda x, y: jnp.tanh(x @ y), [((512, 512), BF16)] * 2),
    "FP8": (multiplied_in_fp8, [((4096, 768), BF16), ((2816, 768), BF16)]),
    "Triton": (own_value, [((1, 4096, 6, 128), BF16)] * 2 + [((1, 4096, 6), BF16)]),
    "Mosaic": (
        fused_mlp,
        [((4096, 768), jnp.float8_e4m3fn), ((2816, 768), jnp.float8_e4m3fn), ((2,), FP32)],
    ),
}
NAMES = [PREFIX + case for case in (["XLA"] if TOY else CASES)]


def main(folder: Path) -> None:
    """Compile each case for an absent H100, and write it into ``folder``; say which cannot be."""
    from jspeed.plan.target import load_target, missing, pretend, target_mesh

    jax.config.update("jax_platforms", "cpu")
    target = load_target(TARGET)
    if why := missing(target):
        raise BadInput(why)
    with pretend(target):
        lies = replicated(target_mesh(target, 1))
        for case in CASES:
            try:
                write(folder, case, lies, ("cuda",), GPU_OPTIONS)
            except Exception as error:  # whatever a library raises
                print(f"{PREFIX}{case}: {type_and_line(error)}")


def write(folder: Path, case: str, lies: Any, platforms: Any, options: Any) -> None:
    """Compile one case and write it."""
    function, shapes = CASES[case]
    args = [jax.ShapeDtypeStruct(*shape, sharding=lies) for shape in shapes]
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=platforms)
    kept = jax.__version__, machine_code(lowered.compile(compiler_options=options))
    (folder / f"{case}{ENDING}").write_bytes(pickle.dumps(kept))


def load(name: str) -> Mapping[str, Any]:
    """Load a case by its name, run it on the first device, and compare it with what is compiled
    here."""
    from benches.gpu_measurements import turn

    case, folder = name.removeprefix(PREFIX), Path(os.environ["DAY" if TOY else "DIST"])
    if TOY:
        write(folder, case, replicated(make_mesh({"data": 1}, jax.devices()[:1])), None, None)
    path = folder / f"{case}{ENDING}"
    if not path.exists():
        return {"failed": f"{path} is not there; scripts/gpu_day.sh pack makes it"}
    version, code = pickle.loads(path.read_bytes())
    said = {"made by": f"JAX {version}", "loaded by": f"JAX {jax.__version__}"}
    function, shapes = CASES[case]
    draw = np.random.default_rng(0).normal
    with turn() as span:
        run = from_machine_code(code, jax.devices()[:1])
        args = [jnp.asarray(draw(size=shape), dtype) for shape, dtype in shapes]
        results = [jax.tree.leaves(each(*args)) for each in (run, jax.jit(function))]
        pairs = zip(*results, strict=True)
        differences = [float(jnp.abs(a.astype(FP32) - b.astype(FP32)).max()) for a, b in pairs]
    return said | {"difference": max(differences), "span": span}


if __name__ == "__main__":
    run_script(lambda: main(Path(sys.argv[1])))
