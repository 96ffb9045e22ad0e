"""Command-line entry of ``jspeed``: dispatch to a subcommand and import only that one."""

import logging
import os
import re
import sys
import traceback
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

from jspeed import __version__
from jspeed.base.accelerators import cuda_root, visible_gpus
from jspeed.base.files import read_regular
from jspeed.base.standard_streams import end_at_ctrl_c
from jspeed.cli.satellites import command as command_called
from jspeed.cli.satellites import commands
from jspeed.errors import BadInput, first_line, run_script, say

ABOUT = (
    "Train a small GPT to a target loss as fast as JAX can, plan it for absent GPUs, keep an honest"
    " leaderboard."
)
EXAMPLES = (
    "run  # train on the source files of Python's standard library",
    "run --steps 20  # its first steps",
    "plan r29 --target h100x8  # what eight H100s would do",
    "prepare text my_texts/ --out shards  # your own data",
)
# What JAX may be told by variables: where to run and with whom, what to keep, what to log. Each of
# its other settings, those of releases to come too, may change numbers, or is made by a run itself.
HONOURED = {
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION", "JAX_CUDA_VISIBLE_DEVICES", "JAX_NUM_CPU_DEVICES",
    "JAX_PLATFORMS",
    "JAX_PJRT_CLIENT_CREATE_OPTIONS", "JAX_ROCM_VISIBLE_DEVICES",
    "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_COORDINATOR_PORT",
    "JAX_LOCAL_DEVICE_IDS",
    "JAX_NUM_PROCESSES", "JAX_PARTITION_INDEX", "JAX_PROCESS_ID", "JAX_SLICE_INDEX",
    "JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE", "JAX_ENABLE_COMPILATION_CACHE",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    "JAX_DISABLE_JIT", "JAX_OPTIMIZATION_LEVEL",
    "JAX_DEBUG_LOG_MODULES", "JAX_DUMP_IR_MODES", "JAX_DUMP_IR_TO", "JAX_EXPLAIN_CACHE_MISSES",
    "JAX_LOG_COMPILES",
    "JAX_LOGGING_LEVEL", "JAX_TRACEBACK_FILTERING",
}  # fmt: skip
JAX_VARIABLES = re.compile("JAX_.*|CHECK_VMA|EAGER_CONSTANT_FOLDING")  # the last two are JAX's too


def main(name: str = "") -> None:
    """Run the command line and exit: ``jspeed``'s, or that of a script, which is its command
    ``name``."""
    end_at_ctrl_c()
    settle_logs()
    leave_out_settings(os.environ)
    unfold_xla_flags(os.environ)
    # a width of 0, of which nothing would be printed
    if not os.environ.get("COLUMNS", "1").strip("0 "):
        del os.environ["COLUMNS"]
    if root := cuda_root(os.environ, map(Path, sys.path)):
        os.environ["CUDA_ROOT"] = root
    run_script(lambda: call(sys.argv[1:], name))


def leave_out_settings(environment: MutableMapping[str, str]) -> None:
    """Remove settings of JAX's but for those that are HONOURED, and say so: a seed means one
    training.

    XLA_FLAGS, which can change rounding, stays: a run records it.
    """
    for name in sorted(filter(JAX_VARIABLES.fullmatch, environment.keys() - HONOURED)):
        say(
            f"note: {name}={environment.pop(name)} is left out: jspeed's numbers depend on no"
            " setting of JAX"
        )


def unfold_xla_flags(environment: MutableMapping[str, str]) -> None:
    """Replace a file's name in XLA_FLAGS, which XLA takes too, by the flags in it, so that a run
    records those."""
    if (given := environment.get("XLA_FLAGS", "").strip()) and not given.startswith("-"):
        with suppress(OSError, ValueError):  # XLA says what is wrong with it
            environment["XLA_FLAGS"] = " ".join(read_regular(given).decode().split())


def settle_logs() -> None:
    """Let JAX log everything with JSPEED_DEBUG, and without a GPU nothing about a CUDA plugin that
    cannot start.

    A plugin without CUDA's libraries is what compiles for absent GPUs (jspeed[aot]); JAX prints its
    traceback. Nor does Matplotlib without a home say where it keeps its fonts instead.
    """
    if os.environ.get("JSPEED_DEBUG"):
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"  # JAX's own default is 1, no information
        return
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    if not visible_gpus(os.environ):
        logging.getLogger("jax._src.xla_bridge").addFilter(
            lambda line: "plugin configuration" not in str(line.msg)
        )


def call(words: Sequence[str], name: str = "") -> int | None:
    """Run ``words`` as arguments of ``jspeed``, or of its command ``name``; return the exit
    code."""
    from jspeed.cli.flags import Group, choose_command, parse

    top = Group(ABOUT, commands(), command_called, EXAMPLES)
    if not name and words and words[0] == "--version":
        print(f"jspeed {__version__}")
        return 0
    prog, command = (sys.argv[0], command_called(name)) if name else ("jspeed", top)
    while isinstance(command, Group):
        name, words = choose_command(command, words, prog), words[1:]
        prog, command = f"{prog} {name}", command.load(name)
    do = parse(command, words, prog)
    try:
        return do()
    except ValueError as error:
        frames = traceback.extract_tb(error.__traceback__)
        if "jax" in sys.modules or not any(
            frame.filename.endswith("jax/_src/config.py") for frame in frames
        ):
            raise
        raise BadInput(
            f"JAX cannot read a variable ({first_line(error)}); correct it, or unset it"
        ) from error
