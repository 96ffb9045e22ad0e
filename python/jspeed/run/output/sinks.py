"""Optional metric loggers: TensorBoard and Weights & Biases, for ``--log``."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from jspeed.errors import BadInput, nearest

MEASURED = ("train_loss", "val_loss", "val_accuracy")
Sink = Callable[[Mapping[str, Any]], None]
"""Takes each line of metrics.jsonl as it is written."""


def check_sinks(names: Sequence[str]) -> None:
    """Raise BadInput for a name that is no sink."""
    for name in names:
        if name not in SINKS:
            raise BadInput(
                f"--log {name} is unknown{nearest(name, SINKS)}; known: {', '.join(SINKS)}"
            )


@contextmanager
def sinks(
    names: Sequence[str], run_dir: Path, config: Mapping[str, Any], started: str
) -> Iterator[list[Sink]]:
    """Open the sinks called ``names``; one that cannot be opened, or closed in the end, is a
    warning."""
    with ExitStack() as stack:
        opened = []
        for name in names:
            try:
                sink = SINKS[name](run_dir, config, started)
                opened.append(sink.__enter__())
                stack.callback(_close, name, sink)
            except ImportError as error:
                print(
                    f"warning: --log {name} does nothing ({reason(error)}); pip install '.[log]'",
                    file=sys.stderr,
                )
            except Exception as error:  # no room, no network, no key
                print(f"warning: --log {name} does nothing ({reason(error)})", file=sys.stderr)
        yield opened


def _close(name: str, sink: AbstractContextManager[Sink]) -> None:
    try:
        sink.__exit__(None, None, None)
    except Exception as error:
        print(
            f"warning: --log {name} could not be closed ({reason(error)}); look at its files",
            file=sys.stderr,
        )


def reason(error: Exception) -> str:
    """Return the system's words of an OSError, of another exception all that it says, in one
    line."""
    said = error.strerror if isinstance(error, OSError) else None
    return said or " ".join(str(error).split()) or type(error).__name__


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return what a line measures, by the names that curves get."""
    return {name.replace("_", "/"): line[name] for name in MEASURED if name in line}


@contextmanager
def tensorboard(run_dir: Path, config: Mapping[str, Any], started: str) -> Iterator[Sink]:
    """Write an event file below the run directory; its time axis shows timed seconds from the start
    of the run."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(run_dir / "tensorboard"))
    start = datetime.fromisoformat(started).timestamp()

    def sink(line: Mapping[str, Any]) -> None:
        values = [
            Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line).items()
        ]
        moment = start + line["timed_seconds"]
        writer.add_event(Event(wall_time=moment, step=line["step"], summary=Summary(value=values)))

    try:
        yield sink
    finally:
        writer.close()


@contextmanager
def wandb(run_dir: Path, config: Mapping[str, Any], started: str) -> Iterator[Sink]:
    """Log to Weights & Biases: to disk unless WANDB_MODE says otherwise; its key comes from its own
    environment."""
    import wandb

    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true")):
        if not os.environ.get(name, "").strip():  # set to nothing is not set
            os.environ[name] = value
    run = wandb.init(project="jspeed", name=run_dir.name, dir=str(run_dir), config=dict(config))

    def sink(line: Mapping[str, Any]) -> None:
        more = {name: line[name] for name in ("tokens", "timed_seconds")}
        run.log(scalars(line) | more, step=line["step"])

    try:
        yield sink
    finally:
        run.finish()


SINKS = {"tensorboard": tensorboard, "wandb": wandb}
