"""Finish a run: final evaluation, validity probes, evidence, run.json, exported model, loss plot, summary."""

import json
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
from rich.console import Console

from jspeed.cluster.distributed import process_index
from jspeed.cluster.launch import write_result
from jspeed.corpus.tokenizers import TOKENIZER_FILE, unit_of
from jspeed.errors import BadInput, writable_folder
from jspeed.fields import as_json
from jspeed.files import as_text
from jspeed.recipe import Recipe, leaves, without_lazy
from jspeed.record import loss_plot, store
from jspeed.record.remarks import RECORDS
from jspeed.record.run_json import write_run
from jspeed.record.schema import SCHEMA, Data, Probe, Unsealed, count_parameters
from jspeed.run import export
from jspeed.run.clock import utc_now
from jspeed.run.compute.step import State
from jspeed.run.evaluate import validation_accuracy, validation_loss
from jspeed.run.evidence import probes, provenance
from jspeed.run.evidence.data import of_data, of_holdout
from jspeed.run.find_recipe import LoadedRecipe
from jspeed.run.output import console as output
from jspeed.run.output.metrics_log import History
from jspeed.run.run_directory import BEST
from jspeed.run.setup import Setup
from jspeed.sizes import flops_per_token, parameter_table

LARGE = 4 * 2**30  # bytes of lazily updated tables, more than which a run writes into no file


def finish(setup: Setup, history: History, state: State | None, console: Console) -> int:
    """Write run.json, model.safetensors and loss.svg, however the run ended; return the exit code.

    Each is tried though another failed; raises :class:`BadInput` with all that could not be written.
    """
    clock, verdicts, holdout = history.clock, dict[str, probes.Verdict](), None
    if state and history.status in ("finished", "stopped"):
        try:
            verdicts = evaluate_and_probe(setup, history, state, console)
            if (rows := setup.data.holdout) and len(rows.rows):
                with clock.section("second range"), output.waiting(console, "second validation range"):
                    holdout = of_holdout(setup, rows, state["params"])
        except KeyboardInterrupt:
            history.status, verdicts = "interrupted", {}
    tensors: export.Tensors | None = None
    if state and history.status != "diverged" and history.interrupted_by != 143:
        with clock.section("parameters"):
            tensors = to_write(setup.recipe, state["params"])
    val_loss, reached = outcome(setup, history, verdicts)
    write_launcher_result(setup, history, val_loss, reached)
    if process_index():
        return exit_code(setup, history, reached)
    with clock.section("evidence"), output.waiting(console, "evidence for run.json"):
        try:
            data = of_data(setup, hashed=history.status != "interrupted")
        except KeyboardInterrupt:  # many gigabytes are hashed: the run is kept without
            history.status, verdicts = "interrupted", {}
            data = of_data(setup, hashed=False)
        here = provenance.here(setup.at_start)
        table = parameter_table(setup.recipe)
    run = record(setup, history, verdicts, data, here, table)
    if holdout and run["val_loss"] is not None:
        run["holdout"] = holdout
    failed = list(history.failed)
    if data["val_sha256"] is None and history.status != "interrupted":
        failed.append("the shards can no longer be read, so run.json has no data hashes")
    unit = unit_of(setup.data.manifest)
    parts: list[Callable[[], object]] = [lambda: write_run(setup.run_dir, run)]  # most important first
    if tensors:
        about = metadata(setup.found, history.steps)
        parts.append(lambda: export.save(setup.run_dir / export.FILE, tensors, about))
    for write in (*parts, lambda: draw(setup, history, unit, run)):
        try:
            write()
        except BadInput as error:
            failed.append(str(error))
    for line in output.closing(run, setup.run_dir, unit):
        console.print(line, soft_wrap=True)
    if tensors and large_tables(setup.recipe):
        saved = (setup.run_dir / "checkpoints" / str(history.steps)).is_dir()
        console.print(note_on_large_tables(setup.recipe, saved), soft_wrap=True)
    if failed:
        raise BadInput(f"the run ended, but {'; '.join(failed)}")
    return exit_code(setup, history, run["reached"])


def evaluate_and_probe(setup: Setup, history: History, state: State, console: Console) -> dict[str, probes.Verdict]:
    """Evaluate the last parameters, keep them where they are the best, and return the verdicts on their loss."""
    clock, program, params = history.clock, setup.program, state["params"]
    with clock.section("final evaluation"), output.waiting(console, "final evaluation"):
        loss = validation_loss(program.evaluate, params, setup.validation)
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
    with clock.section("probes"), output.waiting(console, "validity probes"):
        return probes.run_all(setup, state, loss)


def outcome(setup: Setup, history: History, verdicts: dict[str, probes.Verdict]) -> tuple[float | None, bool]:
    """Return the final validation loss, None where the run did not come to one, and whether it reached the target."""
    val_loss = history.curve[-1]["val_loss"] if history.status in ("finished", "stopped") else None
    valid = all(verdict["passed"] for verdict in verdicts.values())
    return val_loss, val_loss is not None and val_loss <= setup.recipe.target_loss and valid


