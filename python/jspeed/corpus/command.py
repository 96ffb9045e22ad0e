"""``jspeed prepare``: turn documents into token shards, ready to train on, or download them
ready-made."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import TransferSpeedColumn as Speed

from jspeed.base.files import cache_folder
from jspeed.base.standard_streams import interruptible
from jspeed.cli.flags import Command, group_of
from jspeed.corpus import fineweb, named_data_sets, sources, split, tokenise
from jspeed.corpus.chunks import holds_carriage_returns
from jspeed.corpus.parallel_tokenise import Separator
from jspeed.corpus.shards.ready_tokens import convert_tokens
from jspeed.corpus.tokenise import Files, Fraction, Processes, Tokenising
from jspeed.corpus.tokenizers import named_facts
from jspeed.data.manifest import Manifest, complete_manifest
from jspeed.data.tokens import GPT2, SYMBOLS
from jspeed.errors import BadInput, say
from jspeed.fields import File, Folder, Wants, Whole

SHOWN = 5  # names of files that are passed over
Inputs = Annotated[tuple[Path, ...], Wants("FILE|FOLDER", positional=True)]
# by data
RECIPES = {
    "names": "microgpt-names",
    "shakespeare-char": "shakespeare-char",
    "tinystories": "tinystories",
}


def _default(name: str) -> Path:
    """Where ``jspeed run`` looks for the data called ``name``."""
    return cache_folder() / "data" / name


class Usual(NamedTuple):
    """What is in a manifest of data that are not of a user's own file."""

    tokenizer: str
    source: Mapping[str, object]  # some of its facts

    def describes(self, manifest: Manifest) -> bool:
        source = manifest["source"].items()
        return self.tokenizer == manifest["tokenizer"] and self.source.items() <= source


def _prepare_named(
    name: str, out: Path | None, work: Callable[..., object], usual: Usual | None = None
) -> None:
    """As :func:`_prepare` in ``out``, or where a run finds the data called ``name``; with how to
    train its recipe. Nothing is fetched where the ``usual`` data already are."""
    folder = out or _default(name)
    there = usual and complete_manifest(folder)
    if usual and there and usual.describes(there):
        _report(folder, there, None)
    else:
        _prepare(folder, work)
    if recipe := RECIPES.get(name):
        data = f" --data {shlex.quote(str(folder))}"
        with suppress(BadInput):  # no cache folder
            data = "" if folder == _default(name) else data
        print(f"train on it: jspeed run {recipe}{data}")


def _prepare(folder: Path, work: Callable[..., object], unit: str = "bytes") -> None:
    """Call ``work(folder, progress=...)`` under a progress bar, then print what the folder holds
    and how fast it was made."""
    before = complete_manifest(folder)
    counts = (DownloadColumn(), Speed()) if unit == "bytes" else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True
    ) as bar:
        task = bar.add_task(unit, total=None)

        try:
            with interruptible():
                work(
                    folder,
                    progress=lambda count, total: bar.update(task, advance=count, total=total),
                )
        except KeyboardInterrupt:
            print("interrupted; run the same command to resume", file=sys.stderr)
            raise
        seconds = bar.tasks[task].elapsed
    manifest = complete_manifest(folder)
    assert manifest
    _report(folder, manifest, seconds if manifest != before else None)


def _report(folder: Path, manifest: Manifest, seconds: float | None) -> None:
    print(
        f"{folder} {'is ready' if seconds else 'is already there'} (tokenizer"
        f" {manifest['tokenizer']})"
    )
    splits, source = manifest["splits"], manifest["source"]
    for name, total in splits.items():
        print(f"{name:>6} {total['tokens']:>14,} tokens {total['documents']:>11,} documents")
    documents = sum(total["documents"] for total in splits.values())
    chosen = (
        source.get("kind") == "text"
        and source.get("val_fraction", 0) is None
        and "val" not in source
    )
    if chosen and documents > 2:
        share = splits["val"]["documents"] / documents
        print(
            f"{share:.1%} of the documents are for validation: {split.DEFAULT}; --val-fraction"
            " takes another part"
        )
    if manifest.get("truncated"):
        print(f"{manifest['truncated']:,} names are longer than a row and were cut")
    if seconds:
        tokens = sum(total["tokens"] for total in splits.values())
        print(f"{tokens / seconds:,.0f} tokens a second, {seconds:.1f} s in all")


