"""Text of the training shards that a run has not read, as a second measure of its last parameters.

Who has learned the validation text in another way than by training is better on it than on this.
"""

from dataclasses import replace
from itertools import islice

import numpy as np

from jspeed.record.schema import Unread
from jspeed.run.evaluate import to_devices, validation_loss
from jspeed.run.evidence.probes import sha256_of_lanes
from jspeed.run.setup import Setup, open_loader


def unread_lanes(setup: Setup, steps: int) -> np.ndarray:
    """Return lanes ``[R, eval_len + 1]`` of the batches that would have come after ``steps``: at
    most as many as the validation has.

    None, ``[0, eval_len + 1]``, where the stream begins another epoch before them.
    """
    recipe, wanted = setup.recipe, setup.validation.count
    last = recipe.stages[-1]
    length = recipe.eval_len
    lanes_of_batch = recipe.lanes * (last.lane_len // length)
    nothing = np.empty((0, length + 1), setup.data.lanes.dtype)
    if recipe.beside or not lanes_of_batch:
        return nothing
    more = -(-wanted // lanes_of_batch)
    longer = (*recipe.stages[:-1], replace(last, steps=last.steps + more))
    stream = replace(recipe, stages=longer)
    with open_loader(stream, setup.data.shards, setup.options.seed, all_lanes=True) as loader:
        batches = [np.array(each.tokens) for each in islice(loader, steps, steps + more)]
        if loader.state_dict()["epoch"]:
            return nothing
    starts = range(0, batches[0].shape[1] - length, length)
    pieces = [batch[:, start : start + length + 1] for batch in batches for start in starts]
    return np.concatenate(pieces)[:wanted]


def evaluate_unread(setup: Setup, steps: int, params: object) -> Unread | None:
    """Return the loss of ``params`` on text that the run has not read in its ``steps``; every
    process must call this."""
    lanes = unread_lanes(setup, steps)
    if not len(lanes):
        return None
    mesh, program = setup.placement.mesh, setup.program
    validation = to_devices(lanes, program.eval_lanes, setup.recipe, mesh)
    validation.tokenizer_mask = setup.validation.tokenizer_mask
    loss = validation_loss(program.evaluate, params, validation)
    return {
        "tokens": validation.tokens,
        "sha256": sha256_of_lanes(lanes, setup),
        "val_loss": loss if np.isfinite(loss) else None,
    }
