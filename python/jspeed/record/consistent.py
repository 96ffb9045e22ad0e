"""Consistency checks between the fields of one run.json: a contradiction is an edit, or a
bookkeeping bug.

The clock's entries add up to the wall time to about a millisecond. The tolerances here are wider,
because time passes between the reading of the ledger and that of the wall clock.
"""

import math
from datetime import datetime
from itertools import pairwise

from jspeed.errors import BadInput
from jspeed.fields import MISSING, shown_json
from jspeed.record.schema import Run, count_parameters

PROBES = {  # what each probe, a validity check of a trained model, ensures
    "causality": "a loss does not depend on later tokens",
    "normalisation": "the loss is a log-softmax over the whole vocabulary of forward's logits",
    "evaluation_leaves_state": "evaluation changes no parameter and no optimizer state",
    "evaluation_repeats": "evaluating again gives the same loss",
    "evaluation_stays_on_device": "evaluation calls nothing on the host",
    "replicas_agree": "devices hold equal copies of parameters and optimizer state",
    "warm_up_leaves_state": "the clock started from a fresh state",
    "no_overlap": "the training data do not hold the validation data",
    "stream_repeats": "the shards at the end hold the tokens that were trained on",
}
# tolerance in seconds between wall_seconds and ended - started, which have a resolution of 1 s
SLACK = 5.0


def check(run: Run) -> None:
    """Raise BadInput naming the first field of a well-formed ``run`` that contradicts the
    others."""
    _ledger(run)
    _losses(run)
    _curve(run)
    _parameters(run)
    _verdict(run)
    _moments(run)
    _holdout(run)
    _programs(run)


def _wrong(field: str, expected: str, found: object) -> BadInput:
    return BadInput(f"field '{field}': expected {expected}, found {found}")


def _parameters(run: Run) -> None:
    if table := run.get("parameter_table"):
        for name, each in table.items():
            if len(each["shape"]) != len(each["axes"]):
                wanted = f"{len(each['shape'])} names"
                raise _wrong(f"parameter_table.{name}.axes", wanted, each["axes"])
        for field, count in zip(
            ("parameters", "active_parameters"), count_parameters(table), strict=True
        ):
            if run.get(field) != count:
                raise _wrong(
                    field,
                    f"{count}, which follows from parameter_table",
                    shown_json(run.get(field, MISSING)),
                )


def _ledger(run: Run) -> None:
    timed, wall, ledger = run["timed_seconds"], run["wall_seconds"], run["ledger"]
    in_ledger = math.fsum(entry["seconds"] for entry in ledger if entry["timed"])
    if abs(in_ledger - timed) > 1e-3 + 1e-3 * timed:
        raise _wrong(
            "timed_seconds", f"the sum of the timed ledger entries, {in_ledger:.3f}", f"{timed:.3f}"
        )
    total = math.fsum(entry["seconds"] for entry in ledger)
    if total > 1e-3 + 1.01 * wall:
        raise _wrong(
            "wall_seconds", f"at least the sum of all ledger entries, {total:.3f}", f"{wall:.3f}"
        )
    if wall > 1.0 + 1.01 * total:
        raise _wrong("ledger", f"entries that add up to wall_seconds, {wall:.3f}", f"{total:.3f}")
    compiling = math.fsum(entry["seconds"] for entry in ledger if entry["name"] == "compile")
    if abs(compiling - run["compile_seconds"]) > 1e-3 + 1e-3 * compiling:
        wanted = f"the sum of the ledger entries called compile, {compiling:.3f}"
        raise _wrong("compile_seconds", wanted, f"{run['compile_seconds']:.3f}")


def _losses(run: Run) -> None:
    """No probability is above one, so no loss is below zero."""
    curve = run["curve"]
    losses = {f"curve[{n}].val_loss": point["val_loss"] for n, point in enumerate(curve)}
    losses["val_loss"] = run["val_loss"]
    if holdout := run.get("holdout"):
        losses["holdout.val_loss"] = holdout["val_loss"]
    if unread := run.get("unread"):
        losses["unread.val_loss"] = unread["val_loss"]
    for field, loss in losses.items():
        if loss is not None and loss < 0:
            raise _wrong(field, "0 or more nats", loss)


