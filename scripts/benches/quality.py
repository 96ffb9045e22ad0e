"""Loss against tokens for all recipes at one small size, on the same tokens in the same order."""

import json
import math
import re
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console

from benches.versus import first_at, or_nan, our_run
from jspeed.base.files import write_whole
from jspeed.board.stats import better_than, freedom_of, pooled_sigma
from jspeed.board.views import loss_plot
from jspeed.cli.flags import check_folders
from jspeed.corpus import chunks
from jspeed.corpus.shards.folder import EncodedDocuments, write_folder
from jspeed.corpus.sources import text_files
from jspeed.corpus.tokenizers import tiktoken_encoding
from jspeed.data.manifest import Description, Split
from jspeed.errors import BadInput
from jspeed.fields import Count, File, Positive, Wants
from jspeed.plan.views.tables import Table
from jspeed.plan.views.terminal import print_table
from jspeed.recipe import Recipe
from jspeed.run.find_recipe import find

# GPT-2's first byte pairs: with all 50,257 the head would be most of the work at this width
VOCAB = 4096
VAL_TOKENS = 27_648
WIDTH = [
    "WIDTH=128",
    "MLP_WIDTH=512",
    "HEADS=2",
    f"VOCAB={VOCAB}",
    "COMPUTE=float32",
    f"EVAL_TOKENS={VAL_TOKENS}",
]
ROWS = [*WIDTH, "LAYERS=11", "LANES=2", "LANE_LEN=576", "EVAL_LEN=576"]
# Lanes, documents and windows shrink together: 384, 768 and 1,152 tokens a step. Batches shrink
# more than the number of steps, because schedules count updates. They are evaluated in long rows,
# of which few begin in the middle of a document.
LANES = [*WIDTH, "LANES=2", f"BOS={VOCAB - 1}", "BLOCK=16", "EVAL_LEN=4608"]
PACKED = [*LANES, "LANE_LEN=576", "MAX_DOCS=48"]
STAGED = [
    *LANES,
    "LANE_LENS=(192,384,576,576)",
    "MAX_DOC_LENS=(192,256,256,256)",
    "MAX_DOCS=(16,32,48,48)",
]
# Learning rates stay the recipes' own, except llmc's: AdamW wants a higher one at this width.
SETS = {
    "llmc": [*ROWS, "LEARNING_RATE=0.002"],
    "track3": ROWS,
    "track3-soap": ROWS,
    "r21": [*PACKED, "WINDOW=208"],
    "r29": [*PACKED, "MAX_DOC_LEN=256"],
    "r62": [*STAGED, f"BIGRAMS={5 * VOCAB}"],
    "r89": [*STAGED, f"BIGRAMS={15 * VOCAB // 2}", "MUDD_WIDTH=32"],
}
SETS["r92"] = [
    *LANES,
    "LANE_LENS=(192,384,384,576,576,480,256)",
    "MAX_DOC_LENS=(192,256,256,256,256,256,256)",
]
SETS["r92"] += [
    "MAX_DOCS=(16,32,32,48,48,40,24)",
    f"NGRAMS={2**17}",
    "MUDD_WIDTH=32",
    "MIX_GROUPS=8",
]
# As large a part of the vocabulary as at full size.
SETS["r92"] += [f"COLUMNS=(832,832,832,1168,2000,{VOCAB},{VOCAB})"]
# Its id for copying is none of the tokens'.
COPIES = [
    f"VOCAB={VOCAB + 8}",
    f"COPY={VOCAB}",
    f"COLUMNS=(832,832,832,1168,2000,{VOCAB + 8},{VOCAB + 8})",
]
SETS["jspeed3"] = [*SETS["r92"], *COPIES, "POINTER_WIDTH=64"]
BEGINNING = 256  # only the first 256 tokens of each document are used, for training and validation
IN_STEPS = (
    "STEPS",
    "WARMUP",
    "MOMENTUM_WARMUP",
    "MOMENTUM",
    "COOLDOWN",
    "SHARES",
    "PREFIX_SHARE",
    "LAST_STEPS",
)


