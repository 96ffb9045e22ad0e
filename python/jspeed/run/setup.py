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
from jspeed.fields import as_json, flag
from jspeed.files import as_text, cache_folder, write_whole
from jspeed.parallel.layout import partitions
from jspeed.parallel.mesh import make_mesh, mesh_for, put
from jspeed.recipe import Recipe, without_lazy
from jspeed.record.preregistration import place_in_plan
from jspeed.record.remarks import taken_name
from jspeed.run import evaluate, export
from jspeed.run.checkpoint import HASH, Checkpoint, restore
from jspeed.run.clock import Clock
from jspeed.run.compute.compile_cache import use_compile_cache
from jspeed.run.compute.compiler import out_of_memory
from jspeed.run.compute.device import (
    Device,
    Placement,
    device_of,
    has_document_masks,
    keep_freed_memory,
    kernels_of,
    platform_problem,
)
from jspeed.run.compute.division import place
from jspeed.run.compute.known_faults import known_faults
from jspeed.run.compute.memory_fallbacks import memory_notes
from jspeed.run.compute.preflight import Preflight, compile_or_fall_back, count_kernels, preflight
from jspeed.run.compute.program import Program, eval_context, state_shardings, warm_up
from jspeed.run.compute.step import State, fetcher
from jspeed.run.evidence import provenance
from jspeed.run.evidence.provenance import StartEvidence, checksum
from jspeed.run.find_recipe import LoadedRecipe, find, fit
from jspeed.run.options import Options, check_options, check_steps
from jspeed.run.output import console as output
from jspeed.run.run_directory import RunDirectory, open_run_directory
from jspeed.sizes import describe


@dataclass(frozen=True)
class RunData:
    """What a run reads: shards of a ``folder`` with their ``manifest`` ({}: none), as batches and as evaluation rows.

    ``byte_pairs`` are GPT-2's tokens, of a recipe that is canonical."""

    folder: Path
    manifest: Mapping[str, Any]
    shards: Shards
    val_shards: Shards
    loader: TokenLoader
    rows: np.ndarray
    holdout: evaluate.Holdout | None
    byte_pairs: Sequence[bytes]


@dataclass(frozen=True)
class Setup:
    """A run that is ready to start: ``state`` is the first one.

    ``identity`` is what a checkpoint must share to be resumed; ``record`` is that of the checkpoint resumed from, or
    None; ``checked`` is what the preflight found."""

    options: Options
    found: LoadedRecipe
    data: RunData
    directory: RunDirectory
    program: Program
    validation: evaluate.ValidationSet
    state: State
    identity: dict[str, Any]
    record: Checkpoint | None
    at_start: StartEvidence
    checked: Preflight

    @property
    def recipe(self) -> Recipe:
        """The recipe, with --target-loss and the longest document of its evaluations."""
        return self.found.recipe

    @property
    def placement(self) -> Placement:
        """Where the run's programs run."""
        return self.checked.placement

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.directory.path


def set_up(options: Options, clock: Clock, console: Console) -> Setup:
    """Check all input, then compile and warm up. Raises :class:`BadInput`, leaving no run directory behind."""
    use_compile_cache()
    found, placement = load_recipe_and_placement(options)
    given = None
    if options.init_from is not None:
        given, found = export.read_parameters(options.init_from, found.recipe), start_from(found, options.init_from)
    if placement.device.platform == "cpu":
        keep_freed_memory()
    with clock.section("data"):
        found, data = open_data(options, found, placement.device)
    same = identity(options, found, data)
    require_equal(same | ways(options, placement, data))
    checked = Preflight(placement, own_kernels_asked=found.fields.get("OWN_KERNELS") == "on")
    if options.preflight:
        with clock.section("preflight"):
            checked = preflight(found.recipe, placement, found.fields, console)
    plan = place_in_plan(options.run_dir, found.hash, options.seed, options.steps)
    name = f"{found.recipe.name}-{{}}-seed{options.seed}"
    saving = options.checkpoint_every > 0
    directory = open_run_directory(options.run_dir, name, options.resume, saving, same, console, options.steps)
    try:
        if process_index() == 0 and directory.step is None:
            write_source(options, found, data, directory.path)
        say_opening(options, found, checked, data, console)
        program, validation, initial, checked = compile_and_warm_up(options, found, checked, data.rows, clock, console)
        say_fallbacks(found.recipe, program, checked, console)
        with clock.section("initial state"):
            state, after, record = first_state(options, found.recipe, program, checked.placement, given, directory)
            if record:
                data.loader.load_state_dict(record["loader"])
            at_start = StartEvidence(initial, after, provenance.git(), provenance.gpus(), plan)
    except BaseException:
        directory.abandon()
        raise
    directory.keep()
    return Setup(options, found, data, directory, program, validation, state, same, record, at_start, checked)


