"""``jspeed run``: train a recipe to its target loss under the clock; the run directory holds the record."""

import os
from pathlib import Path
from typing import Annotated

from jspeed.cluster.rank import visible_gpus
from jspeed.commands.flags import Axes, Command, Fields, Folder, Wants
from jspeed.errors import first_line
from jspeed.files import cache_folder, write_whole
from jspeed.parallel import DEFAULT_LAYOUT
from jspeed.run.recipe_names import known_recipes
from jspeed.standard_streams import escaped, importing

BEST_ON_FINEWEB = "r29"
EMBEDDED = "stdlib"
RECIPE_HELP = (
    f"Name of a recipe ({', '.join(known_recipes())}), or path of a recipe file (FILE.py); default: "
    f"{BEST_ON_FINEWEB} with a GPU and FineWeb, else {EMBEDDED}."
)


def default_recipe(data: Path | None) -> str:
    """The best FineWeb recipe where there are a GPU and FineWeb's shards, else the one that needs neither."""
    shards = data or cache_folder() / "data" / "fineweb"
    return BEST_ON_FINEWEB if visible_gpus(os.environ) and shards.is_dir() else EMBEDDED


def write_samples(run_dir: Path) -> None:
    """Generate the recipe's samples with the trained model; print and save them."""
    from jspeed.inference.generate import Sampling, joined, sample
    from jspeed.inference.trained import load_model

    try:
        model = load_model(run_dir)
        asked = model.recipe.sample
        if not asked.number:
            return
        sampling = Sampling(asked.temperature, asked.top_k)
        texts = sample(model, [asked.prompt] * asked.number, asked.tokens, sampling)
        print(f"{run_dir}/samples.txt:\n{escaped(joined(texts))}")
        write_whole(run_dir / "samples.txt", joined(texts) + "\n")
    except Exception as error:  # no vocabulary, a recipe of its own kind, no memory, no room: the run ended well
        print(f"no sample: {first_line(error)}")


