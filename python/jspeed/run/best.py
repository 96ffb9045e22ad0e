"""Keep the parameters with the lowest validation loss so far, as an exported folder that every command reads."""

import math
import shutil
from typing import Any

from jspeed.cluster.distributed import process_index
from jspeed.corpus.tokenizers import TOKENIZER_FILE
from jspeed.errors import BadInput, writable_folder
from jspeed.run import export
from jspeed.run.output.metrics_log import Progress
from jspeed.run.run_directory import BEST
from jspeed.run.setup import Setup


def keep_best(setup: Setup, progress: Progress, params: Any) -> None:
    """Write ``params`` to ``best/`` of the run directory if their validation loss, the last one, is below all before.

    With several processes each calls this. A write error does not end the run: ``progress.failed`` has it.
    """
    *before, last = progress.losses
    if last >= min(before, default=math.inf):
        return
    tensors = export.gathered(params)
    if process_index():
        return
    folder = setup.run_dir / BEST
    about = export.own_metadata(setup.found, step=str(progress.steps), val_loss=repr(last))
    try:
        writable_folder(folder, "the folder of the best parameters")
        for name in ("config.json", "recipe.py", TOKENIZER_FILE):
            if (setup.run_dir / name).exists():
                shutil.copyfile(setup.run_dir / name, folder / name)
        export.save(folder / export.FILE, tensors, about)
    except (BadInput, OSError) as error:
        progress.failed.append(f"the best parameters: {error}")
