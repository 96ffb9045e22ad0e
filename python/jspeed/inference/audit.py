"""Audit a run: score its parameters again by the core's code, with probes drawn anew.

What shows this way: a loss that the parameters do not have, a recipe that looks ahead, other
validation tokens, constants in the evaluation. What does not: how the parameters were learned, and
in what time. For that somebody else runs the recipe again.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax

from jspeed.base.beside import defined_as
from jspeed.base.compile_cache import use_no_compile_cache
from jspeed.base.files import read_input, sha256_of
from jspeed.cli.satellites import hooks
from jspeed.errors import BadInput
from jspeed.parallel.mesh import put
from jspeed.record import provenance
from jspeed.record.audits import MOST_NUMBERS, MOST_PLACES, SAME, Audit
from jspeed.record.run_json import read_run
from jspeed.record.schema import Run
from jspeed.run import evaluate
from jspeed.run.clock import utc_now
from jspeed.run.compute.inside import Inside
from jspeed.run.compute.program import Program, compile_evaluation, state_shardings
from jspeed.run.evidence import probes
from jspeed.run.evidence.carried import carried
from jspeed.run.evidence.foreign_code import allow
from jspeed.run.evidence.probes import evaluate_holdout, sha256_of_lanes
from jspeed.run.evidence.source import beyond
from jspeed.run.evidence.unread import evaluate_unread
from jspeed.run.export import FILE, read_parameters
from jspeed.run.options import Options
from jspeed.run.setup import Setup, load_recipe_and_placement, open_data


class Finding(NamedTuple):
    """A line of an audit: what was looked at, what was found, and whether it is right."""

    what: str
    found: str
    right: bool


class Rescored(NamedTuple):
    """What was computed from the parameters: the loss, that on the second text (None: not here)
    with its hash, the probe, numbers in constants and places of numbers."""

    loss: float
    second: tuple[float | None, str] | None
    causality: dict[str, Any]
    numbers: int
    places: int
    calls: list[str]


def audit(
    run_path: Path, weights: Path | None, data: Path | None, trust: bool
) -> tuple[list[Finding], Audit]:
    """Score the ``weights`` of a run again on its validation tokens in ``data``.

    Returns what was found, and the audit to be kept where all of it is right. Raises
    :class:`BadInput` where a file that is needed is missing or is another one.
    """
    path, source = files_of(run_path)
    run = read_run(path)
    weights = weights or path.parent / FILE
    content = read_input(source, "restore it; it lies beside the record")
    if hashlib.sha256(content).hexdigest() != run["recipe_sha256"]:
        raise BadInput(f"{source} is not the recipe that {path} names by its SHA-256; restore it")
    allow(source, trust)
    with TemporaryDirectory() as folder:
        recipe = Path(folder, Path(run["recipe_source"]).name)  # which messages name
        recipe.write_bytes(content)
        setup, params = ready(run, recipe, weights, data)
        rescored = rescore(run, setup, params)
    found = list(findings(run, setup, rescored))
    return found, {
        "run": run["sha256"],
        "weights": sha256_of(weights / FILE if weights.is_dir() else weights),
        "made": utc_now(),
        "commit": provenance.git()["commit"],
        "machine": provenance.machine(),
        "val_loss": rescored.loss,
        "difference": abs(rescored.loss - (run["val_loss"] or 0.0)),
        "second": rescored.second[0] if rescored.second else None,
        "causality": rescored.causality,
        "numbers": {"evaluation": rescored.numbers},
    }


def files_of(run: Path) -> tuple[Path, Path]:
    """Return run.json and the recipe's source of ``run``: a run directory, or a record among the
    records."""
    if run.is_dir():
        return run / "run.json", run / "recipe.py"
    if run.name == "run.json":
        return run, run.with_name("recipe.py")
    return run, run.with_name(f"recipe-{read_run(run)['recipe_sha256'][:8]}.py")


def ready(run: Run, recipe: Path, weights: Path, data: Path | None) -> tuple[Setup, Any]:
    """Return a run that will not be made, with its evaluation compiled here, and its last
    parameters."""
    use_no_compile_cache()
    given = run["overrides"].items()
    sets = tuple(f"{name}={value!r}" for name, value in given if name.isupper())
    seed, target = run["seed"], run["target_loss"]
    options = Options(str(recipe), data=data, seed=seed, set_=sets, target_loss=target)
    loaded, placement = load_recipe_and_placement(options)
    if loaded.hash != run["recipe_hash"]:
        raise BadInput(
            f"{recipe.name} with the record's fields has recipe hash {loaded.hash[:12]}, and the"
            f" record {run['recipe_hash'][:12]}; audit it with the jspeed that made it"
        )
    loaded, of_data = open_data(options, loaded, placement.device, hooks())
    of_data.loader.close()
    known = loaded.recipe
    shardings = state_shardings(known, placement.layout, placement.mesh)[1]["params"]
    params = jax.tree.map(put, read_parameters(weights, known), shardings)
    inside, at_once = Inside(), placement.device.at_once
    padded, compiled = compile_evaluation(
        known, placement, at_once, len(of_data.lanes), inside=inside
    )
    none: Any = None  # it has no steps
    program = Program(
        none, (), compiled, none, at_once, padded,
        inside={"evaluation": inside}, others=(compiled,),
    )  # fmt: skip
    validation = evaluate.to_devices(of_data.lanes, padded, known, placement.mesh)
    if of_data.byte_pairs:
        validation.tokenizer_mask = evaluate.tokenizer_mask(
            known, of_data.byte_pairs, placement.mesh
        )
    setup = Setup(options, loaded, of_data, none, program, validation, none, {}, none, placement)
    return setup, params


def rescore(run: Run, setup: Setup, params: Any) -> Rescored:
    """Compute everything from the parameters."""
    losses, again = (
        evaluate.token_losses(setup.program.evaluate, params, setup.validation) for _ in range(2)
    )
    second: Any = None
    if "unread" in run:
        second = evaluate_unread(setup, run["steps"], params)
    elif "holdout" in run and (holdout := setup.data.holdout) and len(holdout.lanes):
        second = evaluate_holdout(setup, holdout, params)
    held = carried(setup.recipe, setup.program)
    return Rescored(
        evaluate.weighted_mean(losses, setup.validation),
        second and (second["val_loss"], second["sha256"]),
        probes.causality_of_run(setup, params, setup.data.lanes, losses, again),
        held["numbers"]["evaluation"] if held else 0,
        held["places"]["evaluation"] if held else 0,
        sorted(setup.program.host_calls(evaluation=True)),
    )


def findings(run: Run, setup: Setup, rescored: Rescored) -> Iterator[Finding]:
    """Yield what is found of the parameters of ``run``, one thing after the other."""
    recorded = run["val_loss"]
    digest = sha256_of_lanes(setup.data.lanes, setup)
    yield Finding("validation tokens", digest[:12], digest == run["data"]["val_sha256"])
    same = recorded is not None and abs(rescored.loss - recorded) <= SAME
    yield Finding("validation loss", f"{rescored.loss:.5f}, recorded {recorded}", same)
    drawn = rescored.causality
    says = f"{drawn['changed']:,} changed ends, leak {drawn['leak']:g}"
    yield Finding("causality", f"{says}, tolerance {drawn['tolerance']:g}", drawn["passed"])
    calls = rescored.calls
    yield Finding("calls to the host", ", ".join(calls) or "none", not calls)
    most = MOST_NUMBERS["evaluation"]
    held = f"{rescored.numbers:,} numbers, at most {most:,}"
    yield Finding("constants", held, rescored.numbers <= most)
    most = MOST_PLACES["evaluation"]
    held = f"{rescored.places:,}, at most {most:,}"
    yield Finding("places of numbers", held, rescored.places <= most)
    if beside := setup.recipe.beside:
        told_by = defined_as(beside) or "code of its own"
        yield Finding("what rows carry", told_by, told_by.startswith("jspeed."))
    more = list(beyond(setup.loaded.source))
    yield Finding("recipe's text", "; ".join(more) or "functions of arrays alone", not more)
    weighted = setup.recipe.weigh is not None
    yield Finding("weights of targets", "the recipe's" if weighted else "equal", not weighted)
    theirs = run.get("holdout") or run.get("unread")
    if theirs and rescored.second:
        loss, sha256 = rescored.second
        was = theirs["val_loss"]
        right = None not in (loss, was) and abs((loss or 0.0) - (was or 0.0)) <= SAME
        says = f"{loss:.5f}, recorded {was}"
        yield Finding("second text", says, right and sha256 == theirs["sha256"])
    elif theirs:
        yield Finding("second text", "the data here do not hold it", False)
