"""Finish a run: final evaluation, validity probes, evidence, run.json, exported model, loss plot, summary."""

import json
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import cast

from rich.console import Console

from jspeed.cluster.distributed import process_index
from jspeed.cluster.launch import write_result
from jspeed.corpus.tokenizers import unit_of
from jspeed.errors import BadInput
from jspeed.fields import as_json
from jspeed.files import as_text
from jspeed.record import loss_plot, store
from jspeed.record.remarks import RECORDS
from jspeed.record.run_json import write_run
from jspeed.record.schema import SCHEMA, Probe, Unsealed, count_parameters
from jspeed.run import best, export
from jspeed.run.clock import utc_now
from jspeed.run.compute.step import State
from jspeed.run.evaluate import validation_accuracy, validation_loss
from jspeed.run.evidence import probes, provenance
from jspeed.run.evidence.data import of_data, of_holdout
from jspeed.run.output import console as output
from jspeed.run.output.metrics_log import Progress
from jspeed.run.setup import Setup
from jspeed.sizes import flops_per_token, parameter_table


def finish(setup: Setup, progress: Progress, state: State | None, console: Console) -> int:
    """Write run.json, model.safetensors and loss.svg, however the run ended; return the exit code.

    Each is tried though another failed; raises :class:`BadInput` with all that could not be written.
    """
    recipe, clock = setup.recipe, progress.clock
    probe_results: dict[str, probes.Verdict] = {}
    holdout = None
    if state and progress.status in ("finished", "stopped"):
        try:
            with clock.section("final evaluation"), output.waiting(console, "final evaluation"):
                loss = validation_loss(setup.program.evaluate, state["params"], setup.validation)
                known = progress.at_validation  # of a run that stopped at its target
                accuracy = None if known else validation_accuracy(setup.program, state["params"], setup.validation)
            if not known:
                try:
                    progress.validated(loss, accuracy)
                except BadInput as error:
                    progress.failed.append(str(error))
                if setup.options.keep_best and progress.at_validation:
                    with clock.section("checkpoint"):
                        best.keep_best(setup, progress, state["params"])
            with clock.section("probes"), output.waiting(console, "validity probes"):
                probe_results = probes.run_all(setup, state, loss)
            if setup.holdout and len(setup.holdout.rows):
                with clock.section("second range"), output.waiting(console, "second validation range"):
                    holdout = of_holdout(setup, setup.holdout, state["params"])
        except KeyboardInterrupt:
            progress.status, probe_results = "interrupted", {}
    tensors: export.Tensors | None = None
    if state and progress.status != "diverged" and progress.interrupted_by != 143:
        with clock.section("parameters"):
            tensors = best.to_write(recipe, state["params"])
    val_loss = None
    if progress.status in ("finished", "stopped"):
        val_loss = progress.curve[-1]["val_loss"]
    valid = all(verdict["passed"] for verdict in probe_results.values())
    reached = val_loss is not None and val_loss <= recipe.target_loss and valid
    write_launcher_result(setup, progress, val_loss, reached)
    if process_index():
        return exit_code(setup, progress, reached)
    with clock.section("evidence"), output.waiting(console, "evidence for run.json"):
        try:
            data = of_data(setup, hashed=progress.status != "interrupted")
        except KeyboardInterrupt:  # many gigabytes are hashed: the run is kept without
            progress.status, probe_results, val_loss, reached = "interrupted", {}, None, False
            data = of_data(setup, hashed=False)
        gpus = provenance.gpu_facts(setup.at_start.gpus)
        environment = provenance.environment()
        table = parameter_table(recipe)
        total, active = count_parameters(table)
    ledger, wall, ended = clock.ledger, clock.wall_seconds, utc_now()  # at one moment, however busy the machine is
    run: Unsealed = {
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
        "status": progress.status,
        "reached": reached,
        "target_loss": recipe.target_loss,
        "val_loss": val_loss,
        "timed_seconds": clock.timed_seconds,
        "compile_seconds": clock.seconds("compile"),
        "wall_seconds": wall,
        "started": setup.started,
        "ended": ended,
        "asked_steps": setup.options.steps,
        "steps": progress.steps,
        "planned_steps": recipe.steps,
        "tokens": progress.tokens,
        "parameters": total,
        "active_parameters": active,
        "parameter_table": table,
        "flops_per_token": flops_per_token(recipe, recipe.stages[-1]),
        "devices": provenance.devices(),
        "mesh": dict(setup.mesh.shape),
        "layout": setup.options.layout,
        "micro_batch": setup.program.micro_tokens,
        "head_chunk": setup.program.head_chunk,
        "remat": setup.program.remat,
        "kernels": setup.kernels,
        "data": {
            "name": recipe.data.name,
            "fingerprint": setup.shards.fingerprint,
            "val_fingerprint": setup.val_shards.fingerprint,
            "train_tokens": setup.shards.num_tokens,
            "val_tokens": setup.validation.tokens,
            "tokenizer": setup.manifest.get("tokenizer"),
            **data,
        },
        "loader": setup.loader.stats(),
        "host": {
            "data_wait_seconds": progress.data_wait_seconds,
            "dispatch_seconds": progress.dispatch_seconds,
        },
        "ledger": ledger,
        "resumed": progress.resumed,
        "plan": setup.at_start.plan,
        "initial_state": setup.at_start.initial_checksum,
        "curve": progress.curve,
        "probes": cast(dict[str, Probe], probe_results),
        "versions": provenance.versions(),
        "xla_flags": provenance.xla_flags(),
        "git": setup.at_start.git,
        "machine": provenance.machine(),
        "gpus": gpus,
        "container": provenance.container(),
        "environment": environment,
    }
    if holdout and val_loss is not None:
        run["holdout"] = holdout
    source = setup.manifest.get("source") or {}
    if source.get("kind") == "stdlib":
        run["data"]["python"] = source["python"]
    parts: list[Callable[[], object]] = [lambda: write_run(setup.run_dir, run)]  # most important first
    if tensors:
        about = best.metadata(setup.found, progress.steps)
        parts.append(lambda: export.save(setup.run_dir / export.FILE, tensors, about))
    unit = unit_of(setup.manifest)
    parts.append(lambda: draw(setup, progress, unit, run))
    failed = list(progress.failed)
    if data["val_sha256"] is None and progress.status != "interrupted":
        failed.append("the shards can no longer be read, so run.json has no data hashes")
    for write in parts:
        try:
            write()
        except BadInput as error:
            failed.append(str(error))
    for line in output.closing(run, setup.run_dir, unit):
        console.print(line, soft_wrap=True)
    if tensors and best.large_tables(recipe):
        saved = (setup.run_dir / "checkpoints" / str(progress.steps)).is_dir()
        console.print(best.note_on_large_tables(recipe, saved), soft_wrap=True)
    if failed:
        raise BadInput(f"the run ended, but {'; '.join(failed)}")
    return exit_code(setup, progress, reached)


