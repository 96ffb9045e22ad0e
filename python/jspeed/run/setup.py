"""Set up a run before the clock starts: recipe, devices, data, run directory, compiled programs, warm-up, state."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from jspeed.cluster.distributed import gather, process_index, require_equal
from jspeed.corpus.tokenise import prepare_stdlib
from jspeed.corpus.tokenizers import TOKENIZERS, copy_tokenizer
from jspeed.data import Shards, Shuffle, TokenLoader, find_split
from jspeed.data.manifest import read_manifest
from jspeed.data.recipe_compatibility import check_fits
from jspeed.errors import BadInput
from jspeed.fields import as_json
from jspeed.files import as_text, cache_folder, write_whole
from jspeed.parallel.layout import check_layout, partitions
from jspeed.parallel.mesh import make_mesh, mesh_for, put, replicated
from jspeed.recipe import Recipe, without_lazy
from jspeed.record.preregistration import place_in_plan
from jspeed.record.remarks import taken_name
from jspeed.record.schema import Kernels
from jspeed.run import evaluate, export
from jspeed.run.checkpoint import HASH, restore
from jspeed.run.clock import Clock
from jspeed.run.compute.compile_cache import use_compile_cache
from jspeed.run.compute.compiler import out_of_memory
from jspeed.run.compute.device import Device, device_of, has_document_masks, kernels_of, micro_batches, platform_problem
from jspeed.run.compute.known_faults import known_faults
from jspeed.run.compute.malloc import keep_freed_memory
from jspeed.run.compute.memory_fallbacks import memory_notes
from jspeed.run.compute.preflight import Preflight, compile_or_fall_back, count_kernels, preflight
from jspeed.run.compute.program import Program, eval_context, state_shardings, warm_up
from jspeed.run.compute.step import State, fetcher
from jspeed.run.evidence import provenance
from jspeed.run.evidence.at_start import StartEvidence, checksum
from jspeed.run.find_recipe import LoadedRecipe, find, fit
from jspeed.run.options import Options, check_options, check_steps
from jspeed.run.output import console as output
from jspeed.run.run_directory import RunDirectory, open_run_directory
from jspeed.sizes import describe


@dataclass(frozen=True)
class Setup:
    """A run that is ready to start; ``recipe`` has --target-loss applied, ``state`` is the first one.

    ``identity`` is what a checkpoint must share to be resumed; ``record`` is that of the checkpoint resumed from, or
    None; ``kernels`` is what the preflight found. ``byte_pairs`` are GPT-2's tokens, of a recipe that is canonical."""

    options: Options
    found: LoadedRecipe
    recipe: Recipe
    mesh: Mesh
    device: Device
    shards: Shards
    val_shards: Shards
    loader: TokenLoader
    manifest: Mapping[str, Any]
    run_dir: Path
    started: str
    directory: RunDirectory
    program: Program
    validation: evaluate.ValidationSet
    holdout: evaluate.Holdout | None
    state: State
    identity: dict[str, Any]
    record: dict[str, Any] | None
    at_start: StartEvidence
    kernels: Kernels
    byte_pairs: Sequence[bytes] = ()