def quality(
    texts: Annotated[tuple[Path, ...], Wants("FILE|FOLDER", positional=True)],
    recipes: Annotated[tuple[str, ...], Wants("NAME")] = ("r29", "r62", "r89"),
    shorter: Positive = 4.0,
    seeds: Count = 3,
    tokens: Count = 10_000_000,
    json_: File | None = None,
    svg: File | None = None,
) -> None:
    """Train recipes at width 128 on the same tokens in the same order, and compare them with the
    first of them.

    Args:
        texts: Text files, as prepare.py text takes them: all but the last train, and the last
            validates.
        recipes: Names, or files of recipes with one of those for a parent, each with changes of its
            fields after colons if any: r89:FINAL_RATE=0.3.
        shorter: Every recipe has its own number of steps divided by this, and every step it names.
        seeds: Runs of each recipe, with seeds 1, 2, ...
        tokens: The first so many train. Of a document only the beginning is used, in validation
            too, as recipes that bound documents read no more; and none is trained on twice.
        json_: Write curves and tokens needed here, after every run. Runs that it has already are
            not made again: an interrupted comparison resumes, and more seeds or recipes join it.
        svg: Draw the validation curves of seed 1 against tokens here.
    """
    check_folders({"--json": json_, "--svg": svg})
    sets = {label: settings(label, shorter) for label in recipes}
    trained = {label: tokens_after(label, sets[label]) for label in recipes}
    curves: dict[str, list[list[tuple[int, float]]]] = {
        label: [] for label in recipes
    } | read_curves(json_, shorter)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = write_tokens(folder / "tokens", texts, tokens)
        for label in recipes:
            check_enough(
                label, find(name_and_sets(label)[0], sets[label], trace=False).recipe, lengths
            )
        for seed in range(1, seeds + 1):
            for number, label in enumerate(recipes):
                if len(curves[label]) >= seed:
                    continue
                run_dir = folder / f"{number}-{seed}"
                run = our_run(
                    name_and_sets(label)[0],
                    folder / "tokens",
                    run_dir,
                    seed,
                    {"--target-loss": 0.1},
                    sets[label],
                )
                curves[label].append(
                    [
                        (trained[label][point["step"]], or_nan(point["val_loss"]))
                        for point in run["curve"]
                    ]
                )
                if json_:
                    found = {
                        "shorter": shorter,
                        "beginning": BEGINNING,
                        "curves": curves,
                        "compared": compare(curves),
                    }
                    write_whole(json_, json.dumps(found, indent=1) + "\n")
    rows = compare(curves)
    print_table(Console(), table(rows))
    if svg:
        points = {
            label: [(tokens / 1e6, loss) for tokens, loss in found[0]]
            for label, found in curves.items()
        }
        goal = rows[recipes[0]]["loss"]
        loss_plot.curves_svg(
            svg, points, goal, "width 128, same tokens in the same order", "million tokens"
        )


def read_curves(json_file: Path | None, shorter: float) -> dict[str, list[list[tuple[int, float]]]]:
    """Return the curves that ``json_file`` has, by recipe; the first is of seed 1.

    Raises:
        BadInput: They are of runs of another length.
    """
    if json_file is None or not json_file.exists():
        return {}
    try:
        found = json.loads(json_file.read_text())
        found["shorter"], found["curves"].items()
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise BadInput(
            f"{json_file} holds no curves of bench.py quality to continue; name another file"
        ) from None
    if found["shorter"] != shorter:
        raise BadInput(
            f"{json_file} is of --shorter {found['shorter']}, not {shorter}; name another file"
        )
    if found.get("beginning") != BEGINNING:
        raise BadInput(
            f"{json_file} is of other parts of documents than their first {BEGINNING} tokens; name"
            " another file"
        )
    return {
        label: [[(t, loss) for t, loss in curve] for curve in curves]
        for label, curves in found["curves"].items()
    }


def name_and_sets(label: str) -> list[str]:
    """Split ``NAME[:FIELD=VALUE ...]``; a value may have colons of its own."""
    return re.split(r":(?=[A-Z][A-Z0-9_]*=)", label)


def settings(label: str, shorter: float) -> list[str]:
    """Return the ``--set`` of a recipe at this size, ``NAME[:FIELD=VALUE ...]``."""
    name, *own = name_and_sets(label)
    sized = name if name in SETS else find(name, trace=False).recipe.parent
    if sized not in SETS:
        raise BadInput(
            f"recipe '{name}' has no small size here, nor its parent; those that have:"
            f" {', '.join(SETS)}"
        )
    fields = find(name, [*SETS[sized], *own], trace=False).fields
    # A cooldown may also be a fraction of the steps.
    counts = [field for field in IN_STEPS if not isinstance(fields.get(field, 0.0), float)]
    scaled = {field: fewer(fields[field], shorter) for field in counts}
    steps = scaled["STEPS"]
    if "RAILS" in fields:
        scaled["RAILS"] = fewer(fields["RAILS"][0], shorter), *fields["RAILS"][1:]
    if "LAST_TIED" in fields:  # in the same stage, after both steps of a pair
        stages = zip(accumulate(fields["STEPS"]), accumulate(steps), strict=True)
        scaled["LAST_TIED"] = max(end for own, end in stages if own <= fields["LAST_TIED"]) | 1
    total = steps if isinstance(steps, int) else sum(steps)
    evaluations = [f"EVAL_EVERY={max(1, total // 12)}"]
    rest = [word for word in own if word.split("=")[0] not in scaled]
    return [
        *SETS[sized],
        *(f"{field}={value!r}" for field, value in scaled.items()),
        *evaluations,
        *rest,
    ]


def tokens_after(label: str, sets: Sequence[str]) -> list[int]:
    """Return the tokens that a run has trained on after 0, 1, 2, ... steps."""
    recipe = find(name_and_sets(label)[0], sets, trace=False).recipe
    steps = (recipe.tokens_per_step(stage) for stage in recipe.stages for _ in range(stage.steps))
    return list(accumulate(steps, initial=0))


