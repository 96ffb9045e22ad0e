"""Build a command line from a function's signature and docstring; a wrong flag is a one-line error message.

tyro parses and prints. A parameter is a flag, its trailing underscore left out; if its type is a dataclass, each field
is a flag. In an annotation :class:`~jspeed.fields.Wants` describes the flag, and a :class:`~jspeed.fields.Rule`
(``n: Count = 1``) is checked for every value.
"""

import contextlib
import inspect
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, make_dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction, arg
from tyro.constructors import PrimitiveConstructorSpec

from jspeed.errors import BadInput, nearest
from jspeed.fields import WORDS, Rule, Wants, flag, misfits, shown


@dataclass(frozen=True)
class Command:
    """A function as a command, examples ("ARGUMENTS  # why"), and its flags by group; others go under "options"."""

    call: Callable[..., int | None]
    examples: tuple[str, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rest: str = ""  # the parameter that gets all words from the first one on that is no flag, unparsed

    @cached_property
    def parameters(self) -> "tuple[Parameter, ...]":
        """The parameters of the function, in the help's order; for one that is a dataclass, the dataclass's fields."""
        groups = {name: title for title, names in self.groups.items() for name in names}
        order = {name: place for place, name in enumerate(groups)}
        return tuple(sorted(_parameters(self.call, groups), key=lambda one: order.get(one.name, -1)))


@dataclass(frozen=True)
class Parameter:
    """A parameter of a command's function, as the command line has it."""

    name: str
    kind: Any  # the type of one value
    rules: tuple[Rule, ...]
    wants: Wants
    many: bool
    default: Any  # REQUIRED where there is none
    group: str
    help: str
    where: str  # its name in an error message


@dataclass(frozen=True)
class Group:
    """Subcommands by name with one line of help; ``load`` imports one."""

    about: str
    commands: Mapping[str, str]
    load: Callable[[str], "Command | Group"]
    examples: tuple[str, ...] = ()


def group_of(about: str, commands: Mapping[str, Command], examples: tuple[str, ...] = ()) -> Group:
    """Return the group of ``commands`` whose help lines are the first sentences of their docstrings."""
    return Group(about, {name: summary(one.call) for name, one in commands.items()}, commands.__getitem__, examples)


METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
CONFIG = (OmitArgPrefixes,)
REQUIRED: Any = object()  # a default, so that tyro does not print its own error box


def choose_command(group: Group, words: Sequence[str], prog: str) -> str:
    """Return the subcommand that the first of ``words`` names; for --help or none print help and exit. BadInput."""
    word = words[0] if words else ""
    if word in ("", "-h", "--help"):
        print(group_help(group, prog), file=sys.stdout if word else sys.stderr)
        sys.exit(0 if word else 2)
    if word not in group.commands:
        what, known = ("flag", ["--help"]) if word.startswith("-") else ("command", list(group.commands))
        raise BadInput(f"{prog} has no {what} {shown(word)}{nearest(word, known)}; it has {', '.join(group.commands)}")
    return word


class _Terminal(io.StringIO):
    """Captures tyro's output with stdout's encoding, and with colours if that is a terminal."""

    encoding = property(lambda self: getattr(sys.__stdout__, "encoding", None))

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def parse(command: Command, words: Sequence[str], prog: str) -> Callable[[], int | None]:
    """Return the call of ``command`` with the values in ``words``. Prints help and exits for --help.

    Raises BadInput for what is unknown, missing, or of another type.
    """
    words, rest = _split(command, words) if command.rest else (words, ())
    printed, errors = _Terminal(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            parsed: Any = tyro.cli(
                flags_of(command), prog=prog, description="", args=list(words), config=CONFIG, return_unknown_args=True
            )
    except SystemExit as end:
        if end.code:
            raise BadInput(f"{prog}: {_error_text(errors.getvalue())}; `{prog} --help` lists the flags") from None
        if not {"-h", "--help"} & {*words}:  # a shell's completion
            print(printed.getvalue(), end="")
            raise
        usage, _, options = printed.getvalue().partition("\n\n")
        lines = "\n".join(line.rstrip() for line in options.strip("\n").splitlines())
        print(f"{usage}\n\n{_wrapped(_docstring(command.call)[0])}\n\n{lines}")
        if command.examples:
            print(examples(command.examples, prog))
        raise
    given, unknown = parsed
    if unknown:
        raise BadInput(_unknown(command, unknown, prog))
    values: dict[str, Any] = {}
    for one in command.parameters:
        holder = getattr(given, _attribute(one.group)) if one.group else given
        value = tuple(rest) if one.name == command.rest else getattr(holder, one.name)
        if value is REQUIRED or (value == () and one.default is REQUIRED):
            metavar = "" if one.wants.positional else f" {one.wants.metavar}"
            text = f"{one.help[:1].lower()}{one.help[1:].rstrip('.')}"
            raise BadInput(f"{prog} needs {one.where}{metavar}: {text}; see `{prog} --help`")
        values[one.name] = tuple(word for group in value for word in group) if one.wants.repeated else value
    return lambda: _call(command.call, values)


def _parameters(of: Callable[..., Any], groups: Mapping[str, str]) -> Iterator[Parameter]:
    hints, texts = get_type_hints(of, include_extras=True), _docstring(of)[1]
    for name, parameter in inspect.signature(of).parameters.items():
        if is_dataclass(hints[name]):
            yield from _parameters(hints[name], groups)
            continue
        kind, rules, wants, many = _unwrapped(hints[name])
        default = REQUIRED if parameter.default is inspect.Parameter.empty else parameter.default
        text, where = wants.help or texts.get(name, ""), wants.metavar if wants.positional else flag(name)
        yield Parameter(name, kind, rules, wants, many, default, groups.get(name, ""), text, where)


def _call(of: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a function with its parameters in ``values``, which for a dataclass holds the fields."""
    hints = get_type_hints(of)
    names = inspect.signature(of).parameters
    return of(**{name: _call(hints[name], values) if is_dataclass(hints[name]) else values[name] for name in names})


def flags_of(command: Command) -> type:
    """Return the dataclass for tyro: a field for each flag, a dataclass for each group."""
    grouped: dict[str, list[tuple[str, Any, Any]]] = {title: [] for title in ("", *command.groups)}
    for one in command.parameters:
        default = () if one.many and one.default is REQUIRED else one.default
        grouped[one.group].append((one.name, _annotation(one), default))
    fields = grouped.pop("")
    for title, inner in grouped.items():
        of = _dataclass(_attribute(title), inner, "")
        fields.append((_attribute(title), Annotated[of, arg(name=title)], of()))
    return _dataclass(command.call.__name__.strip("_"), fields, _docstring(command.call)[0])


def _dataclass(name: str, fields: Iterable[tuple[str, Any, Any]], about: str) -> type:
    """Return a dataclass of (name, type, default); frozen, because only what can be hashed may be a default."""
    made = make_dataclass(name, [(name, hint, field(default=value)) for name, hint, value in fields], frozen=True)
    made.__doc__ = about
    return made


def examples(lines: Iterable[str], prog: str) -> str:
    """Return examples as they can be typed, what each does below it."""
    shell = f"python {prog}" if prog.split()[0].endswith(".py") else prog
    pairs = [line.partition("  #")[::2] for line in lines]
    return "\nexamples:\n" + "\n".join(f"  {shell} {words}".rstrip() + f"\n      {why.strip()}" for words, why in pairs)


def group_help(group: Group, prog: str) -> str:
    """Return the help of a group."""
    width = max(map(len, group.commands)) + 4
    room = max(40, min(110, shutil.get_terminal_size().columns) - width)
    parts = [f"usage: {prog} [-h] COMMAND ...", "", _wrapped(group.about), "", "commands:"]
    for name, text in group.commands.items():
        first, *more = textwrap.wrap(text, room)
        parts += [f"  {name:<{width - 2}}{first}", *(" " * width + line for line in more)]
    parts += [examples(group.examples, prog)] if group.examples else []
    return "\n".join([*parts, "", f"Run `{prog} COMMAND --help` for details."])


def refuse(flags: Sequence[str], why: str) -> None:
    """Raise :class:`BadInput` when ``flags`` were given that would have no effect."""
    if flags:
        raise BadInput(f"{why}, so {', '.join(flags)} would have no effect; leave that out")


def check_folders(files: Mapping[str, Path | None]) -> None:
    """Raise :class:`BadInput` for a file, given by a flag, that is to be written where there is no folder."""
    for name, path in files.items():
        if path is not None and not path.parent.is_dir():
            raise BadInput(f"{name} {path}: there is no folder {path.parent}; make it first")


def summary(of: Any) -> str:
    """Return the first sentence of a docstring."""
    return re.split(r"(?<=\.)\s", " ".join((inspect.getdoc(of) or "").split("\n\n")[0].split()))[0].rstrip(".")


def _annotation(parameter: Parameter) -> Any:
    """Return the type hint, with tyro's marks, of a parameter's field."""
    kind, wants, many, default = parameter.kind, parameter.wants, parameter.many, parameter.default
    value = " ".join(map(str, default)) if isinstance(default, tuple) else "on" if default is True else default
    shown_default = default is not REQUIRED and default is not False and default not in (None, "", ())
    text = f"(default: {value})" if shown_default else "(required)" if default is REQUIRED else ""
    optional = wants.positional and default is not REQUIRED and not many
    metavar = None if kind is bool else f"[{wants.metavar}]" if optional else wants.metavar
    config = arg(name=flag(parameter.name)[2:], help=parameter.help, help_behavior_hint=text, metavar=metavar)
    if kind is bool:
        return Annotated[bool, config]
    if wants.repeated:
        return Annotated[UseAppendAction[tuple[tuple[str, ...], ...]], config]

    def read(words: list[str]) -> Any:
        values = tuple(_read(parameter, word) for word in words)
        return values if many else values[0]

    spec: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
        nargs="*" if many else 1,
        metavar=wants.metavar,
        instance_from_str=read,
        is_instance=lambda value: True,
        str_from_instance=lambda value: list(map(str, value)) if isinstance(value, tuple) else [str(value)],
    )
    hint: Any = Annotated[tuple[Any, ...] if many else Any, spec, config]
    return Annotated[hint, Positional] if wants.positional else hint


def _read(parameter: Parameter, word: str) -> Any:
    """Return ``word`` as a value of ``parameter``. Raises BadInput for another type, and where a rule does not hold."""
    kind, where = parameter.kind, parameter.where
    if get_origin(kind) is Literal:
        if word not in get_args(kind):
            raise BadInput(f"{where} {word}: give one of {', '.join(get_args(kind))}{nearest(word, get_args(kind))}")
        return word
    if kind is Path and not word:  # as of an unset shell variable; Path("") is the current folder
        raise BadInput(f"{where}: found an empty path; give a folder or file, or leave the flag out")
    try:
        value = kind(word)
        if kind is Path:
            os.stat(word)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a folder that may not be searched, a name too long: Path.exists raises it
        raise BadInput(f"{where} {shown(word)} cannot be accessed ({error.strerror}); give another path") from None
    except ValueError:
        wanted = "a number" if kind is float else WORDS[kind]
        raise BadInput(f"{where} {shown(word)}: expected {wanted}; see --help") from None
    for _, wanted, _ in misfits(value, Annotated[kind, *parameter.rules]) if parameter.rules else ():
        raise BadInput(f"{where} {word if len(word) < 40 else shown(word)}: expected {wanted}")
    return value


def _unwrapped(hint: Any) -> tuple[Any, tuple[Rule, ...], Wants, bool]:
    """Return the type and rules of one value of a hint, how it appears, and whether it takes many values."""
    wants, many, rules = None, False, tuple[Rule, ...]()
    while True:
        origin, args = get_origin(hint), get_args(hint)
        if origin is Annotated:
            wants = wants or next((each for each in args[1:] if isinstance(each, Wants)), None)
            rules += tuple(each for each in args[1:] if isinstance(each, Rule))
        elif origin is tuple:
            many = True
        elif origin not in (Union, UnionType):
            return hint, rules, wants or Wants("|".join(args) if args else METAVARS.get(hint, "")), many
        hint = next(each for each in args if each is not NoneType)


def _unknown(command: Command, unknown: Sequence[str], prog: str) -> str:
    word = next((word for word in unknown if word.startswith("-")), unknown[0])
    if not word.startswith("-"):
        return f"{prog}: unexpected argument '{word}'; see `{prog} --help`"
    named = word.partition("=")[0]
    known = ["--help", *_switches(command), *(one.where for one in command.parameters if not one.wants.positional)]
    return f"{prog} has no flag {named}{nearest(named, known)}; `{prog} --help` lists its flags"


def _switches(command: Command) -> list[str]:
    """The flags that take no value."""
    names = [flag(one.name) for one in command.parameters if one.kind is bool]
    return names + [f"--no-{name[2:]}" for name in names]


def _split(command: Command, words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the words before the first one that is neither a flag nor a flag's value, and the others."""
    alone = {*_switches(command), "--help", "-h"}
    index = 0
    while index < len(words) and words[index].startswith("-"):
        if words[index] == "--":
            return words[:index], words[index + 1 :]
        named = words[index].replace("_", "-")
        index += 1 if named in alone or "=" in named else 2
    return words[:index], words[index:]


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


def _error_text(box: str) -> str:
    """Return the text of tyro's error box, without its frame and what follows the first rule."""
    lines = [line.strip("│╭╮╰╯─- ") for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    inside = "\n".join(lines[1:]).strip("\n").partition("\n\n")[0]
    return " ".join(inside.split()).rstrip(".")


def _attribute(title: str) -> str:
    return f"{title.replace(' ', '_')}_group"
