"""What may be added to a run, each by its name; a run to which nothing is added is whole."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from rich.console import Console

from jspeed.errors import BadInput
from jspeed.recipe import Recipe
from jspeed.record.schema import Announced, Unsealed
from jspeed.run import export
from jspeed.run.compute import checked
from jspeed.run.compute.checked import Build
from jspeed.run.compute.device import Device, Placement
from jspeed.run.compute.host_tables import HostTables
from jspeed.run.compute.program import Program, compile_program
from jspeed.run.find_recipe import LoadedRecipe
from jspeed.run.options import Options


@contextmanager
def alone(options: Options) -> Iterator[None]:
    """Make the run in this process alone. Raises BadInput where ``options`` name others."""
    if options.coordinator is not None or options.processes is not None:
        raise BadInput(
            "--coordinator and --processes need jspeed.cluster, which is not installed; leave them"
            " out"
        )
    yield


def no_vocabulary() -> Sequence[bytes]:
    """Raise BadInput: nobody here knows GPT-2's tokens."""
    raise BadInput("jspeed.corpus, which knows it, is not installed; install jspeed whole")


def no_host_tables(recipe: Recipe, mesh: Mesh) -> HostTables:
    """Raise BadInput: nobody here serves rows from the host's memory."""
    raise BadInput("--table host needs jspeed.host_table, which is not installed; leave it out")


def made_anew(
    loaded: LoadedRecipe, placement: Placement, lanes: int, keeps: bool, given: Path | None
) -> Program:
    """Compile the programs of a run: nobody here saves any, or sends them to other processes.
    Raises BadInput where a folder for them was ``given``."""
    if given:
        raise BadInput("--programs needs jspeed.saved, which is not installed; leave it out")
    return compile_program(loaded.recipe, placement, lanes)


def nothing(*_: object) -> None:
    """Add nothing."""


def no_notes(*_: object) -> Sequence[str]:
    """Say nothing."""
    return ()


@dataclass(frozen=True)
class Hooks:
    """What the rooms that can be taken away do in a run; each alone does what is said here.

    Of many processes: ``joined(options)`` is around the whole run: there they meet, and there they
    end together.

    Of text: ``text(name)`` returns the folder of the data set of this name, made where it is not
    there, or None. ``gpt2_byte_pairs()`` returns the bytes of each of GPT-2's tokens.

    Of other models: ``read_parameters(path, recipe)`` returns the parameters to start from, and
    ``departures(path, recipe with its fields, manifest)`` says how the run departs from what they
    are for.

    Of tables: ``host_tables(recipe, mesh)`` makes those of ``recipe.on_host`` in the host's memory,
    or this process's share, before anything is compiled. All processes call it together. Raises
    BadInput where they do not fit.

    Of devices: ``preflight(recipe, placement, console)`` returns the placement with what of its
    device works. ``compiled(recipe, that, console, build)`` makes its programs by
    ``build(placement)``, with less where they cannot be compiled. All processes call both, and
    agree. ``faults(device, whether documents are packed, the programs' texts)`` names versions that
    are known to be bad.

    ``saved(recipe with its fields, placement, evaluation's lanes, keeps, folder given for them)``
    compiles the programs. Where the run ``keeps`` them it loads those that the same run has made
    before. All processes call it, and one may compile for all.

    Of records: ``announced(run_dir)`` says whether a plan.json, which announces runs, lies beside
    ``run_dir``, and ``announcement_of(run_dir, recipe hash, seed, steps)`` returns what it
    says of the run. ``second_range(recipe)`` is the first token of the range of
    validation tokens that is evaluated once, at the end. ``notes(recipe, source's SHA-256)`` is
    said at the start, ``remarks(run)`` at the end. ``before_end()`` loads what drawing needs, in a
    thread beside the last evaluations. ``draw(run_dir, run, training losses by timed
    seconds, seconds at which stages began, unit)`` draws what run.json says.

    When the run has kept its parameters, process 0 calls ``afterwards(options, run_dir)``.
    """

    joined: Callable[[Options], AbstractContextManager[object]] = alone
    text: Callable[[str], Path | None] = nothing
    gpt2_byte_pairs: Callable[[], Sequence[bytes]] = no_vocabulary
    read_parameters: Callable[[Path, Recipe], Any] = export.read_parameters
    departures: Callable[[Path, LoadedRecipe, Mapping[str, Any]], Iterable[str]] = no_notes
    host_tables: Callable[[Recipe, Mesh], HostTables] = no_host_tables
    preflight: Callable[[Recipe, Placement, Console], Placement] = checked.unchecked
    compiled: Callable[[Recipe, Placement, Console, Build], tuple[Program, Placement]] = (
        checked.compile_together
    )
    faults: Callable[[Device, bool, Callable[[], Iterator[str]]], Sequence[str]] = no_notes
    saved: Callable[[LoadedRecipe, Placement, int, bool, Path | None], Program] = made_anew
    announced: Callable[[Path | None], bool | None] = nothing
    announcement_of: Callable[[Path | None, str, int, int | None], Announced | None] = nothing
    second_range: Callable[[Recipe], int | None] = nothing
    notes: Callable[[Recipe, str], Sequence[str]] = no_notes
    remarks: Callable[[Unsealed], Sequence[str]] = no_notes
    before_end: Callable[[], None] = nothing
    draw: Callable[[Path, Unsealed, Sequence[tuple[float, float]], Sequence[float], str], None] = (
        nothing
    )
    afterwards: Callable[[Options, Path], None] = nothing


NO_HOOKS = Hooks()
