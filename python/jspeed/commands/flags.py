"""Build a command line from a function's signature and docstring; a wrong flag is a one-line error message.

tyro parses and prints. A parameter is a flag, its trailing underscore left out; :class:`Wants` says more of it.
"""

import contextlib
import inspect
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction, arg
from tyro.constructors import PrimitiveConstructorSpec

from jspeed.errors import BadInput, nearest
from jspeed.fields import WORDS, shown


@dataclass(frozen=True)
class Wants:
    """What a parameter wants, as help shows it; a ``repeated`` flag may come again; ``help`` is instead of ``Args``."""

    metavar: str
    positional: bool = False
    repeated: bool = False
    help: str | None = None


@dataclass(frozen=True)
class Command:
    """A function that is a command, examples ("ARGUMENTS  # why"), and its flags by group; the rest is "options"."""

    call: Callable[..., int | None]
    examples: tuple[str, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rest: str = ""  # the parameter that gets all words from the first one on that is no flag, as they are


@dataclass(frozen=True)
class Group:
    """Commands by name, each with its sentence; ``load`` imports one."""

    about: str
    commands: Mapping[str, str]
    load: Callable[[str], "Command | Group"]
    examples: tuple[str, ...] = ()


def group_of(about: str, commands: Mapping[str, Command], examples: tuple[str, ...] = ()) -> Group:
    """Return the group of ``commands`` whose sentences are the first ones of their docstrings."""
    return Group(about, {name: summary(one.call) for name, one in commands.items()}, commands.__getitem__, examples)


Folder = Annotated[Path, Wants("DIR")]
File = Annotated[Path, Wants("FILE")]
Fields = Annotated[tuple[str, ...], Wants("FIELD=VALUE ...", repeated=True)]
Axes = Annotated[str, Wants("AXIS=N,...")]

METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
REQUIRED: Any = object()  # a default: tyro would otherwise say itself, in a box, what is missing


def choose(group: Group, words: Sequence[str], prog: str) -> str:
    """Return the name that the first of ``words`` is. Prints help and exits where it is asked for, or nothing is.

    Raises BadInput for another word.
    """
    word = words[0] if words else ""
    if word in ("", "-h", "--help"):
        print(listing(group, prog), file=sys.stdout if word else sys.stderr)
        sys.exit(0 if word else 2)
    if word not in group.commands:
        what, known = ("flag", ["--help"]) if word.startswith("-") else ("command", list(group.commands))
        raise BadInput(f"{prog} has no {what} {shown(word)}{nearest(word, known)}; it has {', '.join(group.commands)}")
    return word


class _Terminal(io.StringIO):
    """What tyro prints, as standard output can show it: colours on a terminal, frames where there is Unicode."""

    encoding = property(lambda self: getattr(sys.__stdout__, "encoding", None))

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def parse(command: Command, words: Sequence[str], prog: str) -> Callable[[], int | None]:
    """Return the call of ``command`` that ``words`` mean. Prints help and exits where it is asked for.

    Raises BadInput for what is unknown, missing, or of another type.
    """
    about, _ = _docstring(command.call)
    kind: Any = flags_of(command)
    rest: Sequence[str] = ()
    if command.rest:
        words, rest = _split(command, words)
    printed, said = _Terminal(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
            parsed: Any = tyro.cli(
                kind,
                prog=prog,
                description="",
                args=list(words),
                config=(OmitArgPrefixes,),
                return_unknown_args=True,
            )
    except SystemExit as end:
        if end.code:
            raise BadInput(f"{prog}: {_sentence(said.getvalue())}; `{prog} --help` lists what there is") from None
        if not {"-h", "--help"} & {*words}:  # a shell's completion
            print(printed.getvalue(), end="")
            raise
        usage, _, options = printed.getvalue().partition("\n\n")
        lines = "\n".join(line.rstrip() for line in options.strip("\n").splitlines())
        print(f"{usage}\n\n{_wrapped(about)}\n\n{lines}")
        if command.examples:
            print(examples(command.examples, prog))
        raise
    given, unknown = parsed
    if unknown:
        raise BadInput(_unknown(command, unknown, prog))
    values: dict[str, Any] = {}
    parameters = inspect.signature(command.call).parameters
    for name, (metavar, text) in _asked(command).items():
        holder = next((getattr(given, _attribute(g)) for g, names in command.groups.items() if name in names), given)
        values[name] = value = tuple(rest) if name == command.rest else getattr(holder, name)
        if value is REQUIRED or (value == () and parameters[name].default is inspect.Parameter.empty):
            raise BadInput(f"{prog} needs {metavar}: {text[:1].lower()}{text[1:].rstrip('.')}; see `{prog} --help`")
        if _unwrapped(command.call, name)[1].repeated:
            values[name] = tuple(word for group in value for word in group)
    return lambda: command.call(**values)


def flags_of(command: Command) -> type:
    """Return the dataclass that tyro is to make of the words: a field for each flag, a dataclass for each group."""
    _, texts = _docstring(command.call)
    grouped: dict[str, list[tuple[str, Any, Any]]] = {name: [] for name in ("", *command.groups)}
    for name, parameter in inspect.signature(command.call).parameters.items():
        group = next((title for title, names in command.groups.items() if name in names), "")
        default = REQUIRED if parameter.default is inspect.Parameter.empty else parameter.default
        empty = () if _unwrapped(command.call, name)[2] and default is REQUIRED else default
        grouped[group].append((name, _hint(command, name, texts.get(name, ""), default), empty))
    fields = grouped.pop("")
    for title, inner in grouped.items():
        of = make_dataclass(_attribute(title), [(name, hint, field(default=default)) for name, hint, default in inner])
        of.__doc__ = ""
        fields.append((_attribute(title), Annotated[of, arg(name=title)], of()))
    made = make_dataclass(
        command.call.__name__.strip("_"),
        [
            (name, hint, field(default_factory=lambda default=default: default))  # type: ignore[misc]
            for name, hint, default in fields
        ],
    )
    made.__doc__ = _docstring(command.call)[0]
    return made


def flag(name: str) -> str:
    """Return the flag of a parameter."""
    return "--" + name.strip("_").replace("_", "-")


def examples(lines: Iterable[str], prog: str) -> str:
    """Return examples as they can be typed, what each does below it."""
    shell = f"python {prog}" if prog.split()[0].endswith(".py") else prog
    pairs = [line.partition("  #")[::2] for line in lines]
    return "\nexamples:\n" + "\n".join(f"  {shell} {words}".rstrip() + f"\n      {why.strip()}" for words, why in pairs)


def listing(group: Group, prog: str) -> str:
    """Return the help of a group."""
    width = max(map(len, group.commands)) + 4
    room = max(40, min(110, shutil.get_terminal_size().columns) - width)
    parts = [f"usage: {prog} [-h] COMMAND ...", "", _wrapped(group.about), "", "commands:"]
    for name, text in group.commands.items():
        first, *more = textwrap.wrap(text, room)
        parts += [f"  {name:<{width - 2}}{first}", *(" " * width + line for line in more)]
    if group.examples:
        parts.append(examples(group.examples, prog))
    return "\n".join([*parts, "", f"{prog} COMMAND --help says more of one."])


def refuse(flags: Sequence[str], why: str) -> None:
    """Raise :class:`BadInput` when ``flags`` were given that would have no effect."""
    if flags:
        raise BadInput(
            f"{why}, so {', '.join(flags)} would have no effect; leave {'it' if len(flags) == 1 else 'them'} out"
        )


def check_folders(files: Mapping[str, Path | None]) -> None:
    """Raise :class:`BadInput` for a file, given by a flag, that is to be written where there is no folder."""
    for name, path in files.items():
        if path is not None and not path.parent.is_dir():
            raise BadInput(f"{name} {path}: there is no folder {path.parent}; make it first")


def summary(of: Any) -> str:
    """Return the first sentence of a docstring."""
    return re.split(r"(?<=\.)\s", " ".join((inspect.getdoc(of) or "").split("\n\n")[0].split()))[0].rstrip(".")


def _hint(command: Command, name: str, text: str, default: Any) -> Any:
    kind, wants, many = _unwrapped(command.call, name)
    value = " ".join(map(str, default)) if isinstance(default, tuple) else "on" if default is True else default
    told = "(required)" if default is REQUIRED else f"(default: {value})"
    if default is None or default is False or default in ((), ""):
        told = ""
    shown_as = f"[{wants.metavar}]" if wants.positional and default is not REQUIRED and not many else wants.metavar
    said = None if kind is bool else shown_as
    config = arg(name=flag(name)[2:], help=wants.help or text, help_behavior_hint=told, metavar=said)
    if kind is bool:
        return Annotated[bool, config]
    if wants.repeated:
        return Annotated[UseAppendAction[tuple[tuple[str, ...], ...]], config]
    where = wants.metavar if wants.positional else flag(name)

    def read(words: list[str]) -> Any:
        values = tuple(_read(kind, where, word) for word in words)
        return values if many else values[0]

    spec: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
        nargs="*" if many else 1,
        metavar=wants.metavar,
        instance_from_str=read,
        is_instance=lambda value: True,
        str_from_instance=lambda value: list(map(str, value)) if isinstance(value, tuple) else [str(value)],
    )
    hint: Any = Annotated[tuple[Any, ...] if many else Any, spec, config]
    marked: Any = Positional
    return marked[hint] if wants.positional else hint


def _read(kind: Any, where: str, word: str) -> Any:
    """Return ``word`` as what it must be."""
    if get_origin(kind) is Literal:
        if word not in get_args(kind):
            raise BadInput(f"{where} {word}: give one of {', '.join(get_args(kind))}{nearest(word, get_args(kind))}")
        return word
    if kind is Path and not word:  # as of an unset shell variable; Path("") is the current folder
        raise BadInput(f"{where}: found an empty path; give a folder or file, or leave the flag out")
    if kind is Path:
        try:
            os.stat(word)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:  # a folder that may not be searched, a name too long: Path.exists raises it
            raise BadInput(f"{where} {shown(word)} cannot be looked at ({error.strerror}); give another path") from None
    try:
        return kind(word)
    except ValueError:
        wanted = "a number" if kind is float else WORDS[kind]
        raise BadInput(f"{where} {shown(word)}: expected {wanted}; see --help") from None


@cache
def _unwrapped(function: Callable[..., Any], name: str) -> tuple[Any, Wants, bool]:
    """Return the type of one value of a parameter, what it wants, and whether it takes many values."""
    hint, wants, many = get_type_hints(function, include_extras=True)[name], None, False
    while True:
        origin, args = get_origin(hint), get_args(hint)
        if origin is Annotated:
            wants = wants or next((each for each in args[1:] if isinstance(each, Wants)), None)
        elif origin is tuple:
            many = True
        elif origin not in (Union, UnionType):
            return hint, wants or Wants("|".join(args) if args else METAVARS.get(hint, "")), many
        hint = next(each for each in args if each is not NoneType)


def _asked(command: Command) -> dict[str, tuple[str, str]]:
    """What each parameter is called on the command line, and its help."""
    _, texts = _docstring(command.call)
    found = {}
    for name in inspect.signature(command.call).parameters:
        _, wants, _ = _unwrapped(command.call, name)
        found[name] = (wants.metavar if wants.positional else f"{flag(name)} {wants.metavar}", texts.get(name, ""))
    return found


def _unknown(command: Command, unknown: Sequence[str], prog: str) -> str:
    word = next((word for word in unknown if word.startswith("-")), unknown[0])
    if not word.startswith("-"):
        return f"{prog}: '{word}' is one word too many; see `{prog} --help`"
    named = word.partition("=")[0]
    known = ["--help"]
    for name in inspect.signature(command.call).parameters:
        kind, wants, _ = _unwrapped(command.call, name)
        known += [] if wants.positional else [flag(name)] + [f"--no-{flag(name)[2:]}"] * (kind is bool)
    return f"{prog} has no flag {named}{nearest(named, known)}; `{prog} --help` lists its flags"


def _split(command: Command, words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the words before the first one that is neither a flag nor a flag's value, and the others."""
    switches = {flag(name) for name in get_type_hints(command.call) if _unwrapped(command.call, name)[0] is bool}
    switches |= {f"--no-{one[2:]}" for one in switches} | {"--help", "-h"}
    place = 0
    while place < len(words) and words[place].startswith("-"):
        if words[place] == "--":
            return words[:place], words[place + 1 :]
        named = words[place].replace("_", "-")
        place += 1 if named in switches or "=" in named else 2
    return words[:place], words[place:]


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return what a docstring says before ``Args:``, and of each parameter."""
    about, _, rest = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    texts: dict[str, str] = {}
    name = ""
    for line in rest.splitlines():
        if found := re.match(r"    (\w+): (.*)", line):
            name = found[1]
            texts[name] = found[2]
        elif line.strip():
            texts[name] += f" {line.strip()}"
    return about.strip(), texts


def _wrapped(text: str) -> str:
    width = max(40, min(110, shutil.get_terminal_size().columns))
    return "\n\n".join(textwrap.fill(" ".join(part.split()), width) for part in text.split("\n\n"))


def _sentence(box: str) -> str:
    """Return what a box of tyro's says, without its frame and what follows the first rule."""
    lines = [line.strip("│╭╮╰╯─- ") for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    inside = "\n".join(lines[1:]).strip("\n").partition("\n\n")[0]
    return " ".join(inside.split()).rstrip(".")


def _attribute(title: str) -> str:
    return f"{title.replace(' ', '_')}_group"
