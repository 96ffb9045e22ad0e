"""Numbers of one run.json that must follow from each other; a contradiction is an edit, or a bookkeeping bug.

The clock's entries add up to the wall time to about a millisecond; what is allowed here is more, because seconds pass
between the reading of the ledger and that of the wall.
"""

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jspeed.errors import BadInput
from jspeed.record.schema import found

PROBES = {  # what each validity check of a trained model, a probe, makes sure of
    "causality": "a loss does not depend on later tokens",
    "normalisation": "the loss is a log-softmax over the whole vocabulary",
    "evaluation_leaves_state": "evaluation changes no parameter and no optimizer state",
    "evaluation_repeats": "evaluating again gives the same loss",
    "evaluation_stays_on_device": "evaluation calls nothing on the host",
    "warm_up_leaves_state": "the clock started from a fresh state",
    "no_overlap": "the training data do not hold the validation data",
}
SLACK = 5.0  # seconds that the two moments of a run, to the second, may differ from its wall time


def check(run: Mapping[str, Any]) -> None:
    """Raise BadInput naming the first field of a well-formed ``run`` that contradicts the others."""
    _ledger(run)
    _curve(run)
    loss, target = run["val_loss"], run["target_loss"]
    if run["reached"] and (loss is None or loss > target):
        raise BadInput(
            f"field 'reached': expected false, because val_loss is {found(loss)} and target_loss is {target}, "
            "found true"
        )
    if run["schema"] >= 2:
        _verdict(run)
        _moments(run)


def _ledger(run: Mapping[str, Any]) -> None:
    timed, wall, ledger = run["timed_seconds"], run["wall_seconds"], run["ledger"]
    in_ledger = math.fsum(entry["seconds"] for entry in ledger if entry["timed"])
    if abs(in_ledger - timed) > 1e-3 + 1e-3 * timed:
        raise BadInput(
            f"field 'timed_seconds': expected the sum of the timed ledger entries, {in_ledger:.3f}, found {timed:.3f}"
        )
    total = math.fsum(entry["seconds"] for entry in ledger)
    if total > 1e-3 + 1.01 * wall:
        raise BadInput(
            f"field 'wall_seconds': expected at least the sum of all ledger entries, {total:.3f}, found {wall:.3f}"
        )
    if run["schema"] < 2:
        return
    if wall > 1.0 + 1.01 * total:
        raise BadInput(f"field 'ledger': expected entries that add up to wall_seconds, {wall:.3f}, found {total:.3f}")
    compiling = math.fsum(entry["seconds"] for entry in ledger if entry["name"] == "compile")
    if abs(compiling - run["compile_seconds"]) > 1e-3 + 1e-3 * compiling:
        raise BadInput(
            f"field 'compile_seconds': expected the sum of the ledger entries called compile, {compiling:.3f}, found "
            f"{run['compile_seconds']:.3f}"
        )


def _curve(run: Mapping[str, Any]) -> None:
    curve = run["curve"]
    for index in range(1, len(curve)):
        before, point = curve[index - 1 : index + 1]
        if point["step"] <= before["step"]:
            raise BadInput(
                f"field 'curve[{index}].step': expected more than {before['step']}, the step before it, found "
                f"{point['step']}"
            )
        if point["timed_seconds"] < before["timed_seconds"]:
            raise BadInput(
                f"field 'curve[{index}].timed_seconds': expected at least {before['timed_seconds']}, the time before "
                f"it, found {point['timed_seconds']}"
            )
    if run["schema"] < 2 or not curve:
        return
    last, end = curve[-1], len(curve) - 1
    if last["timed_seconds"] > run["timed_seconds"] + 1e-3:
        raise BadInput(
            f"field 'curve[{end}].timed_seconds': expected at most timed_seconds, {run['timed_seconds']:.3f}, found "
            f"{last['timed_seconds']:.3f}"
        )
    if last["step"] > run["steps"]:
        raise BadInput(f"field 'curve[{end}].step': expected at most steps, {run['steps']}, found {last['step']}")


def _verdict(run: Mapping[str, Any]) -> None:
    """Check how the run ended and what follows from that."""
    status, loss = run["status"], run["val_loss"]
    if status == "finished" and run["steps"] != run["planned_steps"]:
        raise BadInput(
            f"field 'steps': expected planned_steps, {run['planned_steps']}, of a finished run, found {run['steps']}"
        )
    if status not in ("finished", "stopped"):
        if loss is not None:
            raise BadInput(f"field 'val_loss': expected null, because the run {status}, found {found(loss)}")
        if run["reached"]:
            raise BadInput(f"field 'reached': expected false, because status is {status}, found true")
        return
    last = run["curve"][-1] if run["curve"] else {"step": None, "val_loss": None}
    if (last["step"], last["val_loss"]) != (run["steps"], loss):
        raise BadInput(
            f"field 'val_loss': expected the last loss of the curve, {last['val_loss']} after step {last['step']}, "
            f"found {loss} after step {run['steps']}"
        )
    for name in PROBES:
        if name not in run["probes"]:
            raise BadInput(f"field 'probes.{name}': expected a verdict, found no such field")
    reached = loss is not None and loss <= run["target_loss"] and all(p["passed"] for p in run["probes"].values())
    if run["reached"] is not reached:
        raise BadInput(
            f"field 'reached': expected {str(reached).lower()}, which follows from val_loss, target_loss and probes, "
            f"found {str(run['reached']).lower()}"
        )


def _moments(run: Mapping[str, Any]) -> None:
    started, ended = (datetime.fromisoformat(run[name]) for name in ("started", "ended"))
    if ended < started:
        raise BadInput(f"field 'ended': expected a time after started, {run['started']}, found {run['ended']}")
    if run["resumed"]:
        return  # started is when the last process did, and the ledger has what the ones before it spent
    between = (ended - started).total_seconds()
    if between > run["wall_seconds"] + SLACK:
        raise BadInput(
            f"field 'wall_seconds': expected at least the {between:.0f} s between started and ended, found "
            f"{run['wall_seconds']:.3f}"
        )
    if run["timed_seconds"] > between + SLACK:
        raise BadInput(
            f"field 'timed_seconds': expected at most the {between:.0f} s between started and ended, found "
            f"{run['timed_seconds']:.3f}"
        )