def fewer(steps: Any, shorter: float) -> Any:
    """Divide a number of steps, each of several, or those that points of a schedule lie at."""
    if isinstance(steps, Mapping):
        return {round(step / shorter): value for step, value in steps.items()}
    if isinstance(steps, tuple):
        return tuple(fewer(part, shorter) for part in steps)
    return max(1, round(steps / shorter))


def check_enough(label: str, recipe: Recipe, lengths: Sequence[int]) -> None:
    """Raise :class:`BadInput` where ``recipe`` would read documents of these ``lengths`` a second
    time."""
    cuts = [stage.max_doc_len for stage in recipe.stages if stage.max_doc_len]
    has = sum(min(length, *cuts) if cuts else length for length in lengths)
    if recipe.tokens > has:
        raise BadInput(
            f"{label} trains on {recipe.tokens:,} tokens and {len(lengths):,} documents have"
            f" {has:,} that it would read once; give more text, more --tokens, or a larger"
            " --shorter"
        )


def write_tokens(out: Path, texts: Sequence[Path], most: int) -> list[int]:
    """Write beginnings of documents, ``most`` tokens to train and those of the last file to
    validate, in GPT-2's first VOCAB - 1 byte pairs and a BOS token before each; return the lengths
    of those that train.

    Validation uses beginnings too, because that is what the model is trained on. Raises
    :class:`BadInput` for a single file.
    """
    import tiktoken

    gpt2 = tiktoken_encoding("gpt2")
    ranks = {piece: rank for piece, rank in gpt2._mergeable_ranks.items() if rank < VOCAB - 1}
    encoding = tiktoken.Encoding(
        "gpt2-short", pat_str=gpt2._pat_str, mergeable_ranks=ranks, special_tokens={}
    )
    *train, last = [path for _, path in text_files(texts)]
    if not train:
        raise BadInput(
            f"{last} is the only text file; give at least two: all but the last train, the last"
            " validates"
        )
    lengths: list[int] = []

    def documents(paths: Iterable[Path], split: Split, limit: int) -> Iterable[EncodedDocuments]:
        total = 0
        for path in paths:
            for segment in chunks.segments(path):
                for document in chunks.documents(segment):
                    # 16 letters a token suffice
                    start = encoding.encode_ordinary(document.decode()[: 16 * BEGINNING])
                    ids = np.array([VOCAB - 1, *start[: BEGINNING - 1]], np.uint16)
                    if split == "train":
                        lengths.append(len(ids))
                    yield EncodedDocuments(split, ids, np.array([len(ids)]))
                    if (total := total + len(ids)) > limit:
                        return

    def both() -> Iterable[EncodedDocuments]:
        yield from documents(train, "train", most)
        yield from documents([last], "val", 2 * VAL_TOKENS)

    # Ids are GPT-2's own, as ranks are; only the BOS token is another.
    source = {"texts": [path.name for path in texts]}
    description: Description = {
        "tokenizer": "gpt2",
        "vocab_size": VOCAB,
        "bos_id": VOCAB - 1,
        "source": source,
    }
    write_folder(out, both(), description, "small")
    return lengths


def compare(
    curves: Mapping[str, Sequence[Sequence[tuple[int, float]]]],
) -> dict[str, dict[str, Any]]:
    """Compare final losses with the first recipe's, and the tokens to the higher of the two mean
    final losses."""
    ends = {label: [curve[-1][1] for curve in found] for label, found in curves.items() if found}
    first, finite = next(iter(ends)), [each for each in ends.values() if math.isfinite(sum(each))]
    sigma, freedom = pooled_sigma(finite), freedom_of(finite)

    def needed(label: str, goal: float) -> float:
        return statistics.fmean(first_at(curve, goal) or curve[-1][0] for curve in curves[label])

    rows = {}
    for label, losses in ends.items():
        goal = max(statistics.fmean(losses), statistics.fmean(ends[first]))
        comparable = label != first and math.isfinite(sum(losses + ends[first]))
        p = None
        if sigma and comparable:
            p = better_than(losses, ends[first], sigma, freedom=freedom).p
        rows[label] = {
            "tokens": curves[label][0][-1][0],
            "losses": losses,
            "loss": statistics.fmean(losses),
            "goal": goal,
            "fraction": needed(label, goal) / needed(first, goal),
            "p": p,
        }
    return rows


def table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the comparison as a table."""
    first = next(iter(rows))
    columns = (
        "recipe",
        "tokens",
        "final loss",
        "runs",
        "at loss",
        f"tokens there, of {first}'s",
        f"p, below {first}",
    )
    cells = []
    for label, row in rows.items():
        p = "-" if row["p"] is None else f"{row['p']:.2g}"
        losses = f"{row['loss']:.4f}", str(len(row["losses"])), f"{row['goal']:.4f}"
        cells.append([label, f"{row['tokens']:,}", *losses, f"{row['fraction']:.2f}", p])
    return Table("loss against tokens", columns, cells)
