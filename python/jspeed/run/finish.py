"""Finish a run: final evaluation, validity probes, evidence, run.json, exported model, loss plot,
summary."""

import math
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, cast

from rich.console import Console

from jspeed.base import processes
from jspeed.base.beside import Knowing, defined_as
from jspeed.base.files import as_text
from jspeed.data.tokens import TOKENIZER_FILE, unit_of
from jspeed.errors import BadInput, say, writable_folder
from jspeed.fields import as_json
from jspeed.recipe import Stage
from jspeed.record import provenance
from jspeed.record.consistent import SLACK
from jspeed.record.run_json import write_run
from jspeed.record.schema import (
    SCHEMA,
    Data,
    Holdout,
    Host,
    Identity,
    Probe,
    Unread,
    Unsealed,
    count_parameters,
)
from jspeed.record.sizes import flops_per_token, parameter_table
from jspeed.run import console as output
from jspeed.run import export
from jspeed.run.clock import after, between, now, timed, utc_now
from jspeed.run.compute.step import State
from jspeed.run.evaluate import look_up, token_losses, validation_accuracy, weighted_mean
from jspeed.run.evidence import probes
from jspeed.run.evidence.carried import carried, programs_of
from jspeed.run.evidence.probes import data_evidence, evaluate_holdout
from jspeed.run.evidence.unread import evaluate_unread
from jspeed.run.hooks import NO_HOOKS, Hooks
from jspeed.run.metrics_log import History
from jspeed.run.run_directory import BEST
from jspeed.run.setup import Setup


def finish(
    setup: Setup,
    history: History,
    state: State | None,
    console: Console,
    hooks: Hooks = NO_HOOKS,
) -> int:
    """Write run.json, model.safetensors and loss.svg, however the run ended; return the exit code.

    Each is tried though another failed; raises :class:`BadInput` with all that could not be
    written.
    """
    clock, verdicts, holdout = history.clock, dict[str, probes.Verdict](), None
    unread: Unread | None = None
    if state and history.status in ("finished", "stopped"):
        if processes.index() == 0:
            threading.Thread(target=hooks.before_end, daemon=True).start()
        try:
            verdicts, holdout = evaluate_and_probe(setup, history, state, console)
            if not cut_short(setup, history):
                unread = second_text(setup, history, state, console)
        except KeyboardInterrupt:
            history.status = "interrupted"
    tensors: export.Tensors | None = None
    if state and history.status != "diverged" and history.interrupted_by != 143:
        with clock.section("parameters"):
            tensors = parameters_of(setup, state["params"])
    val_loss, reached = outcome(setup, history, verdicts)
    write_launcher_result(setup, history, val_loss, reached)
    if processes.index():
        return exit_code(setup, history, reached)
    run = record(setup, history, verdicts, holdout, unread, console)
    failed = list(history.failed)
    if run["data"]["val_sha256"] is None and history.status != "interrupted":
        failed.append("the shards can no longer be read, so run.json has no data hashes")
    unit = unit_of(setup.data.manifest)
    # most important first
    writes: list[Callable[[], object]] = [lambda: write_run(setup.run_dir, run), history.catch_up]
    if tensors:
        about_model = export.run_metadata(setup.loaded, history.steps)
        writes.append(lambda: export.save(setup.run_dir / export.FILE, tensors, about_model))
    stages = stage_borders(setup.recipe.stages, history.train)
    writes.append(lambda: hooks.draw(setup.run_dir, run, history.train, stages, unit))
    for write in writes:
        try:
            write()
        except BadInput as error:
            failed.append(str(error))
    run["wall_seconds"] = clock.wall_seconds  # as printed: with what was written since the seal
    for line in output.closing(run, setup.run_dir, unit, hooks.remarks(run)):
        console.print(line, soft_wrap=True)
    if tensors and export.large_tables(setup.recipe):
        saved = (setup.run_dir / "checkpoints" / str(history.steps)).is_dir()
        console.print(export.note_on_large_tables(setup.recipe, saved), soft_wrap=True)
    if failed:
        raise BadInput(f"the run ended, but {', and '.join(failed)}; the other files are whole")
    if history.status != "interrupted":
        setup.directory.end()
    return exit_code(setup, history, run["reached"])