def _say_passed_over(inputs: Sequence[Path]) -> None:
    """Print one line of what is not read of the folders among ``inputs``, if anything is not."""
    if names := sources.passed_over(inputs):
        more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
        say(
            f"note: {len(names):,} of the folders' files are passed over, hidden or of other"
            f" endings than {sources.ENDINGS}: {', '.join(names[:SHOWN])}{more}"
        )


def _say_carriage_returns(inputs: Sequence[Path]) -> None:
    """Print one line where texts have the line ends of Windows, which become tokens."""
    found = [name for name, path in sources.text_files(inputs) if holds_carriage_returns(path)]
    if found:
        more = f" and {len(found) - SHOWN:,} more" if len(found) > SHOWN else ""
        say(
            f"note: texts have the line ends of Windows, whose \\r become tokens like any"
            f" character; dos2unix removes them: {', '.join(found[:SHOWN])}{more}"
        )


def stdlib(out: Folder | None = None) -> None:
    """Prepare the standard library of this Python as bytes; nothing is downloaded.

    Args:
        out: Folder to make; without it, one in the cache that is found again by itself.
    """
    _prepare(out or tokenise.stdlib_folder(), tokenise.prepare_stdlib, "source files")


def text(inputs: Inputs, out: Folder, options: Tokenising) -> None:
    """Tokenise text files: .txt, .text, .md (one document), .jsonl, .ndjson, .parquet,
    .arrow (field "text", or --text-field); texts and lines also compressed: .gz, .xz, .zst.

    Run again after an interruption, it resumes.

    Args:
        inputs: Files, and folders whose text files are taken in order of their paths.
        out: Folder to make; it must be absent or empty.
    """
    _say_passed_over((*inputs, *options.val_input))
    _say_carriage_returns((*inputs, *options.val_input))
    _prepare(out, partial(tokenise.prepare_text, inputs, options=options))
    made = complete_manifest(out)
    gpt2 = made is not None and made["tokenizer"] == GPT2["tokenizer"]
    recipe = "fineweb-cpu" if gpt2 else "stdlib"
    print(f"train on it: jspeed run {recipe} --data {shlex.quote(str(out))}")
    print("its target loss is of another text: set yours with --target-loss")


def tokens(
    folder: Annotated[Path, Wants("FOLDER", positional=True)], out: Folder, tokenizer: str = "gpt2"
) -> None:
    """Make shards of the tokens that other programs have written: nanoGPT's train.bin and val.bin,
    .npy files.

    Args:
        folder: Folder of train.bin and val.bin (uint16 without a header), or of
            NAME_train_NUMBER.npy and NAME_val_NUMBER.npy. llm.c's files are shards and need no
            preparation.
        out: Folder to make; it must be absent or empty.
        tokenizer: The tokenizer whose ids they are, as for prepare text.
    """
    facts, extra_files = named_facts(tokenizer)
    _prepare(out, partial(convert_tokens, folder, facts=facts, extra_files=extra_files))


def fineweb_(
    shards: int | None = None, version: Literal["10B", "100B"] = "10B", out: Folder | None = None
) -> None:
    """Download FineWeb's shards of GPT-2 tokens (200 MB each) from Hugging Face, several at a time.

    Run again after an interruption, it resumes; with more --shards it adds those. HF_ENDPOINT (a
    mirror), HF_HUB_OFFLINE and HF_TOKEN have their usual meaning.

    Args:
        shards: Training shards of 100 M tokens; default: all, 103 of the 10B version or 1030 of
            100B.
        version: Which sample of FineWeb.
        out: Folder to make or to add to; default: one in the cache, where jspeed run finds the 10B
            version.
    """
    name = "fineweb" if version == "10B" else "fineweb100B"
    _prepare_named(name, out, partial(fineweb.prepare_fineweb, version=version, shards=shards))


def names(
    input: File | None = None, row: int = named_data_sets.NAMES_ROW, out: Folder | None = None
) -> None:
    """Prepare names, one a line, in rows of equal length, for the recipe microgpt-names.

    Args:
        input: Text file with a name a line; default: 32,033 first names, downloaded (228 kB).
        row: Tokens in a row, and then in a lane of the recipe; longer names are cut.
        out: Folder to make; default: one in the cache, where jspeed run finds it.
    """
    work = partial(named_data_sets.prepare_names, given=input, row=row)
    usual = Usual(SYMBOLS, {"sha256": named_data_sets.NAMES.sha256, "row": row})
    _prepare_named("names", out, work, None if input else usual)