def run(
    recipe: Annotated[str | None, Wants("RECIPE", positional=True, help=RECIPE_HELP)] = None,
    data: Folder | None = None,
    seed: int = 1,
    steps: int | None = None,
    run_dir: Folder | None = None,
    layout: Annotated[str, Wants("NAME")] = DEFAULT_LAYOUT,
    mesh: Axes | None = None,
    show_recipe: bool = False,
    show_layout: bool = False,
    show_tiles: Annotated[str | None, Wants("NAME")] = None,
    micro_batch: Annotated[int | None, Wants("TOKENS")] = None,
    attention: Annotated[str | None, Wants("BACKEND")] = None,
    preflight: bool = True,
    target_loss: Annotated[float | None, Wants("LOSS")] = None,
    max_minutes: Annotated[float | None, Wants("M")] = None,
    set: Fields = (),
    progress: bool = True,
    log: Annotated[str | None, Wants("SINK,...")] = None,
    profile: int = 0,
    sample: bool = True,
    init_from: Folder | None = None,
    checkpoint_every: int = 0,
    keep_checkpoints: int = 2,
    keep_best: bool = False,
    stop_at_target: bool = False,
    resume: bool = False,
    plan: Annotated[str | None, Wants("n=N,seeds=A..B")] = None,
    coordinator: Annotated[str | None, Wants("HOST:PORT")] = None,
    processes: int | None = None,
    process_id: int | None = None,
) -> int:
    """Train a recipe to its target loss under the clock.

    Exit code: 0 reached the target or ran what was asked, 1 ended without reaching it, 2 bad input, 130 Ctrl-C,
    143 SIGTERM.

    Args:
        data: Folder of token shards, as jspeed prepare writes; default: the recipe's own data in the cache folder.
        seed: Seed of the initial weights and of the data order.
        steps: Stop after this many steps; every schedule stays as it is.
        run_dir: Folder to write; default: runs/RECIPE-TIME-SEED.
        layout: How parameters are sharded over the mesh: zero1 (each device owns a part of parameters and optimizer
            state), dp (each holds all), fsdp (gathered layer by layer), tp (tensor parallel: matmuls sharded), fsdp+tp,
            pp (layers in a pipeline); with +remat at the end activations are recomputed instead of stored, with +scan
            the layers are one loop, which compiles as fast for many as for one.
        mesh: Mesh axes and sizes, for example data=8 or data=4,model=2 or data=2,pipe=4; -1 is all remaining devices.
        show_recipe: Print the recipe's file, to copy and to change, and stop.
        show_layout: Print how each parameter would be sharded, and stop.
        show_tiles: Print which devices would hold each tile of the parameter of this name, and stop.
        micro_batch: Tokens a device takes at once; a step accumulates over the rest.
        attention: Attention backend instead of the one the device gets: xla, triton, cudnn, fa4 or (TPU) splash.
        preflight: Check attention and FP8 on the device before the clock, and fall back where one fails.
        target_loss: Validation loss to reach, in nats per token, instead of the recipe's.
        max_minutes: Stop after this many timed minutes.
        set: Replace upper-case fields of the recipe file, for example MUON_LR=0.03 LANES=8.
        progress: Show a bar under a live curve of the validation loss on a terminal; otherwise plain lines.
        log: Also send the curve to tensorboard, wandb, or both (tensorboard,wandb); the latter stays on disk unless
            WANDB_MODE says otherwise.
        profile: Trace this many steps with JAX's profiler into profile/ of the run directory.
        sample: Let the trained model write a text at the end, into samples.txt of the run directory.
        init_from: Start from these parameters: a run directory or exported folder of the same recipe, or for recipe
            gpt2 a folder with GPT-2's model.safetensors.
        checkpoint_every: Write a checkpoint every N steps and at the end, off the clock; 0 writes one on SIGTERM only.
        keep_checkpoints: How many of the newest checkpoints stay.
        keep_best: Also keep the parameters with the lowest validation loss, in best/ of the run directory, which other
            commands read like an exported folder.
        stop_at_target: Stop at the first evaluation that reaches the target loss. Such a run is shorter than the
            recipe's schedule and does not count as a record.
        resume: Resume from the newest undamaged checkpoint in --run-dir, on any mesh; start where there is none.
        plan: Make several preregistered runs one after another; plan.json lists them before the first: n=4,seeds=1..4.
        coordinator: HOST:PORT of process 0 when several processes make one run and no launcher says so.
        processes: How many processes there are.
        process_id: Which of them this one is, from 0.
    """
    with importing():
        from rich.console import Console

        from jspeed.run.find_recipe import find
        from jspeed.run.output.console import layout_table, tile_table
        from jspeed.run.setup import Options, load_recipe_and_mesh
        from jspeed.run.train import train
        from jspeed.series.preregistered import run_series

    options = Options(
        recipe=default_recipe(data) if recipe is None else recipe,
        data=data,
        seed=seed,
        steps=steps,
        run_dir=run_dir,
        layout=layout,
        mesh=mesh,
        micro_batch=micro_batch,
        attention=attention,
        preflight=preflight,
        target_loss=target_loss,
        max_minutes=max_minutes,
        sets=set,
        progress=progress,
        log=tuple(log.split(",")) if log is not None else (),
        profile=profile,
        sample=sample,
        init_from=init_from,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        keep_best=keep_best,
        stop_at_target=stop_at_target,
        resume=resume,
        coordinator=coordinator,
        processes=processes,
        process_id=process_id,
    )
    if show_recipe:
        print(find(options.recipe, set, trace=False).source, end="")
        return 0
    if show_layout or show_tiles is not None:
        found, on = load_recipe_and_mesh(options)
        if show_layout:
            layout_table(Console(highlight=False), found.recipe, layout, on)
        if show_tiles is not None:
            tile_table(Console(highlight=False), found.recipe, layout, on, show_tiles)
        return 0
    if plan is not None:
        return run_series(options, plan)
    return train(options, afterwards=write_samples if sample else None)


COMMAND = Command(
    run,
    (
        "  # the best recipe that can run here: stdlib, or r29 with a GPU and FineWeb",
        "--steps 20  # a short look; every schedule stays as it is",
        "stdlib --set MUON_LR=0.03 --seed 2  # fields of the recipe file changed",
        "stdlib --show-recipe  # its file, to copy (> mine.py) and to change",
        "mine.py --mesh data=8  # your own recipe, on eight devices (of a CPU: virtual ones)",
        "--plan n=5,seeds=1..5  # five preregistered runs, for the leaderboard",
        "--run-dir runs/long --checkpoint-every 500 --resume  # resumes where it was stopped",
    ),
    {
        "training": ("data", "seed", "set", "target_loss", "init_from", "show_recipe"),
        "placement": (
            *("mesh", "layout", "show_layout", "show_tiles", "micro_batch", "attention"),
            *("coordinator", "processes", "process_id"),
        ),
        "length": (
            "steps",
            "max_minutes",
            "stop_at_target",
            "checkpoint_every",
            "keep_checkpoints",
            "keep_best",
            "resume",
            "plan",
        ),
        "output": ("run_dir", "progress", "log", "profile", "sample"),
    },
)
