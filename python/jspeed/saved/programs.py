"""A run's programs as machine code, saved where they are first compiled. The next start of the same
run loads them, and neither traces nor compiles.

An executable is a file, named by the text that it was compiled from and all else that machine code
depends on. A list, for a recipe with its fields, data and devices, names the executables of a run.
The rule: a list is followed where every module that was imported when it was made is what it was
(by its content; of an installed package by size and time of change). So that a trace can have read
nothing else, there are lists only of recipes whose text reaches for nothing outside of it
(:func:`jspeed.run.evidence.source.beyond`: no file, environment or module of one's own) and draws
nothing at random. Others are traced at every start; what they compile is found by its text.

Only the command ``jspeed run`` does so: who calls :func:`jspeed.run.train.train` may have changed
functions that no file tells of. A preregistered run makes its own programs, and so do several
processes. JAX's own cache is left out: XLA for CPUs cannot serialise what was loaded.
"""

import ast
import hashlib
import os
import pickle
import platform
import re
import site
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from jspeed.base.compile_cache import without_compile_cache
from jspeed.base.compiler import Compile, options_for
from jspeed.base.files import PROGRAMS, cache_folder, sha256_of, write_whole
from jspeed.base.jax_versions import from_machine_code, machine_code
from jspeed.errors import BadInput, say, type_and_line
from jspeed.record import provenance
from jspeed.run.compute.device import Placement
from jspeed.run.compute.program import Program, compile_program
from jspeed.run.compute.step import draw, unchanged, without_jit
from jspeed.run.evidence.source import beyond
from jspeed.run.find_recipe import LoadedRecipe

MOST = 2**31  # bytes of the folder: the files that were not used for longest go first
SUFFIX = ".saved"
HEAD = b"jspeed 1 "  # then the SHA-256 of what follows, and a newline
NO_MATTER = re.compile("jax_.*(cache|log|dump|traceback|explain).*")  # settings of JAX
FACTS = ("micro_tokens", "eval_rows", "head_chunk", "remat", "parts", "inside")


def saved_or_compiled(loaded: LoadedRecipe, placement: Placement, rows: int) -> Program:
    """Return what :func:`jspeed.run.compute.program.compile_program` does, loaded where it can be;
    what was compiled is saved for the next time."""
    make = partial(compile_program, loaded.recipe, placement, rows)
    try:
        folder = cache_folder() / PROGRAMS
        folder.mkdir(parents=True, exist_ok=True)
    except (BadInput, OSError):
        return make()
    off = not jax.config.values["jax_enable_compilation_cache"]
    if off or without_jit() or jax.process_count() > 1:
        return make()
    around = surroundings(placement)
    recipe = loaded.hash, loaded.recipe.eval_max_doc_len, rows, *loaded.recipe.on_host
    here = sys.prefix, __file__  # another installation has other modules: a list of its own
    path = folder / f"{loaded.recipe.name}-{digest(*around, *here, *recipe)}{SUFFIX}"
    if program := follow(path, placement):
        return program
    names: dict[int, str] = {}

    def build(lowered: Lowered, how: Compile) -> Compiled:
        trees = lowered.args_info, lowered.in_tree, lowered.out_tree
        name = f"{digest(*around, *trees, lowered.as_text())}{SUFFIX}"
        made = load(folder / name, placement)
        if made is None:
            made = how(lowered)
            name = save(folder / name, partial(machine_code, made))
        names[id(made)] = name
        return made

    with without_compile_cache():
        program = make(build=build)
    if not any(unrepeatable(loaded.source)):
        make_list(path, program, names)
    make_room(folder)
    return program


def surroundings(placement: Placement) -> tuple[Any, ...]:
    """Return what else machine code depends on: devices and what they are used for, versions,
    settings, processor."""
    device, mesh = placement.device, placement.mesh
    client = mesh.devices.flat[0].client
    settings = [item for item in jax.config.values.items() if not NO_MATTER.fullmatch(item[0])]
    own = {**vars(device), "own_kernels": sorted(device.own_kernels)}
    return (
        placement.layout, placement.micro_batches, own,
        dict(mesh.shape), [each.id for each in mesh.devices.flat], len(client.devices()),
        provenance.devices(), client.platform_version, instructions(), sys.version,
        provenance.versions(),
        options_for(device.platform), os.environ.get("XLA_FLAGS"), sorted(settings),
    )  # fmt: skip


