"""Turn documents into token shards, ready to train on."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jspeed.data import tokenise
from jspeed.errors import run_script


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


def _report(folder: Path, seconds: float | None) -> None:
    manifest = tokenise.complete_manifest(folder)
    assert manifest is not None  # it was written or found complete a moment ago
    print(f"{folder} {'is ready' if seconds else 'is already there'} (tokenizer {manifest['tokenizer']})")
    for split, total in manifest["splits"].items():
        print(f"{split:>6} {total['tokens']:>14,} tokens {total['documents']:>11,} documents")
    if seconds:
        tokens = sum(total["tokens"] for total in manifest["splits"].values())
        print(f"{tokens / seconds:,.0f} tokens a second, {seconds:.1f} s in all")


def stdlib(out: Path | None = None) -> None:
    """Prepare the standard library of this Python as bytes; nothing is downloaded.

    Args:
        out: Folder to make; without it, one in the cache that is found again by itself.
    """
    started = False

    with _bar() as bar:
        task = bar.add_task("source files", total=None)

        def progress(done: int, total: int | None) -> None:
            nonlocal started
            started = True
            bar.update(task, completed=done, total=total)

        folder = tokenise.prepare_stdlib(out, progress)
        seconds = bar.tasks[task].elapsed
    _report(folder, seconds if started else None)


def text(
    inputs: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE|FOLDER ...")]],
    out: Path,
    tokenizer: Literal["gpt2", "bytes"] = "gpt2",
    val_fraction: float | None = None,
) -> None:
    """Tokenise text files: .txt (one document) or .jsonl (field "text", a document a line), or these as .xz.

    Args:
        inputs: Files, and folders whose text files are taken in order of their paths.
        out: Folder to make; it must be absent or empty.
        tokenizer: GPT-2's byte-pair encoding, or bytes.
        val_fraction: Part of the documents that validates; without it 1 %, or up to 32 of few documents.
    """
    with _bar() as bar:
        task = bar.add_task("documents", total=None)
        folder = tokenise.prepare_text(
            inputs,
            out,
            tokenizer,
            val_fraction,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        seconds = bar.tasks[task].elapsed
    _report(folder, seconds)


def main() -> None:
    """Read the command line and prepare."""
    tyro.extras.subcommand_cli_from_dict({"stdlib": stdlib, "text": text}, description=__doc__)


if __name__ == "__main__":
    run_script(main)
