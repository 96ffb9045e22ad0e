"""A run's programs as machine code: saved where they are first compiled, and sent from the first of
several processes to the others. Who loads them neither traces nor compiles.

An executable is a file, named by the text that it was compiled from and all else that machine code
depends on. A list, for a recipe with its fields, data and devices, names the executables of a run.
The rule: a list is followed where every module that was imported when it was made is what it was
(by its content; of an installed package by size and time of change). So that a trace can have read
nothing else, there are lists only of recipes whose text reaches for nothing outside of it
(:func:`jspeed.run.evidence.source.beyond`: no file, environment or module of one's own) and draws
nothing at random. Others are traced at every start; what they compile is found by its text.

Only the command ``jspeed run`` keeps files: who calls :func:`jspeed.run.train.train` may have
changed functions that no file tells of. A preregistered run makes its own programs. JAX's own cache
is left out: XLA for CPUs cannot serialise what was loaded.

A folder that the user gives (``--programs``) may have been filled elsewhere. Its lists name modules
by what follows an entry of ``sys.path``, and each by its content; where none is for this run, a
line says what differs. Files are code, so they are the user's, or of the folder's owner.

Of several processes whose machines are alike, the first compiles for all: no two then run what was
tuned apart.
"""

import ast
import hashlib
import os
import pickle
import platform
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from jspeed.base import processes
from jspeed.base.compile_cache import without_compile_cache
from jspeed.base.compiler import Compile, options_for
from jspeed.base.cores import cores
from jspeed.base.files import PROGRAMS, cache_folder, write_whole
from jspeed.base.jax_versions import from_machine_code, machine_code
from jspeed.errors import BadInput, say, type_and_line, writable_folder
from jspeed.record import provenance
from jspeed.run.compute.device import GPUS, Placement
from jspeed.run.compute.program import Program, compile_program
from jspeed.run.compute.step import draw, unchanged, without_jit
from jspeed.run.evidence.source import beyond
from jspeed.run.find_recipe import LoadedRecipe
from jspeed.saved.modules import changed, seen

MOST = 2**31  # bytes of the folder: the files that were not used for longest go first
SUFFIX = ".saved"
HEAD = b"jspeed 1 "  # then the SHA-256 of what follows, and a newline
NO_MATTER = re.compile("jax_.*(cache|log|dump|traceback|explain).*")  # settings of JAX
FACTS = ("micro_tokens", "eval_lanes", "head_chunk", "remat", "parts", "inside")


class Store:
    """Executables by name, with their machine code, for the devices of a placement; as files too
    where there is a ``folder``, which the user may have ``given``."""

    def __init__(
        self, placement: Placement, folder: Path | None = None, given: bool = False
    ) -> None:
        self.devices = list(placement.mesh.devices.flat)
        self.folder = folder
        self.given = given
        self.code: dict[str, Any] = {}
        self.names: dict[int, str] = {}  # by the executable's id

    def find(self, name: str) -> Any:
        """Return the executable called ``name``; None where there is none that can be used."""
        kept = self.code.get(name)
        if kept is None and self.folder:
            kept = read(self.folder / name, self.given)
        if kept is None:
            return None
        try:
            made = from_machine_code(kept, self.devices)
        except Exception as error:  # whatever a backend says: it is compiled again
            say(f"note: the program {name} is not used: {type_and_line(error)}")
            return None
        self.code[name], self.names[id(made)] = kept, name
        return made

    def keep(self, name: str, made: Compiled) -> None:
        """Keep an executable, where its backend can serialise it and a folder has room."""
        with suppress(Exception):
            kept = machine_code(made)
            if self.folder is None or save(self.folder / name, kept):
                self.code[name], self.names[id(made)] = kept, name


def programs_of_run(
    loaded: LoadedRecipe, placement: Placement, rows: int, keeps: bool, given: Path | None = None
) -> Program:
    """Return what :func:`jspeed.run.compute.program.compile_program` does. A run that ``keeps``
    programs loads those that it has saved, and saves what it compiles: in the folder ``given``, or
    the cache folder's.

    Several processes call this together; what fails on the first, fails on all. Raises
    :class:`BadInput` where the given folder is missing and cannot be made.
    """
    several = processes.count() > 1
    store = Store(placement, folder(given) if keeps else None, given is not None)
    if without_jit() or (not alike(placement) if several else store.folder is None):
        return compile_program(loaded.recipe, placement, rows)
    make = partial(loaded_or_compiled, loaded, placement, rows, store)
    if not several:
        return make()
    sent = from_first(make, store)
    if isinstance(sent, Program):
        return sent
    description, store.code = sent
    found = description and made_of(description, placement, store)
    return found or compile_program(loaded.recipe, placement, rows)