def load_recipe(options: Options) -> LoadedRecipe:
    """Return the recipe, fitted to the tokens of its data folder where that has a manifest.

    Raises BadInput, also where it has fewer steps than the options ask for.
    """
    found = find(options.recipe_or_default, options.set_)
    check_steps(options, found.recipe, found.fields)
    folder = options.data or cache_folder() / "data" / found.recipe.data.name
    manifest = read_manifest(folder) if folder.is_dir() else None
    return fit(found, options.set_, manifest) if manifest else found


def load_recipe_and_placement(options: Options) -> tuple[LoadedRecipe, Placement]:
    """Return the recipe, with --target-loss, and where it runs; several processes must call this together.

    Raises :class:`BadInput` for invalid options, and where the layout, the batch or the tables do not fit the mesh.
    """
    check_options(options)
    found = load_recipe(options)
    recipe = found.recipe
    if options.target_loss is not None:
        found = replace(found, recipe=replace(recipe, target_loss=options.target_loss))
    mesh = mesh_for(options.mesh) or make_mesh()
    device = device_of(mesh, options.attention, recipe=recipe)
    limits = [memory for memory in gather("memory", device.memory) if memory]
    if limits and device.memory != min(limits):  # all processes compile the same program
        device = device_of(mesh, options.attention, min(limits), recipe)
    own_kernels = device.own_kernels and found.fields.get("OWN_KERNELS") in ("auto", "on")
    placement = place(recipe, mesh, options.layout, replace(device, own_kernels=own_kernels), options.micro_batch)
    fetcher(recipe, mesh, partitions(recipe.parameters, options.layout, mesh))
    return found, placement


def open_data(options: Options, found: LoadedRecipe, device: Device) -> tuple[LoadedRecipe, RunData]:
    """Return the recipe, told the longest document of its evaluations, and what it reads.

    Raises :class:`BadInput` for data that are missing or that do not fit.
    """
    recipe, folder = found.recipe, data_folder(found.recipe, options.data)
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
    data = RunData(folder, manifest or {}, shards, val_shards, loader, rows, holdout, byte_pairs)
    return replace(found, recipe=recipe), data


def identity(options: Options, found: LoadedRecipe, data: RunData) -> dict[str, Any]:
    """What a checkpoint shares with the run that resumes from it: each of the recipe's fields by its name, and more.

    What is a flag of its own may differ."""
    named = as_json(found.fields) | {"recipe source": found.source_sha256, HASH: found.hash, "seed": options.seed}
    named |= {"training data": data.shards.fingerprint, "validation data": data.val_shards.fingerprint}
    named |= {"--layout": options.layout, "--steps": options.steps}
    return named | {"--micro-batch": options.micro_batch, "--target-loss": options.target_loss}


def ways(options: Options, placement: Placement, data: RunData) -> dict[str, Any]:
    """What must be equal besides for several processes to make one run."""
    device, names = placement.device, ("checkpoint_every", "preflight", "keep_best", "stop_at_target", "accuracy")
    how = {flag(name): getattr(options, name) for name in (*names, "resume")} | {"jax": jax.__version__}
    how |= {"mesh": dict(placement.mesh.shape), "--attention": device.attention, "attention backends": device.fallbacks}
    return how | {"second validation range": data.holdout and data.holdout.first}


def write_source(options: Options, found: LoadedRecipe, data: RunData, run_dir: Path) -> None:
    """Write the recipe, its tokenizer and the options: what a model in ``run_dir`` is read with."""
    given = dataclasses.asdict(options) | {"recipe": as_text(options.recipe_or_default)}
    given["sets"] = given.pop("set_")
    config = export.own_config(found, tokenizer_facts(data.manifest)) | {"options": given}
    write_whole(run_dir / "recipe.py", found.source)
    copy_tokenizer(data.folder, run_dir, config["tokenizer"])
    write_whole(run_dir / "config.json", json.dumps(config, indent=2, default=as_text) + "\n")


