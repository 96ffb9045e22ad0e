"""The options of a run, which are the flags of ``jspeed run``: types, defaults and help. No jax in
here."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from jspeed.base.accelerators import visible_gpus
from jspeed.base.files import cache_folder
from jspeed.errors import BadInput, nearest
from jspeed.fields import (
    Axes,
    Count,
    CountOrZero,
    Fields,
    Folder,
    Positive,
    Wants,
    flag,
    integer,
    misfits,
)
from jspeed.parallel import DEFAULT_LAYOUT
from jspeed.recipes import known_recipes
from jspeed.record.schema import MOST_SEED

if TYPE_CHECKING:
    from jspeed.recipe import Recipe

BEST_ON_FINEWEB = "r29"
EMBEDDED = "stdlib"
PLACES = ["device", "host"]  # of a table, for --table
LOGS = ["tensorboard", "wandb"]  # where --log can send a curve
RECIPE_HELP = (
    f"Name of a recipe ({', '.join(known_recipes())}), or path of a recipe file (FILE.py); default:"
    f" {BEST_ON_FINEWEB} with a GPU and FineWeb, else {EMBEDDED}."
)


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Args:
        data: Folder of token shards, as jspeed prepare writes; default: the recipe's own data in
            the cache folder.
        seed: Seed of the initial weights and of the data order.
        steps: Stop after this many of the recipe's steps; every schedule stays as it is.
        run_dir: Folder to write; default: runs/RECIPE-TIME-SEED.
        layout: How parameters are sharded over the mesh: zero1 (each device owns a part of
            parameters and optimizer state), dp (each holds all), fsdp (gathered layer by layer), tp
            (tensor parallel: matmuls sharded), fsdp+tp, pp (layers in a pipeline); with +remat at
            the end activations are recomputed instead of stored, with +scan the layers are one
            loop, which compiles as fast for many as for one.
        mesh: Mesh axes and sizes, for example data=8 or data=4,model=2 or data=2,pipe=4; -1 is all
            remaining devices. Default: data over all; a CPU's cores are devices.
        micro_batch: Tokens a device takes at once; a step accumulates over the rest.
        attention: Attention backend instead of the device's: xla, triton, cudnn, cudnn_lanes or
            (TPU) splash.
        table: Where a table that is updated row by row lies: device, or host (in this machine's
            memory, served by Rust); default: on the devices if it fits there.
        programs: Load the run's compiled programs from this folder, and save there those that it
            lacks: for this machine and others like it, instead of the cache folder. They are code:
            take a folder that nobody else can write.
        preflight: Check attention and FP8 on the device before the clock, and fall back where one
            fails.
        target_loss: Validation loss to reach, in nats per token, instead of the recipe's.
        max_minutes: Stop after this many timed minutes.
        hang_after: End with exit code 75 when no step, evaluation or checkpoint ends for so many
            seconds, and keep the record; 0: never. Default: 900, on a CPU never.
        set_: Replace upper-case fields of the recipe file, for example MUON_LR=0.03 LANES=8.
        init_from: Start from these parameters: a run directory or exported folder of the same
            recipe, or for recipe gpt2 a folder with GPT-2's config.json and model.safetensors.
        checkpoint_every: Write a checkpoint every N steps and at the end, off the clock; 0 writes
            one on SIGTERM only.
        keep_checkpoints: How many of the newest checkpoints stay.
        keep_best: Also keep the parameters with the lowest validation loss, in best/ of the run
            directory, which other commands read like an exported folder.
        stop_at_target: Stop at the first evaluation that reaches the target loss. Such a run is
            shorter than the recipe's schedule and does not count as a record.
        resume: Resume from the newest undamaged checkpoint in --run-dir, on any mesh; start where
            there is none.
        coordinator: HOST:PORT of process 0 when several processes make one run and no launcher says
            so.
        processes: How many processes there are.
        process_id: Which of them this one is, from 0.
        progress: Show a bar under a live curve of the validation loss on a terminal; otherwise
            plain lines.
        log: Also send the curve to tensorboard, wandb, or both (tensorboard,wandb); the latter
            stays on disk unless WANDB_MODE says otherwise.
        accuracy: Also measure at each evaluation, off the clock, the share of validation tokens
            that the model predicts first, into metrics.jsonl.
        profile: Trace this many steps with JAX's profiler into profile/ of the run directory.
        sample: Let the trained model write a text at the end, into samples.txt of the run
            directory.
    """

    recipe: Annotated[str | None, Wants("RECIPE", positional=True, help=RECIPE_HELP)] = None
    data: Folder | None = None
    seed: Annotated[int, integer(0, MOST_SEED)] = 1
    steps: Count | None = None
    run_dir: Folder | None = None
    layout: Annotated[str, Wants("NAME")] = DEFAULT_LAYOUT
    mesh: Axes | None = None
    micro_batch: Annotated[Count | None, Wants("TOKENS")] = None
    attention: Annotated[str | None, Wants("BACKEND")] = None
    table: Annotated[str | None, Wants("PLACE")] = None
    programs: Folder | None = None
    preflight: bool = True
    target_loss: Annotated[float | None, Wants("LOSS")] = None
    max_minutes: Annotated[Positive | None, Wants("M")] = None
    hang_after: Annotated[CountOrZero | None, Wants("SECONDS")] = None
    set_: Fields = ()
    init_from: Folder | None = None
    checkpoint_every: CountOrZero = 0
    keep_checkpoints: Count = 2  # the newest, and the one before, should the newest be damaged
    keep_best: bool = False
    stop_at_target: bool = False
    resume: bool = False
    coordinator: Annotated[str | None, Wants("HOST:PORT")] = None
    processes: int | None = None
    process_id: int | None = None
    progress: bool = True
    log: Annotated[str | None, Wants("SINK,...")] = None
    accuracy: bool = False
    profile: CountOrZero = 0
    sample: bool = True

    @property
    def recipe_or_default(self) -> str:
        """The recipe; by default the best one with a GPU and FineWeb's shards, else one that needs
        neither."""
        if self.recipe is not None:
            return self.recipe
        with suppress(BadInput):  # no cache folder
            shards = self.data or cache_folder() / "data" / "fineweb"
            if visible_gpus(os.environ) and shards.is_dir():
                return BEST_ON_FINEWEB
        return EMBEDDED

    @property
    def sinks(self) -> tuple[str, ...]:
        """The names in ``log``, each once."""
        return (
            ()
            if self.log is None
            else tuple(dict.fromkeys(name.strip() for name in self.log.split(",")))
        )