def folder(given: Path | None = None) -> Path | None:
    """Return the folder of programs, the ``given`` one or the cache folder's; None where nothing
    may be kept."""
    if given:
        if not given.is_dir():
            writable_folder(given, "the folder of programs")
        return given
    if not jax.config.values["jax_enable_compilation_cache"]:
        return None
    with suppress(BadInput, OSError):
        found = cache_folder() / PROGRAMS
        found.mkdir(parents=True, exist_ok=True)
        return found
    return None


def alike(placement: Placement) -> bool:
    """Whether what is compiled in one process is machine code for all."""
    return (
        len(set(processes.gather("surroundings", digest(*surroundings(placement).values())))) == 1
    )


def from_first(make: Callable[[], Program], store: Store) -> Program | tuple[Any, dict[str, Any]]:
    """Return the program on the first process, which alone makes it; on the others its description,
    None where it has none, and its machine code.

    What ``make`` raises there is raised on all, on the others as :class:`BadInput` or JAX's error.
    """
    ended: list[Program | Exception] = []  # of the first process

    def send() -> bytes:
        try:
            ended.append(program := make())
        except Exception as error:  # the others wait for an answer
            ended.append(error)
            return pickle.dumps((isinstance(error, BadInput), str(error)))
        description = described(program, store.names)
        code = {name: store.code[name] for name in executables(description)} if description else {}
        return pickle.dumps((description, code))

    answer = processes.first("programs", send)
    for end in ended:
        if isinstance(end, Program):
            return end
        raise end
    first, second = pickle.loads(answer)
    if isinstance(first, bool):
        raise BadInput(second) if first else jax.errors.JaxRuntimeError(second)
    return first, second


def loaded_or_compiled(
    loaded: LoadedRecipe, placement: Placement, rows: int, store: Store
) -> Program:
    """Return the program that ``store`` has a list of, or compile what is not in it."""
    recipe, around = loaded.recipe, surroundings(placement)
    made_for = {
        "recipe, with its fields": loaded.hash,
        "longest document of an evaluation": recipe.eval_max_doc_len,
        "rows of an evaluation": rows,
        "tables on the host": " ".join(recipe.on_host),
        **around,
    }
    # another installation has other modules: a list of its own, but in a folder for several
    here = () if store.given else (sys.prefix, __file__)
    list_name = f"{recipe.name}-{digest(*made_for.values(), *here)}{SUFFIX}"
    if store.folder:
        if program := follow(store.folder / list_name, placement, store):
            return program
        if store.given and not (store.folder / list_name).exists():
            say_what_differs(store.folder, recipe.name, made_for)

    def build(lowered: Lowered, how: Compile) -> Compiled:
        trees = lowered.args_info, lowered.in_tree, lowered.out_tree
        name = f"{digest(*around.values(), *trees, lowered.as_text())}{SUFFIX}"
        made = store.find(name)
        if made is None:
            made = how(lowered)
            store.keep(name, made)
        return made

    with without_compile_cache():
        program = compile_program(recipe, placement, rows, build=build)
    if store.folder:
        why = next(unrepeatable(loaded.source), None)
        if not why and not make_list(store.folder / list_name, program, store, made_for):
            why = "has programs that cannot be saved there"
        if why and store.given:
            say(f"note: starts with --programs {store.folder} trace {recipe.name} again: it {why}")
        if not store.given:
            make_room(store.folder)
    return program


def say_what_differs(folder: Path, name: str, made_for: Mapping[str, Any]) -> None:
    """Say why no list in a given ``folder`` is for this run of the recipe called ``name``, by the
    one that differs least; nothing where there is none of it."""
    lists = folder.glob(f"{name}-{'[0-9a-f]' * 32}{SUFFIX}")
    kept = [each["made for"] for each in (read(path, given=True) for path in lists) if each]
    unlike = [
        [what for what, value in made_for.items() if each.get(what) != str(value)] for each in kept
    ]
    if not unlike:
        return
    fewest, each = min(zip(unlike, kept, strict=True), key=lambda pair: len(pair[0]))
    words = each.get(fewest[0], "").split(), str(made_for[fewest[0]]).split()
    expected, found = (
        shorten(" ".join(word for word in own if word not in other), 100) or "nothing more"
        for own, other in (words, words[::-1])
    )
    say(
        f"note: the programs of {name} in {folder} are not used: {fewest[0]}: expected {expected},"
        f" found {found}"
    )