def say_opening(options: Options, found: LoadedRecipe, checked: Preflight, data: RunData, console: Console) -> None:
    """Print every derived number of the run as (name, formula, value), then what a user should know of it."""
    recipe, mesh, device, parts = found.recipe, checked.placement.mesh, checked.device, checked.placement.parts
    devices = provenance.devices()
    path = min(str(found.path), os.path.relpath(found.path), key=len)
    kernels, explanation = kernels_of(device, found.fields.get("FP8"))
    on = f"{devices['kind']}, mesh {dict(mesh.shape)}, layout {options.layout}"
    accumulated = "lanes (rows of a batch) / devices / rows per micro-batch, gradients accumulated"
    rows = [
        ("recipe", f"{path}, hash {found.hash[:12]}", recipe.name),
        *describe(recipe),
        ("devices", on, str(devices["count"])),
        ("micro-batches", accumulated, output.by_stage(parts) + output.pipeline_note(mesh, parts[-1])),
        ("kernels", explanation, kernels),
        ("data", str(data.folder), f"{data.shards.num_tokens:,} tokens"),
    ]
    output.opening(console, rows)
    departures = list(export.departures(options.init_from, found, data.manifest)) if options.init_from else []
    taken = taken_name(recipe.name, recipe.track or recipe.data.name, found.source_sha256)
    notes = platform_problem(device.platform), taken, data.holdout and data.holdout.note
    output.notes(console, found.note, *departures, device.note, *notes)


def compile_and_warm_up(
    options: Options, found: LoadedRecipe, checked: Preflight, rows: np.ndarray, clock: Clock, console: Console
) -> tuple[Program, evaluate.ValidationSet, str, Preflight]:
    """Return the largest program that a device can run, the rows on the devices, the checksum of the first state, and
    ``checked`` with the settings that could be compiled. Raises :class:`BadInput` where none can."""
    recipe, mesh = found.recipe, checked.placement.mesh
    while True:
        with clock.section("compile"):
            program, checked = compile_or_fall_back(recipe, checked, len(rows), console)
            checked = count_kernels(program, checked, found.fields.get("FP8"), console)
            if options.accuracy:
                counted = evaluate.compile_accuracy(recipe, checked.placement, program.eval_rows)
                program = replace(program, accuracy=counted)
        with clock.section("warm-up"), output.waiting(console, "warming up"):
            initial = checksum(program.init(options.seed))
            validation = evaluate.to_devices(rows, program.eval_rows, recipe, mesh)
            if warm_up_fits(program, recipe, mesh, validation):
                return program, validation, initial, checked
        checked = checked.with_device(memory=program.need - 1)
        output.notes(console, f"{program.need / 1e9:.1f} GB a device were too much to run; taking less at once")


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


def say_fallbacks(recipe: Recipe, program: Program, checked: Preflight, console: Console) -> None:
    """Print how the compiled steps take less memory than the opening says, and which known faults they meet."""
    if program.parts != checked.placement.parts:
        output.notes(console, f"{output.by_stage(program.parts)} micro-batches, which fit in memory")
    fallbacks = memory_notes(recipe.stages[-1], program.micro_tokens, program.head_chunk, program.remat)
    output.notes(console, *(f"{note}: the same training in less memory" for note in fallbacks))
    output.notes(console, *known_faults(checked.device, has_document_masks(recipe), program.texts))


def first_state(
    options: Options, recipe: Recipe, program: Program, placement: Placement, given: Any, directory: RunDirectory
) -> tuple[State, str, Checkpoint | None]:
    """Return the state to start from, the checksum of one drawn from the seed, and the record of the checkpoint.

    The state is drawn from the seed, with the parameters ``given`` if there are any, or a checkpoint's."""
    state, record = program.init(options.seed), None
    after_warm_up = checksum(state)
    if directory.step is not None:
        shapes, _ = state_shardings(recipe, placement.layout, placement.mesh)
        state, record = restore(directory.path / "checkpoints", directory.step, shapes)
    elif given is not None:
        state = given_state(recipe, given, state)
    jax.block_until_ready(state)
    return state, after_warm_up, record


def start_from(found: LoadedRecipe, path: Path) -> LoadedRecipe:
    """Return ``found`` with the hash of its first parameters among its fields: another hash than from scratch."""
    given = {"init_from": export.fingerprint(path)}
    return replace(found, fields=found.fields | given, overrides=found.overrides | given)


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