def check_sinks(names: Sequence[str]) -> None:
    """Raise BadInput for a name that is no sink."""
    for name in names:
        if name not in LOGS:
            raise BadInput(
                f"--log {name} is unknown{nearest(name, LOGS)}; known: {', '.join(LOGS)}"
            )


def check_place(table: str | None) -> None:
    """Raise :class:`BadInput` for a ``--table`` that is no place of one."""
    if table is not None and table not in PLACES:
        raise BadInput(f"--table {table}: expected device or host{nearest(table, PLACES)}")


def check_options(options: Options) -> None:
    """Raise :class:`BadInput` for invalid option values, whatever the recipe."""
    for name, expected, found in misfits(options, Options):
        raise BadInput(f"{flag(name)} {getattr(options, name)}: expected {expected}, found {found}")
    check_sinks(options.sinks)
    check_place(options.table)
    if options.resume and options.run_dir is None:
        raise BadInput("--resume needs --run-dir; give the folder of the run to resume")


def check_steps(options: Options, recipe: "Recipe", fields: Mapping[str, Any]) -> None:
    """Raise :class:`BadInput` for more steps than ``recipe`` has, whose file has these
    ``fields``."""
    if options.steps is not None and options.steps > recipe.steps:
        longer = (
            f", or give --set STEPS={options.steps} for a longer one"
            if type(fields.get("STEPS")) is int
            else ""
        )
        raise BadInput(
            f"--steps {options.steps}: the schedule of recipe {recipe.name} has {recipe.steps:,}"
            f" steps, and --steps only cuts it short; leave it out{longer}"
        )
