"""The parameters with the lowest validation loss so far, as an exported folder that every command reads."""

import shutil
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jspeed.cluster.distributed import process_index
from jspeed.corpus.tokenizers import TOKENIZER_FILE
from jspeed.errors import BadInput, writable_folder
from jspeed.run import export
from jspeed.run.output.metrics_log import Progress
from jspeed.run.run_directory import BEST
from jspeed.run.setup import Setup


def keep_best(setup: Setup, progress: Progress, params: Any) -> None:
    """Write ``params`` to ``best/`` of the run directory if their validation loss, the last one, is below all before.

    With several processes each calls this. What cannot be written ends no run: ``progress.failed`` says so.
    """
    *before, last = progress.losses
    if last >= min(before, default=np.inf):
        return
    tensors = gathered(params)
    if process_index():
        return
    folder = setup.run_dir / BEST
    about = {"recipe": setup.recipe.name, "recipe_hash": setup.found.hash}
    about |= {"step": str(progress.steps), "val_loss": repr(last)}
    try:
        writable_folder(folder, "the folder of the best parameters")
        for name in ("config.json", "recipe.py", TOKENIZER_FILE):
            if (setup.run_dir / name).exists():
                shutil.copyfile(setup.run_dir / name, folder / name)
        export.save(folder / export.FILE, tensors, export.OWN | about)
    except (BadInput, OSError) as error:
        progress.failed.append(f"the best parameters: {error}")


def gathered(params: Any) -> export.Tensors:
    """Return the parameters by name, whole and on the host; every process calls this."""
    tensors = {}
    for name, array in export.named(params).items():
        whole = array if array.is_fully_addressable else multihost_utils.process_allgather(array, tiled=True)
        tensors[name] = np.asarray(jax.device_get(whole))
    return tensors