def record(
    setup: Setup,
    history: History,
    verdicts: dict[str, probes.Verdict],
    data: Data,
    here: provenance.Here,
    table: dict[str, Any],
) -> Unsealed:
    """Return run.json, unsealed."""
    recipe, clock, program = setup.recipe, history.clock, setup.program
    ledger, wall, ended = clock.ledger, clock.wall_seconds, utc_now()  # at one moment, however busy the machine is
    val_loss, reached = outcome(setup, history, verdicts)
    total, active = count_parameters(table)
    return {
        "schema": SCHEMA,
        "recipe": recipe.name,
        "recipe_hash": setup.found.hash,
        "recipe_source": as_text(setup.found.path.name),
        "recipe_sha256": setup.found.source_sha256,
        "fields": as_json(setup.found.fields),
        "overrides": as_json(setup.found.overrides),
        "parent": recipe.parent,
        "track": recipe.track or recipe.data.name,  # which no rules rank
        "seed": setup.options.seed,
        "status": history.status,
        "reached": reached,
        "target_loss": recipe.target_loss,
        "val_loss": val_loss,
        "timed_seconds": clock.timed_seconds,
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
        "kernels": setup.checked.record(),
        "data": data,
        "loader": setup.data.loader.stats(),
        "host": {"data_wait_seconds": history.data_wait_seconds, "dispatch_seconds": history.dispatch_seconds},
        "ledger": ledger,
        "resumed": history.resumed,
        "plan": setup.at_start.plan,
        "initial_state": setup.at_start.initial_checksum,
        "curve": history.curve,
        "probes": cast(dict[str, Probe], verdicts),
        **here,
    }


def write_launcher_result(setup: Setup, history: History, val_loss: float | None, reached: bool) -> None:
    """Write this process's result where ``launch.py --results`` gathers it; every process calls this."""
    result = {"recipe": setup.recipe.name, "seed": setup.options.seed, "run_dir": str(setup.run_dir.absolute())}
    result |= {"status": history.status, "reached": reached, "steps": history.steps, "val_loss": val_loss}
    with suppress(BadInput):  # the launcher's folder is gone or full: the run's own record comes first
        write_result(json.dumps(result | {"train_loss": history.train[-1][1] if history.train else None}))


def draw(setup: Setup, history: History, unit: str, run: Unsealed) -> None:
    """Draw the losses of the run beside those of its parent's newest record, where that has the same validation."""
    kind, last_steps = provenance.devices()["kind"], accumulate(stage.steps for stage in setup.recipe.stages[:-1])
    loss_plot.loss_svg(
        setup.run_dir / "loss.svg",
        train=history.train,
        val=[(point["timed_seconds"], point["val_loss"]) for point in history.curve],
        target=setup.recipe.target_loss,
        title=f"{setup.recipe.name}, seed {setup.options.seed}, {kind}",
        unit=unit,
        stages=[history.train[step - 1][0] for step in last_steps if step < len(history.train)],
        parent=parent_curve(run),
    )


def parent_curve(run: Unsealed, records: Path = RECORDS) -> tuple[str, list[tuple[float, float | None]]] | None:
    """Return a label and the validation losses by timed seconds of the newest record of the parent of ``run``.

    None where there is no record on the same track of the same validation tokens, as in an installed package.
    """
    found = store.newest(records, run["track"], run["parent"]) if run["parent"] else None
    tokens = run["data"]["val_sha256"]
    if found is None or tokens is None or found["data"].get("val_sha256") != tokens:
        return None
    last = "" if found["val_loss"] is None else f", {found['val_loss']:.3f} in {found['timed_seconds']:.0f} s"
    elsewhere = "" if found["devices"]["kind"] == run["devices"]["kind"] else ", another machine"
    points = [(point["timed_seconds"], point["val_loss"]) for point in found["curve"]]
    return f"parent {found['recipe']}{last}{elsewhere}", points


def exit_code(setup: Setup, history: History, reached: bool) -> int:
    """0 reached the target or ran what was asked, 1 did not, 130 Ctrl-C, 143 SIGTERM."""
    if history.status == "interrupted":
        return history.interrupted_by
    asked_for_less = history.status == "stopped" and setup.options.steps == history.steps
    return 0 if reached or asked_for_less else 1


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


def keep_best(setup: Setup, history: History, params: Any) -> None:
    """Write ``params`` to ``best/`` of the run directory if their validation loss, the last one, is below all before.

    With several processes each calls this. A write error does not end the run: ``history.failed`` has it.
    """
    *before, last = history.losses
    if last >= min(before, default=math.inf):
        return
    tensors = to_write(setup.recipe, params)
    if process_index():
        return
    folder = setup.run_dir / BEST
    about = metadata(setup.found, history.steps, val_loss=repr(last))
    try:
        writable_folder(folder, "the folder of the best parameters")
        for name in ("config.json", "recipe.py", TOKENIZER_FILE):
            if (setup.run_dir / name).exists():
                shutil.copyfile(setup.run_dir / name, folder / name)
        export.save(folder / export.FILE, tensors, about)
    except (BadInput, OSError) as error:
        history.failed.append(f"the best parameters: {error}")
