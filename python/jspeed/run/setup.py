"""Set up a run before the clock starts: recipe, devices, data, run directory, compiled programs,
warm-up, state."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jspeed.base import processes
from jspeed.base.beside import Knowing
from jspeed.base.compile_cache import use_compile_cache
from jspeed.base.files import as_text, cache_folder, write_whole
from jspeed.base.processes import gather, require_equal
from jspeed.data import Shards, Shuffle, TokenLoader, find_split
from jspeed.data.manifest import read_folder
from jspeed.data.recipe_compatibility import check_compatible
from jspeed.data.tokens import TOKENIZERS, copy_tokenizer
from jspeed.errors import BadInput
from jspeed.fields import as_json, flag
from jspeed.parallel.layout import partitions
from jspeed.parallel.mesh import make_mesh, mesh_for, request_cpu_devices
from jspeed.recipe import Recipe
from jspeed.record import provenance
from jspeed.record.provenance import StartEvidence, checksum
from jspeed.record.sizes import describe
from jspeed.run import console as output
from jspeed.run import evaluate, export
from jspeed.run.checkpoint import HASH, SameRun, restore
from jspeed.run.clock import Clock
from jspeed.run.compute import host_tables
from jspeed.run.compute.device import (
    Device,
    Placement,
    attending_of,
    choices,
    device_of,
    keep_freed_memory,
    memory_of,
    platform_problem,
)
from jspeed.run.compute.division import devices_of_cpu, memory_notes, place
from jspeed.run.compute.host_tables import HostTables
from jspeed.run.compute.program import (
    Program,
    check_state_fits,
    eval_context,
    state_shardings,
)
from jspeed.run.compute.step import State, fetcher, with_parameters, without_jit
from jspeed.run.compute.warm_up import warm_up_fits
from jspeed.run.evidence.foreign_code import remember
from jspeed.run.evidence.stream import Facts, facts
from jspeed.run.find_recipe import LoadedRecipe, checked_if_it_fails, load_recipe
from jspeed.run.hooks import NO_HOOKS, Hooks
from jspeed.run.options import Options, check_options
from jspeed.run.run_directory import RunDirectory, open_run_directory

MAKES_ITS_OWN = (
    "only jspeed run takes programs that were made elsewhere, and a preregistered run makes its own"
)


@dataclass(frozen=True)
class RunData:
    """What a run reads: shards of a ``folder`` with their ``manifest`` ({}: none), as batches and
    as lanes of the evaluation.

    ``byte_pairs`` are GPT-2's tokens, of a recipe that is canonical; ``files`` says which files the
    shards were before they were read."""

    folder: Path
    manifest: Mapping[str, Any]
    shards: Shards
    val_shards: Shards
    loader: Any
    lanes: np.ndarray
    holdout: evaluate.HoldoutLanes | None
    byte_pairs: Sequence[bytes]
    files: Facts


@dataclass(frozen=True)
class Setup:
    """A run that is ready to start: ``state`` is the first one.

    ``identity`` is what a checkpoint must share to be resumed."""

    options: Options
    loaded: LoadedRecipe
    data: RunData
    directory: RunDirectory
    program: Program
    validation: evaluate.ValidationSet
    state: State
    identity: SameRun
    at_start: StartEvidence
    placement: Placement

    @property
    def recipe(self) -> Recipe:
        """The recipe, with --target-loss and the longest document of its evaluations."""
        return self.loaded.recipe

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.directory.path


def set_up(
    options: Options,
    clock: Clock,
    console: Console,
    hooks: Hooks = NO_HOOKS,
    saves: bool = False,
) -> Setup:
    """Check all input, then compile and warm up. Raises :class:`BadInput`, leaving no run directory
    behind. ``saves``: where nothing announced the run, programs are loaded that such a run has
    saved (:mod:`jspeed.saved`)."""
    alone, announced = saves, bool(hooks.announced(options.run_dir))
    use_compile_cache(announced)
    saves = alone and not announced
    if options.programs is not None and not saves:
        raise BadInput(f"--programs: {MAKES_ITS_OWN}; leave it out")
    loaded, placement = load_recipe_and_placement(options, hooks, alone)
    tables = None
    if loaded.recipe.on_host:
        tables = hooks.host_tables(loaded.recipe, placement.mesh)
    first_params = None
    if options.init_from is not None:
        first_params = hooks.read_parameters(options.init_from, loaded.recipe)
        loaded = start_from(loaded, options.init_from)
    if placement.device.platform == "cpu":
        keep_freed_memory()
    with clock.section("data"):
        loaded, data = open_data(options, loaded, placement.device, hooks)
    identity = identity_of(options, loaded, data)
    require_equal(identity | settings_of(options, placement, data))
    if options.preflight:
        with clock.section("preflight"):
            placement = hooks.preflight(loaded.recipe, placement, console)
    commit, code = provenance.git(), provenance.code()
    announced_by = hooks.announcement_of(options.run_dir, loaded.hash, options.seed, options.steps)
    directory = open_run_directory(options, loaded.recipe.name, identity, console)
    try:
        if processes.index() == 0 and directory.checkpoint is None:
            write_source(options, loaded, data, directory.path)
        say_opening(options, loaded, placement, data, console, hooks)
        output.notes(console, provenance.why_no_commit(commit))
        program, validation, initial, placement = compile_and_warm_up(
            options, loaded, placement, data.lanes, clock, console, hooks, saves, tables
        )
        placement = with_less_memory(loaded.recipe, program, placement, console, hooks)
        with clock.section("initial state"):
            state, after = first_state(
                options, loaded.recipe, program, placement, first_params, directory
            )
            if directory.checkpoint:
                data.loader.load_state_dict(directory.checkpoint["loader"])
            at_start = StartEvidence(initial, after, commit, code, provenance.gpus(), announced_by)
    except BaseException:
        directory.abandon()
        raise
    directory.keep()
    return Setup(
        options, loaded, data, directory, program, validation, state, identity, at_start, placement
    )


def load_recipe_and_placement(
    options: Options, hooks: Hooks = NO_HOOKS, alone: bool = False
) -> tuple[LoadedRecipe, Placement]:
    """Return the recipe, with --target-loss, and where it runs; several processes must call this
    together. In a process that is this run ``alone``, the cores of a CPU become devices.

    Tables that do not fit are the host's, as with ``--table host``. Raises :class:`BadInput` for
    invalid options, and where the layout, batch or tables do not fit the mesh, or the state memory.
    """
    check_options(options)
    loaded = load_recipe(options, trace=False)
    recipe = loaded.recipe
    if options.target_loss is not None:
        loaded = replace(loaded, recipe=replace(recipe, target_loss=options.target_loss))
    if alone and options.mesh is None and processes.count() == 1 and not without_jit():
        with suppress(RuntimeError):  # a recipe's file may have asked for JAX's devices already
            request_cpu_devices({"data": devices_of_cpu(recipe, options.micro_batch)})
    mesh = mesh_for(options.mesh) or make_mesh()
    # all processes compile the same program
    memory = min(filter(None, gather("memory", memory_of(mesh))), default=None)
    asked = options.attention, memory, recipe, loaded.fields, options.micro_batch
    device = device_of(mesh, *asked)
    fetcher(recipe, mesh, partitions(recipe.parameters, options.layout, mesh))

    def placed(recipe: Recipe) -> Placement:
        placement = place(recipe, mesh, options.layout, device)
        with checked_if_it_fails(loaded):
            check_state_fits(recipe, placement, loaded.fields)
        return placement

    given = options.init_from is not None
    how = options.table, given, placed, lambda moved: hooks.host_tables(moved, mesh)
    recipe, placement = host_tables.choose(loaded.recipe, *how)
    return replace(loaded, recipe=recipe), placement


def open_data(
    options: Options, loaded: LoadedRecipe, device: Device, hooks: Hooks
) -> tuple[LoadedRecipe, RunData]:
    """Return the recipe, told the longest document of its evaluations, and what it reads.

    Raises :class:`BadInput` for data that are missing or that do not fit.
    """
    recipe, folder = loaded.recipe, data_folder(loaded.recipe, options.data, hooks)
    shards, val_shards = find_split(folder, "train"), find_split(folder, "val")
    files = facts([*shards.paths, *val_shards.paths])
    manifest = read_folder(folder)
    needs, aligned = recipe.data, recipe.data.align is not None
    tokenizer = (
        loaded.fields["tokens"]["tokenizer"]
        if "tokens" in loaded.fields
        else TOKENIZERS.get(needs.name)
    )
    known = (recipe.name, recipe.vocab_size, needs.bos_id, aligned, tokenizer)
    check_compatible(folder, manifest, (shards, val_shards), *known)
    its = manifest["tokenizer"] if manifest else tokenizer
    byte_pairs = evaluate.byte_pairs(recipe, its, hooks.gpt2_byte_pairs)
    lanes = evaluate.read_lanes(val_shards, recipe)
    holdout = evaluate.read_holdout(val_shards, recipe, hooks.second_range(recipe))
    all_lanes = np.concatenate([lanes, holdout.lanes]) if holdout else lanes
    evaluate.check_documents(all_lanes, recipe, eval_context(recipe, device).stage.max_docs)
    recipe = replace(recipe, eval_max_doc_len=evaluate.longest_document(all_lanes, recipe))
    loader = open_stream(recipe, shards, options.seed, options.steps)
    data = RunData(
        folder, manifest or {}, shards, val_shards, loader, lanes, holdout, byte_pairs, files
    )
    return replace(loaded, recipe=recipe), data


def identity_of(options: Options, loaded: LoadedRecipe, data: RunData) -> SameRun:
    """What a checkpoint shares with the run that resumes from it: each of the recipe's fields by
    its name, and more.

    What is a flag of its own may differ."""
    return {
        **as_json(loaded.fields),
        **host_tables.place_of(loaded.recipe),
        "recipe source": loaded.source_sha256,
        HASH: loaded.hash,
        "seed": options.seed,
        "training data": data.shards.fingerprint,
        "validation data": data.val_shards.fingerprint,
        "--layout": options.layout,
        "--steps": options.steps,
        "--micro-batch": options.micro_batch,
        "--target-loss": options.target_loss,
    }


def settings_of(options: Options, placement: Placement, data: RunData) -> SameRun:
    """What must be equal besides the identity for several processes to make one run."""
    device = placement.device
    names = ("checkpoint_every", "preflight", "keep_best", "stop_at_target", "accuracy", "resume")
    how = {flag(name): getattr(options, name) for name in names}
    how |= {
        "jax": jax.__version__,
        "mesh": dict(placement.mesh.shape),
        "--attention": device.attention,
        "attention backends": device.fallbacks,
    }
    return how | {"second validation range": data.holdout and data.holdout.first}


def write_source(options: Options, loaded: LoadedRecipe, data: RunData, run_dir: Path) -> None:
    """Write the recipe, its tokenizer and the options: what a model in ``run_dir`` is read with."""
    given = dataclasses.asdict(options) | {"recipe": as_text(options.recipe_or_default)}
    given["sets"] = given.pop("set_")
    config = export.own_config(loaded, tokenizer_facts(data.manifest)) | {"options": given}
    write_whole(run_dir / "recipe.py", loaded.source)
    remember((run_dir / "recipe.py").read_bytes())
    copy_tokenizer(data.folder, run_dir, config["tokenizer"])
    write_whole(run_dir / "config.json", json.dumps(config, indent=2, default=as_text) + "\n")


def say_opening(
    options: Options,
    loaded: LoadedRecipe,
    placement: Placement,
    data: RunData,
    console: Console,
    hooks: Hooks,
) -> None:
    """Print every derived number of the run as (name, formula, value), then what a user should know
    of it."""
    recipe = loaded.recipe
    mesh, device, parts = placement.mesh, placement.device, placement.parts
    devices = provenance.devices()
    path = min(str(loaded.path), os.path.relpath(loaded.path), key=len)
    *chosen, first = choices(device)
    on = f"{devices['kind']}, mesh {dict(mesh.shape)}, layout {options.layout}"
    accumulated = (
        "lanes (rows of a batch) / devices / lanes of a micro-batch, gradients accumulated"
    )
    lines = [
        ("recipe", f"{path}, hash {loaded.hash[:12]}", recipe.name),
        *describe(recipe),
        ("devices", on, str(mesh.size)),
        (
            "micro-batches",
            f"{accumulated}; {first.value} {first.why}",
            output.by_stage(parts) + output.pipeline_note(mesh, parts[-1]),
        ),
        *((choice.name, choice.why, choice.value) for choice in chosen),
        ("data", str(data.folder), f"{data.shards.num_tokens:,} tokens"),
    ]
    lines += host_tables.opening(recipe)
    if isinstance(data.loader, Knowing):
        lines.append(data.loader.opening())
    output.opening(console, lines)
    start = options.init_from
    differences = hooks.departures(start, loaded, data.manifest) if start else ()
    notes = (
        platform_problem(device.platform),
        *hooks.notes(recipe, loaded.source_sha256),
        data.holdout and data.holdout.note,
        recipe.beside.warning(recipe, data.shards.num_tokens) if recipe.beside else None,
    )
    output.notes(console, loaded.note, *differences, device.note, *notes)


def compile_and_warm_up(
    options: Options,
    loaded: LoadedRecipe,
    placement: Placement,
    lanes: np.ndarray,
    clock: Clock,
    console: Console,
    hooks: Hooks,
    saves: bool,
    tables: HostTables | None = None,
) -> tuple[Program, evaluate.ValidationSet, str, Placement]:
    """Return the largest program that a device can run, the lanes on the devices, and the checksum
    of the first state. Last is the placement, with the settings that could be compiled. Raises
    :class:`BadInput` where none can."""
    recipe, mesh = loaded.recipe, placement.mesh

    def build(placement: Placement) -> Program:
        with checked_if_it_fails(loaded):
            return hooks.saved(loaded, placement, len(lanes), saves, options.programs)

    while True:
        with clock.section("compile"):
            program, placement = hooks.compiled(recipe, placement, console, build)
            if options.accuracy:
                counted = evaluate.compile_accuracy(recipe, placement, program.eval_lanes)
                program = replace(program, accuracy=counted)
            if tables:
                program = tables.serve(recipe, placement, program)
        with clock.section("warm-up"), output.waiting(console, "warming up"):
            state = program.init(options.seed)
            initial = checksum(state, program.sums)
            validation = evaluate.to_devices(lanes, program.eval_lanes, recipe, mesh)
            # Evaluations are off the clock: without a limit of memory their first is soon enough.
            tried = validation.evaluated if placement.device.memory else ()
            fits = warm_up_fits(program, state, recipe, mesh, *tried)
            del state  # what failed has not taken all of it
            if fits:
                return program, validation, initial, placement
        placement = placement.with_device(memory=program.need - 1)
        output.notes(
            console,
            f"{program.need / 1e9:.1f} GB a device were too much to run; taking less at once",
        )


def with_less_memory(
    recipe: Recipe, program: Program, placement: Placement, console: Console, hooks: Hooks
) -> Placement:
    """Return ``placement`` with how the compiled steps take less memory than the opening says.
    Print that, and which known faults they meet."""
    how = program.micro_tokens, program.head_chunk, program.remat
    less = [*memory_notes(recipe.stages[-1], *how)]
    if program.parts != placement.parts:
        less.insert(0, f"{output.by_stage(program.parts)} micro-batches, which fit in memory")
    faults = hooks.faults(placement.device, attending_of(recipe).packed, program.texts)
    output.notes(console, *less, *faults)
    return placement.with_device(less=tuple(less))


def first_state(
    options: Options,
    recipe: Recipe,
    program: Program,
    placement: Placement,
    first_params: Any,
    directory: RunDirectory,
) -> tuple[State, str]:
    """Return the state to start from, and the checksum of one drawn from the seed.

    The state is drawn from the seed, with ``first_params`` if there are any, or a checkpoint's."""
    state = program.init(options.seed)
    after_warm_up = checksum(state, program.sums)
    if directory.checkpoint:
        shapes, _ = state_shardings(recipe, placement.layout, placement.mesh)
        folder, step = directory.path / "checkpoints", directory.checkpoint["steps"]
        state = restore(folder, step, shapes, program.tables)
    elif first_params is not None:
        state = with_parameters(recipe, first_params, state)
    jax.block_until_ready(state)
    return state, after_warm_up


