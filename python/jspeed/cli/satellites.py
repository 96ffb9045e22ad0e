"""The one table that names rooms which can be taken away: commands and additions to a run, and
where they are. A room that is not there is left out."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from jspeed.errors import BadInput

if TYPE_CHECKING:
    from jspeed.run.hooks import Hooks

COMMANDS = {  # name: module, whose COMMAND it is, and what it does
    "run": ("jspeed.cli.run", "Train a recipe to its target loss under the clock"),
    "launch": (
        "jspeed.cluster.command",
        "Start and watch the processes of one run on several GPUs or nodes, with torchrun's flags",
    ),
    "prepare": (
        "jspeed.corpus.command",
        "Turn documents into token shards, or download well-known data",
    ),
    "plan": (
        "jspeed.plan.command",
        "Predict memory, time and bottlenecks of a recipe on GPUs that are absent",
    ),
    "bench": (
        "jspeed.cli.bench",
        "Benchmark the loader, training steps, generation and tokenising",
    ),
    "leaderboard": (
        "jspeed.board.command",
        "Add runs, check every number, show the board, compare, race and reproduce recipes",
    ),
    "audit": (
        "jspeed.inference.commands.audit",
        "Score a run's parameters again, with probes drawn anew",
    ),
    "sample": ("jspeed.inference.commands.sample", "Generate text from a trained model"),
    "evaluate": ("jspeed.inference.commands.evaluate", "Measure a trained model on unseen text"),
    "export": ("jspeed.inference.commands.export", "Export a trained model as safetensors"),
    "doctor": (
        "jspeed.doctor.command",
        "Report this machine's devices, kernels, caches, data and extras",
    ),
}
# What rooms add to a run: each module's ``add``, in this order.
HOOKS = (
    "jspeed.cluster.hooks",
    "jspeed.corpus.hooks",
    "jspeed.board.hooks",
    "jspeed.inference.hooks",
    "jspeed.host_table.hooks",
    "jspeed.kernels.preflight.hooks",
    "jspeed.saved.hooks",
)
SHARDS = "jspeed.corpus.shards.show"  # ``python -m jspeed.data``
SERIES = "jspeed.board.series.preregistered"  # ``jspeed run --plan``
RANK = "jspeed.cluster.rank"
JOIN = "jspeed.cluster.join"  # :func:`jspeed.join`


def present(module: str) -> bool:
    """Whether the room of a module is installed."""
    room = ".".join(module.split(".")[:2])
    found = find_spec(room)
    return found is not None and found.origin is not None


def load(module: str, what: str) -> Any:
    """Return a module. Raises BadInput, naming ``what`` was asked for, where its room is not
    installed."""
    if not present(module):
        room = ".".join(module.split(".")[:2])
        raise BadInput(f"{what} needs {room}, which is not installed; install jspeed whole")
    return import_module(module)


def commands() -> dict[str, str]:
    """Return what each command does that is installed."""
    return {name: about for name, (module, about) in COMMANDS.items() if present(module)}


def command(name: str) -> Any:
    """Return the command, or group of commands, of this name."""
    return load(COMMANDS[name][0], f"jspeed {name}").COMMAND


def rank_of(environment: Mapping[str, str]) -> Any:
    """Return the rank that a launcher has given this process (:class:`jspeed.cluster.rank.Rank`),
    None for a single process. Raises BadInput for half of its variables."""
    return import_module(RANK).find_rank(environment) if present(RANK) else None


def hooks() -> "Hooks":
    """Return what all rooms that are installed add to a run."""
    from jspeed.run.hooks import NO_HOOKS

    added = NO_HOOKS
    for module in filter(present, HOOKS):
        added = import_module(module).add(added)
    return added