def evaluate_and_probe(
    setup: Setup, history: History, state: State, console: Console
) -> tuple[dict[str, probes.Verdict], Holdout | None]:
    """Evaluate the last parameters and keep them where they are the best.

    Returns the verdicts on their loss, and the loss on the track's second validation range: none of
    a run that cannot count (:func:`cut_short`)."""
    clock, program, params = history.clock, setup.program, state["params"]
    with clock.section("final evaluation"), output.waiting(console, "final evaluation"):
        look_up(setup.validation, setup.data.lanes, setup.data.loader, setup.placement.mesh)
        found = token_losses(program.evaluate, params, setup.validation)
        loss = weighted_mean(found, setup.validation)
        known = history.at_validation  # of a run that stopped at its target
        accuracy = None if known else validation_accuracy(program, params, setup.validation)
    if not known:
        try:
            history.validated(loss, accuracy)
        except BadInput as error:
            history.failed.append(str(error))
        if setup.options.keep_best and history.at_validation:
            with clock.section("checkpoint"):
                keep_best(setup, history, params)
    if cut_short(setup, history):
        return {}, None
    with clock.section("probes"), output.waiting(console, "validity probes"):
        verdicts = probes.run_all(setup, state, found, history.steps, history.stream)
    if not setup.data.holdout or not len(setup.data.holdout.lanes):
        return verdicts, None
    with clock.section("second range"), output.waiting(console, "second validation range"):
        return verdicts, evaluate_holdout(setup, setup.data.holdout, params)


def second_text(setup: Setup, history: History, state: State, console: Console) -> Unread | None:
    """Evaluate the last parameters on text that the run has not read, where the track asks for no
    second validation range."""
    if setup.data.holdout:
        return None
    with history.clock.section("second range"), output.waiting(console, "unread text"):
        return evaluate_unread(setup, history.steps, state["params"])


def outcome(
    setup: Setup, history: History, verdicts: dict[str, probes.Verdict]
) -> tuple[float | None, bool]:
    """Return the final validation loss, None where the run did not come to one, and whether it
    reached the target."""
    val_loss = history.curve[-1]["val_loss"] if history.status in ("finished", "stopped") else None
    valid = bool(verdicts) and all(verdict["passed"] for verdict in verdicts.values())
    return val_loss, val_loss is not None and val_loss <= setup.recipe.target_loss and valid


def record(
    setup: Setup,
    history: History,
    verdicts: dict[str, probes.Verdict],
    holdout: Holdout | None,
    unread: Unread | None,
    console: Console,
) -> Unsealed:
    """Collect the evidence, and return run.json, unsealed."""
    recipe, clock, program = setup.recipe, history.clock, setup.program
    with clock.section("evidence"), output.waiting(console, "evidence for run.json"):
        data, verdicts = data_and_verdicts(setup, history, verdicts)
        origin = provenance.collect(setup.at_start)
        table = parameter_table(recipe)
    # at one moment, however busy the machine is: in a run that hangs the timed part is still open
    ledger, wall = clock.ledger, clock.wall_seconds
    ended = after(setup.directory.started, now() - setup.directory.opened)
    stepped = between(ended, utc_now())
    val_loss, reached = outcome(setup, history, verdicts)
    total, active = count_parameters(table)
    run: Unsealed = {
        **identity(setup),
        "recipe_sha256": setup.loaded.source_sha256,
        "status": history.status,
        "reached": reached,
        "target_loss": recipe.target_loss,
        "val_loss": val_loss,
        "timed_seconds": timed(ledger),
        "compile_seconds": clock.seconds("compile"),
        "wall_seconds": wall,
        "started": setup.directory.started,
        "ended": ended,
        "asked_steps": setup.options.steps,
        "steps": history.steps,
        "planned_steps": recipe.steps,
        "tokens": history.tokens,
        "parameters": total,
        "active_parameters": active,
        "parameter_table": table,
        "flops_per_token": flops_per_token(recipe, recipe.stages[-1]),
        "mesh": dict(setup.placement.mesh.shape),
        "layout": setup.options.layout,
        "micro_batch": program.micro_tokens,
        "head_chunk": program.head_chunk,
        "remat": program.remat,
        "kernels": setup.placement.device.record(),
        "data": data,
        "loader": setup.data.loader.stats(),
        "host": Host(
            data_wait_seconds=history.data_wait_seconds, dispatch_seconds=history.dispatch_seconds
        ),
        "ledger": ledger,
        "resumed": history.resumed,
        "plan": setup.at_start.announced,
        "initial_state": setup.at_start.initial_checksum,
        "curve": history.curve,
        "probes": cast(dict[str, Probe], verdicts),
        **origin,
    }
    return with_some(setup, run, stepped, holdout, unread)


def data_and_verdicts(
    setup: Setup, history: History, verdicts: dict[str, probes.Verdict]
) -> tuple[Data, dict[str, probes.Verdict]]:
    """Return what the run read, and ``verdicts``; neither hashes nor verdicts if it is interrupted
    while many gigabytes are hashed."""
    try:
        return data_evidence(setup, hashed=history.status != "interrupted"), verdicts
    except KeyboardInterrupt:
        history.status = "interrupted"
        return data_evidence(setup, hashed=False), {}


