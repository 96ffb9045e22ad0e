"""The parameters that a run writes: all but tables too large for a file; those with the lowest validation loss."""

import math
import shutil
from typing import Any

import jax.numpy as jnp

from jspeed.cluster.distributed import process_index
from jspeed.corpus.tokenizers import TOKENIZER_FILE
from jspeed.errors import BadInput, writable_folder
from jspeed.recipe import Recipe, leaves, without_lazy
from jspeed.run import export
from jspeed.run.find_recipe import LoadedRecipe
from jspeed.run.output.metrics_log import Progress
from jspeed.run.run_directory import BEST
from jspeed.run.setup import Setup

LARGE = 4 * 2**30  # bytes of lazily updated tables, more than which a run writes into no file


def large_tables(recipe: Recipe) -> tuple[str, ...]:
    """Return the lazily updated tables that a run's file leaves out: all, if together they have more than LARGE bytes.

    They may be larger than a host's memory. Checkpoints hold them, each device's part apart.
    """
    return recipe.lazy if _lazy_bytes(recipe) > LARGE else ()


def _lazy_bytes(recipe: Recipe) -> int:
    specs = [spec for _, spec in leaves(recipe.parameters) if spec.lookups]
    return sum(spec.size * jnp.dtype(spec.dtype).itemsize for spec in specs)


def to_write(recipe: Recipe, params: Any) -> export.Tensors:
    """Return the parameters that a run writes, by name, whole and on the host; every process calls this."""
    return export.gathered(without_lazy(recipe, params) if large_tables(recipe) else params)


def metadata(found: LoadedRecipe, step: int, **more: str) -> dict[str, str]:
    """Return the metadata of a file of :func:`to_write` after ``step`` steps."""
    absent = {export.LEFT_OUT: ", ".join(tables)} if (tables := large_tables(found.recipe)) else {}
    return export.own_metadata(found, **{export.STEP: str(step)} | absent | more)


def note_on_large_tables(recipe: Recipe, saved: bool) -> str:
    """Say what a run's file leaves out, and where it is, or how to keep it."""
    where = "the last checkpoint has it" if saved else "with --checkpoint-every N a checkpoint has it"
    size = f"{_lazy_bytes(recipe) / 1e9:,.1f} GB"
    return f"{export.FILE} leaves out {', '.join(recipe.lazy)}, {size} updated row by row; {where}"


def keep_best(setup: Setup, progress: Progress, params: Any) -> None:
    """Write ``params`` to ``best/`` of the run directory if their validation loss, the last one, is below all before.

    With several processes each calls this. A write error does not end the run: ``progress.failed`` has it.
    """
    *before, last = progress.losses
    if last >= min(before, default=math.inf):
        return
    tensors = to_write(setup.recipe, params)
    if process_index():
        return
    folder = setup.run_dir / BEST
    about = metadata(setup.found, progress.steps, val_loss=repr(last))
    try:
        writable_folder(folder, "the folder of the best parameters")
        for name in ("config.json", "recipe.py", TOKENIZER_FILE):
            if (setup.run_dir / name).exists():
                shutil.copyfile(setup.run_dir / name, folder / name)
        export.save(folder / export.FILE, tensors, about)
    except (BadInput, OSError) as error:
        progress.failed.append(f"the best parameters: {error}")