def instructions() -> str:
    """Return which instructions this processor has: machine code is not for every one of its
    kind."""
    with suppress(OSError):
        told = re.search(r"^(flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.M)
        return told[0] if told else ""
    return platform.processor()


def digest(*parts: Any) -> str:
    """Return 32 hexadecimal digits of all ``parts``, as they are written."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def unrepeatable(source: str) -> Iterator[str]:
    """Yield why another trace of a recipe with this ``source`` need not be the same program."""
    yield from beyond(source)
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr="random", value=ast.Name(id=name)) if name != "jax":
                yield f"uses {name}.random"
            case ast.ImportFrom(module="numpy", names=names):
                yield from (f"imports {each.name}" for each in names if each.name == "random")
            case ast.Name(id="hash" | "id" as name):
                yield f"uses {name}"


def make_list(path: Path, program: Program, names: Mapping[int, str]) -> None:
    """Write the list of the files of ``program``, where it has all and none asks the host for
    anything."""
    end = program.at_end
    used = [*program.others, program.sums, *program.compiled]
    used += [] if end is unchanged else [end]
    silent = not any(inside.calls for inside in program.inside.values())
    if silent and all(names.get(id(each)) for each in used):
        kept = {
            "others": [names[id(each)] for each in program.others],
            "steps": [[names[id(step)] for step in phases] for phases in program.steps],
            "sums": names[id(program.sums)],
            "at_end": names.get(id(end)),
            "facts": {name: getattr(program, name) for name in FACTS},
            "modules": {path: facts(path) for path in modules()},
        }
        save(path, lambda: kept)


def follow(path: Path, placement: Placement) -> Program | None:
    """Return the program whose list is at ``path``; None without one, or where it does not hold."""
    if (kept := read(path)) is None:
        return None
    if changed := stale(kept["modules"]):
        say(f"note: programs are compiled again: {changed} has changed since they were saved")
        return None
    find = cache(lambda name: load(path.with_name(name), placement))
    drawn, evaluation, sums = map(find, [*kept["others"], kept["sums"]])
    steps = tuple(tuple(map(find, phases)) for phases in kept["steps"])
    at_end = find(kept["at_end"]) if kept["at_end"] else unchanged
    if not all((drawn, evaluation, sums, at_end, *(step for phases in steps for step in phases))):
        return None
    return Program(
        partial(draw, drawn, placement.mesh), steps, evaluation, at_end, **kept["facts"],
        others=(drawn, evaluation), sums=sums, loaded=True,
    )  # fmt: skip


def load(path: Path, placement: Placement) -> Any:
    """Return the executable that was saved at ``path``, for the devices of ``placement``; None
    where there is none that can be used."""
    if (kept := read(path)) is None:
        return None
    try:
        return from_machine_code(kept, list(placement.mesh.devices.flat))
    except Exception as error:  # whatever a backend says: it is compiled again
        say(f"note: {path} is not used: {type_and_line(error)}")
        return None


def save(path: Path, content: Callable[[], Any]) -> str:
    """Write ``content()`` to ``path``, whole; return its name, "" where nothing was saved: a
    backend cannot serialise it, or there is no room."""
    with suppress(Exception):
        packed = zlib.compress(pickle.dumps(content()), 1)
        write_whole(path, HEAD + hashlib.sha256(packed).hexdigest().encode() + b"\n" + packed)
        return path.name
    return ""


def read(path: Path) -> Any:
    """Return what was saved at ``path``; None where nothing was, or, with a line, where it is
    damaged or another user's."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():  # it would be run as this user
                raise ValueError("it is another user's")
            head, packed = file.readline(), file.read()
        if head != HEAD + hashlib.sha256(packed).hexdigest().encode() + b"\n":
            raise ValueError("it is damaged")
        kept = pickle.loads(zlib.decompress(packed))
        os.utime(path)  # when it was used
        return kept
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is in it
        why = error if type(error) is ValueError else type_and_line(error)
        say(f"note: {path} is not used: {why}")
        return None


def make_room(folder: Path) -> None:
    """Remove files until all are at most MOST bytes: this room's own, and those that a killed run
    left unfinished, first those unused for longest."""
    there = []
    for path in (*folder.glob(f"*{SUFFIX}"), *folder.glob(f".*{SUFFIX}.*")):
        with suppress(OSError):  # another run may have removed it
            there.append((path.stat().st_mtime, path.stat().st_size, path))
    left = sum(size for _, size, _ in there)
    for _, size, path in sorted(there):
        if left > MOST:
            left -= size
            with suppress(OSError):
                path.unlink()


def modules() -> list[str]:
    """Return the files of all modules that are loaded now, but of the one that started the
    command."""
    loaded = [module for name, module in list(sys.modules.items()) if name != "__main__"]
    return sorted({path for module in loaded if (path := getattr(module, "__file__", None))})


def stale(before: Mapping[str, str]) -> str | None:
    """Return the path of a module that is not what it was ``before``; or that is loaded now, was
    not then, and is of no package."""
    packages = f"{Path(__file__).parents[1]}{os.sep}", *installed()
    changed = (path for path, what in before.items() if facts(path) != what)
    more = (path for path in modules() if path not in before and not path.startswith(packages))
    return next(changed, None) or next(more, None)


def facts(path: str) -> str:
    """Return the SHA-256 of a file; of an installed package's its size and time of change; "" of
    one that is gone."""
    try:
        if path.startswith(installed()):
            status = os.stat(path)
            return f"{status.st_size} {status.st_mtime_ns}"
        return sha256_of(Path(path))
    except OSError:
        return ""


@cache
def installed() -> tuple[str, ...]:
    """Return the folders of Python's own and of installed modules."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {sysconfig.get_paths()[name] for name in names} | {site.getusersitepackages()}
    return tuple(f"{path}{os.sep}" for path in paths)
