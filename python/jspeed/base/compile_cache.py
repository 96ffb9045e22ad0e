"""Persistent compilation cache; damaged entries are replaced."""

import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

from jspeed.base import processes
from jspeed.base.files import cache_folder
from jspeed.base.jax_versions import ask_again_for_compile_cache
from jspeed.errors import BadInput, say, writable_folder

# What JAX warns of and then leaves as it is: it would find the same entry damaged in every run.
WARNED = r"Error (reading|writing) persistent compilation cache entry for '(.*?)': (.*)"
SUFFIX = "-cache"
MINIMUM = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


def use_compile_cache(announced: bool = False) -> None:
    """Keep compiled programs in the cache folder from run to run, unless JAX_COMPILATION_CACHE_DIR
    says where. An ``announced`` run, which may become a record, compiles all of its own: a file
    under the right name may be another program. What compiles in less than half a second
    is not worth a file, unless JAX's own variable (``MINIMUM``) says how long is.

    A folder that cannot be written is read, if it is there, and one line on stderr says why. An
    entry that cannot be read, or not be written whole, is removed, with those of its name, and one
    line says so; JAX then compiles and writes new ones.
    """
    if announced:
        use_no_compile_cache()
        return
    least = float(os.environ.get(MINIMUM, 0.5))
    try:
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        config: Any = jax.config
        if (place := config.jax_compilation_cache_dir) and "://" not in place:  # a bucket
            writable_folder(place, "the folder of compiled programs")
    except BadInput as error:
        if processes.index() == 0:
            say(f"note: programs that this run compiles are not kept: {error}")
        least = math.inf
        if not os.path.isdir(folder()):
            jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    warnings.filterwarnings("always", message=WARNED.partition(" ")[0])
    usual = warnings.showwarning
    if getattr(usual, "__module__", None) == __name__:
        return

    def replace_damaged_entry(message: Warning | str, *where: Any, **more: Any) -> None:
        warned = re.match(WARNED, str(message), re.DOTALL)
        if not warned:
            usual(message, *where, **more)
            return
        what, name, why = warned.groups()
        ending = "could not be written and will be compiled again"
        if not remove(name):
            ending = (
                "cannot be used and stays there; remove it, or give the folder's files to yourself"
            )
        elif what == "reading":
            ending = "is damaged and was replaced"
        say(f"the compiled program '{name}' in {folder()} {ending} ({why.splitlines()[0][:100]})")

    warnings.showwarning = replace_damaged_entry


def use_no_compile_cache() -> None:
    """Compile every program from now on, whatever was compiled before and lies in the cache."""
    jax.config.update("jax_enable_compilation_cache", False)
    ask_again_for_compile_cache()


@contextmanager
def without_compile_cache() -> Iterator[None]:
    """Neither read nor write the compile cache in the block."""
    before = jax.config.values["jax_enable_compilation_cache"]
    use_no_compile_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        ask_again_for_compile_cache()


def folder() -> Path:
    """Where the compiled programs are."""
    config: Any = jax.config
    return Path(config.jax_compilation_cache_dir or ".")


def remove(name: str) -> bool:
    """Remove all entries of programs called ``name``, of which JAX has just warned; return whether
    none is left.

    Its warning does not say which one it was; the others are compiled again.
    """
    entries = list(folder().glob(f"{name}-*{SUFFIX}"))
    for path in entries:
        with suppress(OSError):
            path.unlink()
    return not any(path.exists() for path in entries)