def set_up(options: Options, clock: Clock, console: Console) -> Setup:
    """Check all input, then compile and warm up. Raises :class:`BadInput`, leaving no run directory behind."""
    use_compile_cache()
    found, mesh = load_recipe_and_mesh(options)
    recipe = found.recipe
    if options.target_loss is not None:
        recipe = replace(recipe, target_loss=options.target_loss)
    given = None
    if options.init_from is not None:
        given, found = export.read_parameters(options.init_from, recipe), start_from(found, options.init_from)
    if mesh.devices.flat[0].platform == "cpu":
        keep_freed_memory()
    device = device_of(mesh, options.attention, recipe=recipe)
    limits = [memory for memory in gather("memory", device.memory) if memory]
    if limits and device.memory != min(limits):  # all processes compile the same program
        device = device_of(mesh, options.attention, min(limits), recipe)
    own_kernels = device.own_kernels and found.fields.get("OWN_KERNELS") in ("auto", "on")
    device = replace(device, own_kernels=own_kernels)
    parts = tuple(micro_batches(recipe, stage, mesh, device, options.micro_batch) for stage in recipe.stages)
    with clock.section("data"):
        folder = data_folder(recipe, options.data)
        shards, val_shards = find_split(folder, "train"), find_split(folder, "val")
        manifest = read_manifest(folder)
        needs, aligned = recipe.data, recipe.data.align is not None
        tokenizer = found.fields["tokens"]["tokenizer"] if "tokens" in found.fields else TOKENIZERS.get(needs.name)
        fits = (recipe.name, recipe.vocab_size, needs.bos_id, aligned, tokenizer)
        check_fits(folder, manifest, (shards, val_shards), *fits)
        byte_pairs = evaluate.byte_pairs(recipe, manifest["tokenizer"] if manifest else tokenizer)
        rows = evaluate.read_rows(val_shards, recipe)
        holdout = evaluate.read_holdout(val_shards, recipe)
        all_rows = np.concatenate([rows, holdout.rows]) if holdout else rows
        evaluate.check_documents(all_rows, recipe, eval_context(recipe, device).stage.max_docs)
        recipe = replace(recipe, eval_max_doc_len=evaluate.longest_document(all_rows, recipe))
        loader = open_loader(recipe, shards, options.seed)
    departures = list(export.departures(options.init_from, found, manifest or {})) if options.init_from else []
    same = identity(options, found, shards, val_shards)
    how = {"mesh": dict(mesh.shape), "--attention": device.attention, "--checkpoint-every": options.checkpoint_every}
    how |= {"--no-preflight": not options.preflight, "attention backends": device.fallbacks}
    how |= {"--keep-best": options.keep_best, "--stop-at-target": options.stop_at_target}
    how |= {"--accuracy": options.accuracy, "second validation range": holdout and holdout.first}
    require_equal(same | how | {"--resume": options.resume, "jax": jax.__version__})
    checked = Preflight(device, own_kernels_asked=found.fields.get("OWN_KERNELS") == "on")
    if options.preflight:
        with clock.section("preflight"):
            checked = preflight(recipe, mesh, device, found.fields, console)
    device = checked.device
    plan = place_in_plan(options.run_dir, found.hash, options.seed, options.steps)
    name = f"{recipe.name}-{{}}-seed{options.seed}"
    saving = options.checkpoint_every > 0
    directory = open_run_directory(options.run_dir, name, options.resume, saving, same, console, options.steps)
    run_dir, step = directory.path, directory.step
    try:
        given_options = dataclasses.asdict(options) | {"recipe": as_text(options.recipe_or_default)}
        given_options["sets"] = given_options.pop("set_")
        config = export.own_config(found, tokenizer_facts(manifest or {})) | {"options": given_options}
        if process_index() == 0 and step is None:
            write_whole(run_dir / "recipe.py", found.source)
            copy_tokenizer(folder, run_dir, config["tokenizer"])
            write_whole(run_dir / "config.json", json.dumps(config, indent=2, default=as_text) + "\n")
        output.opening(console, opening_facts(options, found, recipe, mesh, device, parts, folder, shards))
        taken = taken_name(recipe.name, recipe.track or recipe.data.name, found.source_sha256)
        notes = platform_problem(device.platform), taken, holdout and holdout.note
        for note in (found.note, *departures, device.note, *notes):
            if note:
                console.print(f"note: {note}", markup=False, soft_wrap=True)
        seed = put(np.asarray(options.seed, np.uint32), replicated(mesh))
        while True:
            with clock.section("compile"):
                program, checked = compile_or_fall_back(
                    recipe, mesh, options.layout, options.micro_batch, len(rows), checked, console
                )
                checked = count_kernels(program, checked, found.fields.get("FP8"), console)
                device = checked.device
                if options.accuracy:
                    counted = evaluate.compile_accuracy(recipe, mesh, options.layout, device, program.eval_rows)
                    program = replace(program, accuracy=counted)
            with clock.section("warm-up"), output.waiting(console, "warming up"):
                fresh = checksum(program.init(seed))
                validation = evaluate.to_devices(rows, program.eval_rows, recipe, mesh)
                fitted = warm_up_fits(program, recipe, mesh, validation)
            if fitted:
                break
            checked = replace(checked, device=replace(device, memory=program.need - 1))
            console.print(f"note: {program.need / 1e9:.1f} GB a device were too much to run; taking less at once")
        if program.parts != parts:
            console.print(f"note: {output.by_stage(program.parts)} micro-batches, which fit in memory", soft_wrap=True)
        for note in memory_notes(recipe.stages[-1], program.micro_tokens, program.head_chunk, program.remat):
            console.print(f"note: {note}: the same training in less memory", markup=False, soft_wrap=True)
        for note in known_faults(device, has_document_masks(recipe), program.texts):
            console.print(f"note: {note}", markup=False, soft_wrap=True)
        with clock.section("initial state"):
            record: dict[str, Any] | None = None
            if step is not None:
                shapes, _ = state_shardings(recipe, options.layout, mesh)
                state, record = restore(run_dir / "checkpoints", step, shapes)
                loader.load_state_dict(record["loader"])
                after_warm_up = checksum(program.init(seed))
            else:
                state = program.init(seed)
                after_warm_up = checksum(state)
                if given is not None:
                    state = given_state(recipe, given, state)
            jax.block_until_ready(state)
            at_start = StartEvidence(fresh, after_warm_up, provenance.git(), provenance.gpus(), plan)
    except BaseException:
        directory.abandon()
        raise
    directory.keep()
    return Setup(
        options=options,
        found=found,
        recipe=recipe,
        mesh=mesh,
        device=device,
        shards=shards,
        val_shards=val_shards,
        loader=loader,
        manifest=manifest or {},
        run_dir=run_dir,
        started=directory.started,
        directory=directory,
        program=program,
        validation=validation,
        holdout=holdout,
        state=state,
        identity=same,
        record=record,
        at_start=at_start,
        kernels=checked.record(),
        byte_pairs=byte_pairs,
    )