def write_launcher_result(setup: Setup, progress: Progress, val_loss: float | None, reached: bool) -> None:
    """Write this process's result where ``launch.py --results`` gathers it; every process calls this."""
    result = {"recipe": setup.recipe.name, "seed": setup.options.seed, "run_dir": str(setup.run_dir.absolute())}
    result |= {"status": progress.status, "reached": reached, "steps": progress.steps, "val_loss": val_loss}
    with suppress(BadInput):  # the launcher's folder is gone or full: the run's own record comes first
        write_result(json.dumps(result | {"train_loss": progress.train[-1][1] if progress.train else None}))


def draw(setup: Setup, progress: Progress, unit: str, run: Unsealed) -> None:
    """Draw the losses of the run beside those of its parent's newest record, where that has the same validation."""
    kind, last_steps = provenance.devices()["kind"], accumulate(stage.steps for stage in setup.recipe.stages[:-1])
    loss_plot.loss_svg(
        setup.run_dir / "loss.svg",
        train=progress.train,
        val=[(point["timed_seconds"], point["val_loss"]) for point in progress.curve],
        target=setup.recipe.target_loss,
        title=f"{setup.recipe.name}, seed {setup.options.seed}, {kind}",
        unit=unit,
        stages=[progress.train[step - 1][0] for step in last_steps if step < len(progress.train)],
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


def exit_code(setup: Setup, progress: Progress, reached: bool) -> int:
    """0 reached the target or ran what was asked, 1 did not, 130 Ctrl-C, 143 SIGTERM."""
    if progress.status == "interrupted":
        return progress.interrupted_by
    asked_for_less = progress.status == "stopped" and setup.options.steps == progress.steps
    return 0 if reached or asked_for_less else 1
