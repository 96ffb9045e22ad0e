"""What the rooms that can be taken away add to a run: where each says so."""

from importlib import import_module
from importlib.util import find_spec

from jspeed.run.hooks import Hooks

ADDING = ("jspeed.cluster.hooks", "jspeed.corpus.hooks", "jspeed.series.hooks")


def present(module: str) -> bool:
    """Whether a module of a room is installed."""
    return find_spec(module.rpartition(".")[0]) is not None and find_spec(module) is not None


def hooks() -> Hooks:
    """Return what all rooms that are installed add to a run."""
    found = Hooks()
    for module in filter(present, ADDING):
        found = import_module(module).add(found)
    return found