def start_from(loaded: LoadedRecipe, path: Path) -> LoadedRecipe:
    """Return ``loaded`` with the hash of its first parameters among its fields: another hash than
    from scratch."""
    init_from = {"init_from": export.fingerprint(path)}
    return replace(loaded, fields=loaded.fields | init_from, overrides=loaded.overrides | init_from)


def tokenizer_facts(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a manifest says of its tokenizer, to make it again, or None."""
    names = ("tokenizer", "vocab_size", "bos_id", "symbols", "pad_id")
    return {name: manifest[name] for name in names if name in manifest} or None


def data_folder(recipe: Recipe, given: Path | None, hooks: Hooks = NO_HOOKS) -> Path:
    """Return the folder with the recipe's shards: the ``given`` one, the one that ``hooks`` make,
    or the newest that was made before."""
    if given is not None:
        return given
    try:
        if made := hooks.text(recipe.data.name):
            return made
        folder = cache_folder() / "data" / recipe.data.name
    except BadInput as error:
        raise BadInput(f"{error}, or give --data DIR") from None
    if not folder.is_dir():
        made_before = folder.parent.glob(f"{folder.name}-[0-9]*/manifest.json")
        if newest := max(made_before, key=lambda path: path.stat().st_mtime, default=None):
            return newest.parent
        raise BadInput(
            f"recipe {recipe.name} needs FineWeb-format shards and {folder} does not exist; give"
            f" --data DIR, or make it with `jspeed prepare {recipe.data.name}`, or make shards of"
            " your own text with `jspeed prepare text FILES --out DIR`"
        )
    return folder


def open_loader(recipe: Recipe, shards: Shards, seed: int, all_lanes: bool = False) -> TokenLoader:
    """Open the stream of training batches, this process's lanes or all, as a recipe with a table on
    the host always has; it starts to read when one is asked for."""
    every = all_lanes or recipe.on_host
    index, count = (0, 1) if every else (jax.process_index(), jax.process_count())
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
        process_index=index,
        process_count=count,
    )


def open_stream(recipe: Recipe, shards: Shards, seed: int, steps: int | None) -> Any:
    """Open the stream of training batches with what the recipe wants beside their tokens, with room
    for all or the first ``steps``."""
    if recipe.beside is None:
        return open_loader(recipe, shards, seed)
    own = recipe.lanes // jax.process_count()
    lanes = slice(own * jax.process_index(), own * (jax.process_index() + 1))
    if recipe.on_host:
        lanes = slice(0, recipe.lanes)
    every = open_loader(recipe, shards, seed, all_lanes=True)
    return recipe.beside.open(every, recipe, steps, lanes)