def warm_up_fits(program: Program, recipe: Recipe, mesh: Mesh, validation: evaluate.ValidationSet) -> bool:
    """Warm up; return False, on all processes, where one runs out of memory that no other waits for in a collective."""
    failure = None
    try:
        warm_up(program, recipe, mesh, validation.rows, validation.impossible)
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        failure = str(error)
    return not any(gather("out of memory in warm-up", failure))


def load_recipe(options: Options) -> LoadedRecipe:
    """Return the recipe, fitted to the tokens of its data folder where that has a manifest.

    Raises BadInput, also where it has fewer steps than the options ask for.
    """
    found = find(options.recipe_or_default, options.set_)
    check_steps(options, found.recipe, found.fields)
    folder = options.data or cache_folder() / "data" / found.recipe.data.name
    manifest = read_manifest(folder) if folder.is_dir() else None
    return fit(found, options.set_, manifest) if manifest else found


def load_recipe_and_mesh(options: Options) -> tuple[LoadedRecipe, Mesh]:
    """Return the recipe and its mesh, with no device used yet.

    Raises :class:`BadInput` for invalid options, and where the layout, the batch or the tables do not fit the mesh.
    """
    check_options(options)
    found = load_recipe(options)
    recipe = found.recipe
    mesh = mesh_for(options.mesh) or make_mesh()
    check_layout(options.layout, mesh, recipe)
    device = device_of(mesh, options.attention, recipe=recipe)
    for stage in recipe.stages:
        micro_batches(recipe, stage, mesh, device, options.micro_batch)
    fetcher(recipe, mesh, partitions(recipe.parameters, options.layout, mesh))
    return found, mesh