def identity(setup: Setup) -> Identity:
    """Return which recipe ran, with which fields and seed."""
    recipe, loaded = setup.recipe, setup.loaded
    return {
        "schema": SCHEMA,
        "recipe": recipe.name,
        "recipe_hash": loaded.hash,
        "recipe_source": as_text(loaded.path.name),
        "fields": as_json(loaded.fields),
        "overrides": as_json(loaded.overrides),
        "parent": recipe.parent,
        "track": recipe.track or recipe.data.name,  # which no rules rank
        "seed": setup.options.seed,
    }


def with_some(
    setup: Setup, run: Unsealed, stepped: float, holdout: Holdout | None, unread: Unread | None
) -> Unsealed:
    """Return ``run`` with what only some runs have; ``stepped`` are the seconds by which the
    machine's clock was set."""
    recipe, program = setup.recipe, setup.program
    if isinstance(setup.data.loader, Knowing):
        run = cast(Unsealed, {**run, recipe.beside.name: setup.data.loader.section()})
    if abs(stepped) > SLACK:
        run["clock_stepped"] = stepped
        how = "was set or it slept" if stepped > 0 else "was set back"
        say(f"note: during the run the machine's clock {how}: {stepped:+.0f} s; run.json says so")
    if holdout and run["val_loss"] is not None:
        run["holdout"] = holdout
    if unread and run["val_loss"] is not None:
        run["unread"] = unread
    if program.compiled:
        run["programs"] = programs_of(program)
    if found := carried(recipe, program):
        run["carried"] = found
        run["weighted"] = recipe.weigh is not None
        run["told_by"] = defined_as(recipe.beside) if recipe.beside else ""
    return run


def write_launcher_result(
    setup: Setup, history: History, val_loss: float | None, reached: bool
) -> None:
    """Write this process's result where ``launch.py --results`` gathers it; every process calls
    this."""
    result = {
        "recipe": setup.recipe.name,
        "seed": setup.options.seed,
        "run_dir": str(setup.run_dir.absolute()),
    }
    result |= {
        "status": history.status,
        "reached": reached,
        "steps": history.steps,
        "val_loss": val_loss,
    }
    result |= {"train_loss": history.train[-1][1] if history.train else None}
    # the launcher's folder is gone or full: the run's own record comes first
    with suppress(BadInput):
        processes.group().result(result)


def stage_borders(stages: Sequence[Stage], train: Sequence[tuple[float, float]]) -> list[float]:
    """Return the timed seconds at which the second stage began, the third and so on, by the losses
    of the steps made."""
    last_steps = accumulate(stage.steps for stage in stages[:-1])
    return [train[step - 1][0] for step in last_steps if step < len(train)]


def exit_code(setup: Setup, history: History, reached: bool) -> int:
    """0 reached the target or ran what was asked, 1 did not, 130 Ctrl-C, 143 SIGTERM."""
    if history.status == "interrupted":
        return history.interrupted_by
    return 0 if reached or asked_for_less(setup, history) else 1


def asked_for_less(setup: Setup, history: History) -> bool:
    """Whether the run ended where --steps asked for it, before the end of its schedule."""
    return history.status == "stopped" and setup.options.steps == history.steps


def cut_short(setup: Setup, history: History) -> bool:
    """Whether the run cannot count, as it ended before its schedule did, unannounced: its loss is
    not probed."""
    return asked_for_less(setup, history) and setup.at_start.announced is None


def parameters_of(setup: Setup, params: Any) -> export.Tensors:
    """Return what a file of the run's parameters holds."""
    tables = setup.program.tables
    return export.to_write(setup.recipe, params, tables.whole if tables else dict)


def keep_best(setup: Setup, history: History, params: Any) -> None:
    """Write ``params`` to ``best/`` of the run directory if their validation loss, the last one, is
    below all before.

    With several processes each calls this. A write error does not end the run: ``history.failed``
    has it.
    """
    *before, last = history.losses
    if last >= min(before, default=math.inf):
        return
    tensors = parameters_of(setup, params)
    if processes.index():
        return
    folder = setup.run_dir / BEST
    about_model = export.run_metadata(setup.loaded, history.steps, val_loss=repr(last))
    try:
        writable_folder(folder, "the folder of the best parameters")
        for name in ("config.json", "recipe.py", TOKENIZER_FILE):
            if (setup.run_dir / name).exists():
                shutil.copyfile(setup.run_dir / name, folder / name)
        export.save(folder / export.FILE, tensors, about_model)
    except (BadInput, OSError) as error:
        history.failed.append(f"the best parameters: {error}")