def surroundings(placement: Placement) -> dict[str, Any]:
    """Return what else machine code depends on, by its name: devices and what they are used for,
    versions, settings, processor."""
    device, mesh = placement.device, placement.mesh
    client = mesh.devices.flat[0].client
    settings = {n: v for n, v in jax.config.values.items() if not NO_MATTER.fullmatch(n)}
    found = {"checks": (), "refused": (), "calls": None, "less": ()}  # which change no program
    own = vars(device) | found | {"custom_kernels": sorted(device.custom_kernels)}
    options = options_for(device.platform) or {}
    return {
        "processor's instructions": instructions(),
        **{f"devices' {name}": value for name, value in provenance.devices().items()},
        "numbers of devices": [each.id for each in mesh.devices.flat],
        "devices of a process": len(client.devices()),
        "processes": processes.count(),
        **{f"version of {name}": value for name, value in provenance.versions().items()},
        "Python": sys.version,
        "XLA": client.platform_version,
        "mesh": words(mesh.shape),
        "layout": placement.layout,
        "micro-batches": placement.micro_batches,
        "device": words(own),
        "XLA's options": words(options),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS"),
        "JAX's settings": words(dict(sorted(settings.items()))),
    }


def words(named: Mapping[str, Any]) -> str:
    """Return names with their values, a word each if they have no spaces."""
    return " ".join(f"{name}={value}" for name, value in named.items())


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


def described(program: Program, names: Mapping[int, str]) -> dict[str, Any] | None:
    """Return what :func:`made_of` makes ``program`` of again, by the ``names`` of its executables;
    None where one has none, or asks the host for anything."""
    end = program.at_end
    used = [*program.others, program.sums, *program.compiled]
    used += [] if end is unchanged else [end]
    silent = not any(inside.calls for inside in program.inside.values())
    if not silent or not all(names.get(id(each)) for each in used):
        return None
    return {
        "others": [names[id(each)] for each in program.others],
        "steps": [[names[id(step)] for step in phases] for phases in program.steps],
        "sums": names[id(program.sums)],
        "at_end": names.get(id(end)),
        "facts": {name: getattr(program, name) for name in FACTS},
    }


def executables(description: Mapping[str, Any]) -> list[str]:
    """Return the names of all executables of a :func:`described` program."""
    steps = chain.from_iterable(description["steps"])
    last = description["at_end"]
    return [*description["others"], description["sums"], *steps, *([last] if last else [])]


def made_of(description: Mapping[str, Any], placement: Placement, store: Store) -> Program | None:
    """Return the program of a :func:`described` one; None where ``store`` lacks a part of it."""
    names = list(dict.fromkeys(executables(description)))
    gpu = placement.device.platform in GPUS
    with ThreadPoolExecutor(1 if gpu else cores()) as pool:
        found = dict(zip(names, pool.map(store.find, names), strict=True))
    if None in found.values():
        return None
    drawn, evaluation, sums = (
        found[each] for each in [*description["others"], description["sums"]]
    )
    steps = tuple(tuple(found[each] for each in phases) for phases in description["steps"])
    at_end = found.get(description["at_end"], unchanged)
    return Program(
        partial(draw, drawn, placement.mesh), steps, evaluation, at_end, **description["facts"],
        others=(drawn, evaluation), sums=sums, loaded=True,
    )  # fmt: skip


def make_list(path: Path, program: Program, store: Store, made_for: Mapping[str, Any]) -> bool:
    """Write the list of the files of ``program``, which is ``made_for`` what is said so; return
    whether it has all and there was room."""
    description = described(program, store.names)
    named = {what: str(value) for what, value in made_for.items()}
    more = {"made for": named, "modules": seen(store.given)}
    return description is not None and save(path, {**description, **more})


def follow(path: Path, placement: Placement, store: Store) -> Program | None:
    """Return the program whose list is at ``path``; None without one, or where it does not hold."""
    if (kept := read(path, store.given)) is None:
        return None
    if other := changed(kept["modules"], store.given):
        say(f"note: programs are compiled again: {other} has changed since they were saved")
        return None
    return made_of(kept, placement, store)


def save(path: Path, content: Any) -> bool:
    """Write ``content`` to ``path``, whole; return whether there was room."""
    with suppress(Exception):
        packed = zlib.compress(pickle.dumps(content), 1)
        write_whole(path, HEAD + hashlib.sha256(packed).hexdigest().encode() + b"\n" + packed)
        return True
    return False


def read(path: Path, given: bool = False) -> Any:
    """Return what was saved at ``path``; None where nothing was, or, with a line, where it is
    damaged or another user's. In a folder that was ``given`` its owner's files are taken too."""
    try:
        with path.open("rb") as file:
            owners = {os.geteuid()} | ({path.parent.stat().st_uid} if given else set())
            if os.fstat(file.fileno()).st_uid not in owners:  # it would be run as this user
                raise ValueError("it is another user's")
            head, packed = file.readline(), file.read()
        if head != HEAD + hashlib.sha256(packed).hexdigest().encode() + b"\n":
            raise ValueError("it is damaged")
        kept = pickle.loads(zlib.decompress(packed))
        with suppress(OSError):  # of a folder that is only read
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