def _curve(run: Run) -> None:
    curve = run["curve"]
    for index, (before, point) in enumerate(pairwise(curve), 1):
        if point["step"] <= before["step"]:
            raise _wrong(
                f"curve[{index}].step",
                f"more than {before['step']}, the step before it",
                point["step"],
            )
        if point["timed_seconds"] < before["timed_seconds"]:
            wanted = f"at least {before['timed_seconds']}, the time before it"
            raise _wrong(f"curve[{index}].timed_seconds", wanted, point["timed_seconds"])
    if not curve:
        return
    last, end = curve[-1], len(curve) - 1
    if last["timed_seconds"] > run["timed_seconds"] + 1e-3:
        wanted = f"at most timed_seconds, {run['timed_seconds']:.3f}"
        raise _wrong(f"curve[{end}].timed_seconds", wanted, f"{last['timed_seconds']:.3f}")
    if last["step"] > run["steps"]:
        raise _wrong(f"curve[{end}].step", f"at most steps, {run['steps']}", last["step"])


def _verdict(run: Run) -> None:
    """Check how the run ended and what follows from that."""
    status, loss = run["status"], run["val_loss"]
    if status == "finished" and run["steps"] != run["planned_steps"]:
        raise _wrong(
            "steps", f"planned_steps, {run['planned_steps']}, of a finished run", run["steps"]
        )
    if status not in ("finished", "stopped"):
        if loss is not None:
            raise _wrong("val_loss", f"null, because the run {status}", shown_json(loss))
        if run["reached"]:
            raise _wrong("reached", f"false, because status is {status}", "true")
        return
    step, last = (
        (run["curve"][-1]["step"], run["curve"][-1]["val_loss"]) if run["curve"] else (None, None)
    )
    if (step, last) != (run["steps"], loss):
        wanted = f"the last loss of the curve, {last} after step {step}"
        raise _wrong("val_loss", wanted, f"{loss} after step {run['steps']}")
    asked = run["asked_steps"] or run["planned_steps"]
    unprobed = not run["plan"] and run["steps"] == asked < run["planned_steps"]
    for name in () if unprobed and not run["probes"] else PROBES:
        # the field and the probe came together
        older = name == "replicas_agree" and "kernels" not in run
        older |= name == "stream_repeats" and "carried" not in run
        if name not in run["probes"] and not older:
            raise _wrong(f"probes.{name}", "a verdict", "no such field")
    reached = (
        loss is not None
        and loss <= run["target_loss"]
        and bool(run["probes"])
        and all(p["passed"] for p in run["probes"].values())
    )
    if run["reached"] is not reached:
        wanted = f"{str(reached).lower()}, which follows from val_loss, target_loss and probes"
        raise _wrong("reached", wanted, str(run["reached"]).lower())


def _moments(run: Run) -> None:
    started, ended = (datetime.fromisoformat(moment) for moment in (run["started"], run["ended"]))
    if ended < started:
        raise _wrong("ended", f"a time after started, {run['started']}", run["ended"])
    if run["resumed"]:
        # started is when the last process did, and the ledger has what the ones before it spent
        return
    between = (ended - started).total_seconds()
    if between > run["wall_seconds"] + SLACK:
        wanted = f"at least the {between:.0f} s between started and ended"
        raise _wrong("wall_seconds", wanted, f"{run['wall_seconds']:.3f}")
    if run["timed_seconds"] > between + SLACK:
        wanted = f"at most the {between:.0f} s between started and ended"
        raise _wrong("timed_seconds", wanted, f"{run['timed_seconds']:.3f}")


def _holdout(run: Run) -> None:
    holdout = run.get("holdout")
    if holdout and holdout["first"] < run["data"]["val_tokens"]:
        wanted = (
            f"at least data.val_tokens, {run['data']['val_tokens']}, where the first range ends"
        )
        raise _wrong("holdout.first", wanted, holdout["first"])


def _programs(run: Run) -> None:
    if run["plan"] and run.get("programs", {}).get("loaded"):
        raise _wrong("programs.loaded", "false, because a plan announced the run", "true")