def opening_facts(
    options: Options,
    found: LoadedRecipe,
    recipe: Recipe,
    mesh: Mesh,
    device: Device,
    parts: Sequence[int],
    folder: Path,
    shards: Shards,
) -> list[tuple[str, str, str]]:
    """Return (name, formula, value) of every derived number of a run."""
    devices = provenance.devices()
    path = min(str(found.path), os.path.relpath(found.path), key=len)
    kernels, explanation = kernels_of(device, found.fields.get("FP8"))
    on = f"{devices['kind']}, mesh {dict(mesh.shape)}, layout {options.layout}"
    accumulated = "lanes (rows of a batch) / devices / rows per micro-batch, gradients accumulated"
    return [
        ("recipe", f"{path}, hash {found.hash[:12]}", recipe.name),
        *describe(recipe),
        ("devices", on, str(devices["count"])),
        ("micro-batches", accumulated, output.by_stage(parts) + output.pipeline_note(mesh, parts[-1])),
        ("kernels", explanation, kernels),
        ("data", str(folder), f"{shards.num_tokens:,} tokens"),
    ]


def start_from(found: LoadedRecipe, path: Path) -> LoadedRecipe:
    """Return ``found`` with the hash of its first parameters among its fields: another hash than from scratch."""
    given = {"init_from": export.fingerprint(path)}
    return dataclasses.replace(found, fields=found.fields | given, overrides=found.overrides | given)


def given_state(recipe: Recipe, given: Any, state: State) -> State:
    """Return a first state with the ``given`` parameters (NumPy), with the shardings of ``state``."""
    params = jax.tree.map(lambda array, old: put(array, old.sharding), given, state["params"])
    shardings = jax.tree.map(lambda array: array.sharding, state["optimizer"])
    optimizer = jax.jit(recipe.optimizer().init, out_shardings=shardings)(without_lazy(recipe, params))
    return state | {"params": params, "optimizer": optimizer}


def tokenizer_facts(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a manifest says of its tokenizer, for :func:`jspeed.corpus.tokenizers.tokenizer_of`, or None."""
    names = ("tokenizer", "vocab_size", "bos_id", "symbols", "pad_id")
    return {name: manifest[name] for name in names if name in manifest} or None


def identity(options: Options, found: LoadedRecipe, shards: Shards, val_shards: Shards) -> dict[str, Any]:
    """What must be equal for two processes to make one run: each of the recipe's fields by its name, and more."""
    named = as_json(found.fields) | {"recipe source": found.source_sha256, HASH: found.hash, "seed": options.seed}
    named |= {
        "training data": shards.fingerprint,
        "validation data": val_shards.fingerprint,
        "--layout": options.layout,
        "--steps": options.steps,
    }
    return named | {"--micro-batch": options.micro_batch, "--target-loss": options.target_loss}


def data_folder(recipe: Recipe, given: Path | None) -> Path:
    """Return the folder with the recipe's shards; prepares the standard library's where none is given."""
    if given is not None:
        return given
    try:
        if recipe.data.name == "stdlib":
            return prepare_stdlib()
        folder = cache_folder() / "data" / recipe.data.name
    except BadInput as error:
        raise BadInput(f"{error}, or give --data DIR") from None
    if not folder.is_dir():
        raise BadInput(
            f"recipe {recipe.name} needs FineWeb-format shards and {folder} does not exist; give --data DIR, or make "
            f"it with `jspeed prepare {recipe.data.name}`, or make shards of your own text with `jspeed prepare text "
            "FILES --out DIR`"
        )
    return folder


def open_loader(recipe: Recipe, shards: Shards, seed: int) -> TokenLoader:
    """Open the stream of training batches; it starts to read when the first one is asked for."""
    block = recipe.data.shuffle_block
    shuffle = Shuffle(seed, block) if block else None
    if recipe.data.windows == "random":
        shuffle = Shuffle(seed, unit="window")
    return TokenLoader(
        shards,
        lanes=recipe.lanes,
        schedule=recipe.stages,
        align=recipe.data.align,
        bos_id=recipe.data.bos_id,
        vocab_size=recipe.vocab_size,
        shuffle=shuffle,
        epochs=None,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
