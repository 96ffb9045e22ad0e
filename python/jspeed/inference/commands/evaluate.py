"""``jspeed evaluate``: validation loss of a trained model, HellaSwag, or lm-eval's tasks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jspeed.base.files import write_whole
from jspeed.base.standard_streams import without_logs
from jspeed.cli.flags import Command, check_folders, refuse
from jspeed.fields import Axes, Count, File, Folder, Wants

if TYPE_CHECKING:
    from jspeed.inference.trained import Model


def evaluate(
    model: Annotated[Path, Wants("MODEL", positional=True)],
    data: Folder | None = None,
    tokens: Count | None = None,
    accuracy: bool = False,
    hellaswag_: Annotated[str | None, Wants("FILE|download")] = None,
    tasks: Annotated[str | None, Wants("NAME,...")] = None,
    items: Count | None = None,
    mesh: Axes | None = None,
    json_: File | None = None,
    trust: bool = False,
) -> None:
    """Measure a trained model: validation loss and bits per byte on a folder of shards, HellaSwag,
    or lm-eval's tasks.

    Args:
        model: A run directory, one of its checkpoints (RUN/checkpoints/STEP), an exported folder,
            or a folder with GPT-2's config.json and model.safetensors.
        data: Folder whose validation shards to read; default: the recipe's data in the cache
            folder.
        tokens: How many of its validation tokens; default: as many as the recipe evaluates on.
        accuracy: Also report top-1 accuracy; doubles the time.
        hellaswag_: Score HellaSwag instead: path of hellaswag_val.jsonl, or download.
        tasks: Run these tasks of lm-eval (the extra eval) instead, for example
            lambada_openai,arc_easy.
        items: Use only the first N items, or of each task.
        mesh: Spread the parameters over these devices, for example data=8.
        json_: Also write the figures here.
        trust: Run the recipe.py of a folder that is none of jspeed's and was not trained here.
    """
    check_folders({"--json": json_})
    shard_flags: dict[str, object] = {"--data": data, "--tokens": tokens, "--accuracy": accuracy}
    if tasks is not None:
        why, idle = "--tasks asks lm-eval", shard_flags | {"--hellaswag": hellaswag_}
    elif hellaswag_ is not None:
        why, idle = "--hellaswag scores its own items", shard_flags
    else:
        why, idle = "without --hellaswag or --tasks there are no items", {"--items": items}
    refuse(idle, why)
    with without_logs():
        from jspeed.base.compile_cache import use_compile_cache
        from jspeed.cli.satellites import hooks
        from jspeed.inference.trained import load_model
        from jspeed.parallel.mesh import mesh_for
        from jspeed.run.setup import data_folder

    use_compile_cache()
    loaded = load_model(model, mesh_for(mesh), trust)
    if tasks is not None:
        report = on_tasks(loaded, [name.strip() for name in tasks.split(",")], items)
    elif hellaswag_ is not None:
        report = on_hellaswag(loaded, hellaswag_, items)
    else:
        report = on_shards(loaded, data_folder(loaded.recipe, data, hooks()), tokens, accuracy)
    if json_:
        write_whole(json_, json.dumps(report, indent=2) + "\n")


def on_tasks(model: Model, tasks: Sequence[str], items: int | None) -> dict[str, Any]:
    """Run lm-eval's ``tasks``; print and return their figures, by task."""
    from jspeed.inference.harness import run_tasks

    report = run_tasks(model, tasks, items)
    for name, figures in report.items():
        for metric, value in figures.items():
            if isinstance(value, float) and "_stderr" not in metric:
                error = figures.get(metric.replace(",", "_stderr,"))
                spread = f" +- {error:.4f}" if isinstance(error, float) else ""
                print(f"{name}: {metric.removesuffix(',none')} {value:.4f}{spread}")
    return report


def on_hellaswag(model: Model, file: str, items: int | None) -> dict[str, Any]:
    """Score HellaSwag under a progress bar; print and return the accuracies. ``file`` is a path, or
    ``download``."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from jspeed.corpus.download import fetch
    from jspeed.inference.score import HELLASWAG, hellaswag, read_hellaswag

    chosen = read_hellaswag(fetch(HELLASWAG) if file == "download" else Path(file))[:items]
    columns = (TextColumn("items"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True
    ) as bar:
        task = bar.add_task("items", total=len(chosen))
        for scored in hellaswag(model, chosen):
            bar.update(task, completed=scored.items)
    done, right, right_mean = scored
    print(
        f"HellaSwag, {done:,} items: acc {right / done:.4f}, acc_norm {right_mean / done:.4f}"
        " (chance 0.25)"
    )
    return {"items": done, "acc": right / done, "acc_norm": right_mean / done}


def on_shards(model: Model, folder: Path, tokens: int | None, accuracy: bool) -> dict[str, Any]:
    """Measure the loss on validation shards; print and return it, in nats and in bits per byte."""
    from jspeed.data.tokens import unit_of
    from jspeed.inference.score import validate

    if model.recipe.beside and model.trained:
        without = ", accuracy without" if accuracy else ""
        seed, steps = model.trained
        print(
            f"loss with an index of what {steps} steps with seed {seed} read of {folder}{without}"
        )
    elif model.recipe.beside:
        print(
            f"{model.recipe.name} is told that nothing was found: nothing here says what its run"
            " had read"
        )
    result = validate(model, folder, tokens, accuracy)
    print(
        f"{result.loss:.4f} nats/{unit_of(model.facts)}, {result.bits_per_byte:.4f} bits/byte on "
        f"{result.tokens:,} tokens ({result.bytes:,} bytes) of {folder}"
        + ("" if result.accuracy is None else f"; accuracy {result.accuracy:.4f}")
    )
    return dict(vars(result))


COMMAND = Command(
    evaluate,
    (
        "runs/mine  # loss and bits per byte on the recipe's own validation tokens",
        "runs/mine --data shards  # on those of another folder",
        "gpt2/ --hellaswag download --items 500  # GPT-2's accuracy on 500 items of HellaSwag",
    ),
)