def shakespeare_char(input: File | None = None, out: Folder | None = None) -> None:
    """Prepare a text as its characters, the last tenth for validation, for the recipe
    shakespeare-char.

    Args:
        input: Text file; default: 1.1 MB of Shakespeare, downloaded.
        out: Folder to make; default: one in the cache, where jspeed run finds it.
    """
    work = partial(named_data_sets.prepare_shakespeare, characters=True, given=input)
    usual = Usual(SYMBOLS, {"sha256": named_data_sets.SHAKESPEARE.sha256})
    _prepare_named("shakespeare-char", out, work, None if input else usual)


def shakespeare(input: File | None = None, out: Folder | None = None) -> None:
    """Prepare a text as GPT-2's tokens, the last tenth of its characters for validation.

    Args:
        input: Text file; default: 1.1 MB of Shakespeare, downloaded.
        out: Folder to make; default: one in the cache.
    """
    work = partial(named_data_sets.prepare_shakespeare, characters=False, given=input)
    usual = Usual(GPT2["tokenizer"], {"sha256": named_data_sets.SHAKESPEARE.sha256})
    _prepare_named("shakespeare", out, work, None if input else usual)


def tinystories(
    input: Files = (),
    val_input: Files = (),
    end_of_text: Separator = "after",
    processes: Processes | None = None,
    out: Folder | None = None,
) -> None:
    """Prepare TinyStories as GPT-2's tokens, for the recipe tinystories.

    Args:
        input: Its files (as of prepare text); default: TinyStoriesV2-GPT4, downloaded (2.2 GB).
        val_input: Its validation files; default: a part of the stories of --input.
        end_of_text: Where <|endoftext|> goes: before each story, after it, or nowhere.
        processes: Processes that tokenise; default: one for each usable core, or one for little
            text.
        out: Folder to make; default: one in the cache, where jspeed run finds it.
    """
    options = Tokenising(val_input=val_input, end_of_text=end_of_text, processes=processes)
    _say_passed_over((*input, *val_input))
    work = partial(named_data_sets.prepare_hub_text, "tinystories", inputs=input, options=options)
    _prepare_named("tinystories", out, work)


def openwebtext(
    input: Files = (),
    end_of_text: Separator = "after",
    val_fraction: Fraction = named_data_sets.OPENWEBTEXT_VAL_FRACTION,
    seed: Whole = named_data_sets.OPENWEBTEXT_SEED,
    processes: Processes | None = None,
    out: Folder | None = None,
) -> None:
    """Prepare OpenWebText as GPT-2's tokens, with nanoGPT's split.

    Args:
        input: Its files (as of prepare text); default: all of it, downloaded (some 25 GB).
        end_of_text: Where <|endoftext|> goes: before each document, after it, or nowhere.
        val_fraction: Part of the documents that is for validation.
        seed: Seed of the permutation whose first documents are for validation.
        processes: Processes that tokenise; default: one for each usable core, or one for little
            text.
        out: Folder to make; default: one in the cache.
    """
    options = Tokenising(
        val_fraction=val_fraction, seed=seed, end_of_text=end_of_text, processes=processes
    )
    _say_passed_over(input)
    work = partial(named_data_sets.prepare_hub_text, "openwebtext", inputs=input, options=options)
    _prepare_named("openwebtext", out, work)


COMMAND = group_of(
    "Turn documents into token shards, ready to train on, or download them ready-made.",
    {
        "stdlib": Command(stdlib),
        "text": Command(
            text,
            (
                "my_texts/ --out shards  # a folder of .txt, .jsonl, .parquet, also .gz, .xz, .zst",
                "book.txt --out shards --tokenizer bytes  # needs no vocabulary, so no network",
            ),
        ),
        "tokens": Command(
            tokens, ("nanoGPT/data/openwebtext --out shards  # its train.bin and val.bin",)
        ),
        "fineweb": Command(fineweb_, ("--shards 9  # enough for record 29",)),
        "names": Command(names, ("  # then: jspeed run microgpt-names",)),
        "shakespeare-char": Command(shakespeare_char, ("  # then: jspeed run shakespeare-char",)),
        "shakespeare": Command(shakespeare, ("  # then: jspeed run gpt2 --init-from GPT2_FOLDER",)),
        "tinystories": Command(tinystories, ("  # then: jspeed run tinystories",)),
        "openwebtext": Command(openwebtext, ("--input documents.jsonl  # without a network",)),
    },
    (
        "text my_texts/ --out shards  # your own data; then: jspeed run fineweb-cpu --data shards",
        "fineweb --shards 9  # 0.9 G tokens, as the records train on",
    ),
)
