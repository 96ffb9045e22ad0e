"""What the board adds to a run: its place in a plan, remarks by its track, the parent's curve."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jspeed.base.plots import load_matplotlib
from jspeed.board.records import remarks, store
from jspeed.board.records.preregistration import announcement_of, lies_in_plan
from jspeed.board.views import loss_plot
from jspeed.recipe import Recipe
from jspeed.record.schema import Unsealed
from jspeed.run.hooks import Hooks


def second_range(recipe: Recipe) -> int | None:
    """Return the first token of the second range that the recipe's track asks for.

    A track is known in a checkout only, as runs that count are made in one.
    """
    if not recipe.track:
        return None
    track = remarks.family(recipe.track, remarks.RECORDS).get(recipe.track)
    return track.rules.get("holdout.first") if track else None


def notes(recipe: Recipe, sha: str) -> Sequence[str]:
    """Return a note if another recipe has this one's name."""
    clash = remarks.name_clash(recipe.name, recipe.track or recipe.data.name, sha)
    return [clash] if clash else []


def draw(
    run_dir: Path,
    run: Unsealed,
    train: Sequence[tuple[float, float]],
    stages: Sequence[float],
    unit: str,
) -> None:
    """Draw the losses of the run beside those of its parent's newest record, where that has the
    same validation, as loss.svg."""
    loss_plot.loss_svg(
        run_dir / "loss.svg",
        train=train,
        val=[(point["timed_seconds"], point["val_loss"]) for point in run["curve"]],
        target=run["target_loss"],
        title=f"{run['recipe']}, seed {run['seed']}, {run['devices']['kind']}",
        unit=unit,
        stages=stages,
        parent=parent_curve(run),
    )


def parent_curve(
    run: Unsealed, records: Path = remarks.RECORDS
) -> tuple[str, list[tuple[float, float | None]]] | None:
    """Return a label and the validation losses by timed seconds of a newest record: the parent's of
    ``run``, or, where fields are set, its own recipe's.

    None where there is no record on the same track of the same validation tokens, as in an
    installed package.
    """
    name = run["recipe"] if run["overrides"] else run["parent"]
    record = store.newest(records, run["track"], name) if name else None
    tokens = run["data"]["val_sha256"]
    if record is None or tokens is None or record["data"].get("val_sha256") != tokens:
        return None
    last = (
        ""
        if record["val_loss"] is None
        else f", {record['val_loss']:.3f} in {record['timed_seconds']:.0f} s"
    )
    elsewhere = "" if record["devices"]["kind"] == run["devices"]["kind"] else ", another machine"
    points = [(point["timed_seconds"], point["val_loss"]) for point in record["curve"]]
    whose = "recorded" if run["overrides"] else "parent"
    return f"{whose} {record['recipe']}{last}{elsewhere}", points


def add(hooks: Hooks) -> Hooks:
    """Return ``hooks`` with this room's."""
    return replace(
        hooks,
        announced=lies_in_plan,
        announcement_of=announcement_of,
        second_range=second_range,
        notes=notes,
        remarks=remarks.remarks,
        before_end=load_matplotlib,
        draw=draw,
    )
