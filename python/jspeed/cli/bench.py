"""``jspeed bench``: run the benchmarks in scripts/benches, which are in the repository only."""

import sys
from importlib import import_module

from jspeed.base.standard_streams import interruptible, without_logs
from jspeed.cli import repository
from jspeed.cli.flags import Command, Group
from jspeed.errors import BadInput

BENCHES = {
    "loader": (
        "loader",
        "The token loader on synthetic shards; exit code 1 when a gate does not hold",
    ),
    "index": (
        "index",
        (
            "The index of contexts: tokens a second and core; exit code 1 when it is too slow for a"
            " step"
        ),
    ),
    "rows": (
        "rows",
        ("The table in the host's memory: rows a second and core; exit code 1 when it is too slow"),
    ),
    "cpu": ("cpu", "Recipes to their end in turn, A B A B: their timed seconds"),
    "versus": (
        "peers",
        (
            "nanoGPT's, llm.c's and transformers' own code in turn with ours; exit code 1 where it"
            " is faster"
        ),
    ),
    "gpu": (
        "gpu",
        (
            "A training step of recipes: milliseconds, MFU, memory, kernels; or a race against"
            " another program"
        ),
    ),
    "fused": (
        "fused",
        "Milliseconds of each custom kernel and of its reference, as XLA compiles it",
    ),
    "quality": ("quality", "Recipes at width 128 on the same tokens: loss against tokens"),
    "layouts": ("layouts", "Which layouts each recipe takes, and why not the others"),
    "plans": (
        "plans",
        "Plans of all programs whose seconds are quoted, beside what was measured: plan.md",
    ),
    "pictures": ("pictures", "Pictures that no run and no plan makes: rooms, the first GPU"),
    "generate": ("text", "Tokens a second of generation, with the key-value cache and without"),
    "tokenise": ("text", "Tokens a second of tokenising, and of a plain loop over tiktoken"),
}


def load(name: str) -> Command:
    """Return one bench. Raises BadInput where there is no repository around this jspeed."""
    found = repository()
    if found is None:
        raise BadInput(
            "the benches are not installed with jspeed, but in its repository; clone that, and"
            f" call there `python scripts/bench.py {name}`"
        )
    sys.path.insert(0, str(found / "scripts"))
    with without_logs():
        module = import_module(f"benches.{BENCHES[name][0]}")
    return Command(interruptible()(getattr(module, name)))


COMMAND = Group(
    "Measure what jspeed promises, on the machine at hand.",
    {name: text for name, (_, text) in BENCHES.items()},
    load,
    (
        "loader --quick  # the token loader's gates, in seconds",
        "gpu --recipe r29  # a training step on the devices there are",
    ),
)
