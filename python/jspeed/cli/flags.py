"""Build a command line from a function's signature and docstring; a wrong flag is a one-line error
message.

argparse parses and prints. A parameter is a flag, its trailing underscore left out; if its type is
a dataclass, each field is a flag. In an annotation :class:`~jspeed.fields.Wants` describes the
flag, and a :class:`~jspeed.fields.Rule` (``n: Count = 1``) is checked for every value. A flag that
is not given has the function's own default.
"""

import argparse
import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from jspeed.errors import BadInput, nearest
from jspeed.fields import Rule, Wants, flag, misfits, shown

METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
USAGE: dict[Any, str] = {
    None: " {}",
    "?": " [{}]",
    "+": " {} ...",
    "*": " [{} ...]",
    argparse.PARSER: " {} ...",
}


@dataclass(frozen=True)
class Command:
    """A function as a command, examples ("ARGUMENTS  # why"), and names of parameters by group,
                                                      with spaces between.

    Flags of other parameters go under "options".
    """

    call: Callable[..., int | None]
    examples: tuple[str, ...] = ()
    groups: Mapping[str, str] = field(default_factory=dict)
    rest: str = ""  # the parameter that takes the words from the first positional one on, unparsed


@dataclass(frozen=True)
class Group:
    """Subcommands by name with one line of help; ``load`` imports one."""

    about: str
    commands: Mapping[str, str]
    load: Callable[[str], "Command | Group"]
    examples: tuple[str, ...] = ()


def group_of(about: str, commands: Mapping[str, Command], examples: tuple[str, ...] = ()) -> Group:
    """Return the group of ``commands`` whose help lines are the first sentences of their
    docstrings."""
    lines = {
        name: re.split(r"\.(?:\s|$)|\n\n", _docstring(one.call)[0])[0]
        for name, one in commands.items()
    }
    return Group(
        about,
        {name: " ".join(line.split()) for name, line in lines.items()},
        commands.__getitem__,
        examples,
    )


def choose_command(group: Group, words: Sequence[str], prog: str) -> str:
    """Return the subcommand that the first of ``words`` names; for --help or none print help and
    exit. BadInput."""
    word = words[0] if words else ""
    if word in group.commands:
        return word
    parser = _Parser(prog, group.about, group.examples)
    listed = parser.add_subparsers(
        metavar="COMMAND", title="commands", parser_class=argparse.ArgumentParser
    )
    for name, text in group.commands.items():
        listed.add_parser(name, help=text)
    if word in ("", "-h", "--help"):
        parser.print_help(sys.stdout if word else sys.stderr)
        sys.exit(0 if word else 2)
    what, known = (
        ("flag", ["--help"]) if word.startswith("-") else ("command", list(group.commands))
    )
    parser.error(f"there is no {what} {shown(word)}{nearest(word, known)}")


def parse(command: Command, words: Sequence[str], prog: str) -> Callable[[], int | None]:
    """Return the call of ``command`` with the values in ``words``. Prints help and exits for
    --help.

    Raises BadInput for what is unknown, missing, or of another type.
    """
    parser = _Parser(prog, _docstring(command.call)[0], command.examples)
    places: dict[str, Any] = {}
    for title, names in command.groups.items():
        places |= dict.fromkeys(names.split(), parser.add_argument_group(title))
    flags, usage = {"--help"}, f"{prog} [-h] [FLAGS]"
    for name, hint, default, text in _parameters(command.call):
        action = _add(
            places.get(name, parser), name, hint, default, text, unparsed=name == command.rest
        )
        flags.update(action.option_strings)
        usage += "" if action.option_strings else USAGE[action.nargs].format(action.metavar)
    parser.usage = usage.replace("%", "%%")
    read = parser.parse_known_args if command.rest else parser.parse_known_intermixed_args
    values, unknown = read([_with_dashes(word, flags) for word in words])
    for word in sorted(unknown, key=lambda word: not word.startswith("-")):
        named = word.partition("=")[0]
        what = f"there is no flag {shown(named)}{nearest(named, flags)}"
        parser.error(what if word.startswith("-") else f"unexpected argument {shown(word)}")
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(values).items()
    }
    if command.rest:
        rest = tuple(words[-len(given[command.rest]) :])
        given[command.rest] = rest[1:] if rest[0] == "--" else rest
    return lambda: _call(command.call, given)


class _Parser(argparse.ArgumentParser):
    def __init__(self, prog: str, about: str, examples: Iterable[str]) -> None:
        width = max(40, min(110, shutil.get_terminal_size().columns))
        super().__init__(
            prog=prog,
            description="\n\n".join(
                textwrap.fill(" ".join(part.split()), width) for part in about.split("\n\n")
            ),
            epilog=example_lines(examples, prog),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise BadInput(
            f"{self.prog}: {message.removeprefix('argument ')}; see `{self.prog} --help`"
        )


def example_lines(examples: Iterable[str], prog: str) -> str:
    """Return examples as they can be typed, what each does below it."""
    shell = f"python {prog}" if prog.split()[0].endswith(".py") else prog
    pairs = [line.partition("  #")[::2] for line in examples]
    lines = [f"  {shell} {words}".rstrip() + f"\n      {why.strip()}" for words, why in pairs]
    return "\n".join(["examples:", *lines] if lines else [])


def _parameters(of: Callable[..., Any]) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield name, type hint, default and help of the parameters; for one that is a dataclass, of
    its fields."""
    hints, texts = get_type_hints(of, include_extras=True), _docstring(of)[1]
    for name, parameter in inspect.signature(of).parameters.items():
        if is_dataclass(hints[name]):
            yield from _parameters(hints[name])
        else:
            yield name, hints[name], parameter.default, texts.get(name, "")


def _add(
    parser: Any, name: str, hint: Any, default: Any, text: str, unparsed: bool
) -> argparse.Action:
    """Add a flag or a positional argument to a parser or one of its groups."""
    kind, many, extras = _unwrapped(hint)
    wants = next(
        (each for each in extras if isinstance(each, Wants)), Wants(METAVARS.get(kind, ""))
    )
    required = default is inspect.Parameter.empty
    value = (
        " ".join(map(str, default))
        if isinstance(default, tuple)
        else "on"
        if default is True
        else default
    )
    note = (
        " (required)"
        if required
        else ""
        if value is None or value is False or value == ""
        else f" (default: {value})"
    )
    about = f"{wants.help or text}{note}".replace("%", "%%")
    if kind is bool:
        switch = argparse.BooleanOptionalAction
        return parser.add_argument(
            flag(name), dest=name, action=switch, default=argparse.SUPPRESS, help=about
        )
    metavar = wants.metavar or "|".join(get_args(kind))
    where = metavar if wants.positional else flag(name)
    rules = tuple(each for each in extras if isinstance(each, Rule))
    options: dict[str, Any] = {"metavar": metavar, "help": about}
    if get_origin(kind) is Literal:
        options["choices"] = get_args(kind)
    else:
        options["type"] = partial(_read, where, kind, rules)
    if wants.positional:
        nargs = (
            argparse.PARSER
            if unparsed
            else ("+" if required else "*")
            if many
            else None
            if required
            else "?"
        )
        return parser.add_argument(
            name, nargs=nargs, default=None if required else default, **options
        )
    options |= {"action": "extend", "nargs": "+"} if many else {}
    return parser.add_argument(
        flag(name), dest=name, required=required, default=argparse.SUPPRESS, **options
    )


def _unwrapped(hint: Any) -> tuple[Any, bool, tuple[Any, ...]]:
    """Return the type of one value of a hint, whether it takes many values, and what its Annotated
    say."""
    origin, args = get_origin(hint), get_args(hint)
    if origin not in (Annotated, tuple, Union, UnionType):
        return hint, False, ()
    kind, many, extras = _unwrapped(next(each for each in args if each is not NoneType))
    return kind, many or origin is tuple, (args[1:] if origin is Annotated else ()) + extras


def _read(where: str, kind: Any, rules: tuple[Rule, ...], word: str) -> Any:
    """Return ``word`` as a value. Raises BadInput for another type, and where a rule does not
    hold."""
    # a shell expands ~/x but not --out=~/x; some flags take a file or a name
    if kind is Path or word.startswith("~/"):
        word = os.path.expanduser(word)
    if kind is Path:
        if not word:  # as of an unset shell variable; Path("") is the current folder
            raise BadInput(
                f"{where}: found an empty path; give a folder or file, or leave the flag out"
            )
        try:
            os.stat(word)
        except (FileNotFoundError, NotADirectoryError):
            if word.startswith("~"):
                raise BadInput(
                    f"{where} {shown(word)}: no user of that name has a home folder here; write"
                    f" ./{word} for a name that begins with ~"
                ) from None
        # a folder that may not be searched, a name too long: Path.exists raises it
        except OSError as error:
            raise BadInput(
                f"{where} {shown(word)} cannot be accessed ({error.strerror}); give another path"
            ) from None
    try:
        value = kind(word)
    except ValueError:
        value = word
    for _, wanted, _ in misfits(value, Annotated[kind, *rules] if rules else kind):
        raise BadInput(f"{where} {shown(word)}: expected {wanted}")
    return value


def _call(of: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a function with its parameters in ``given``, which for a dataclass holds the fields."""
    hints, names = get_type_hints(of), inspect.signature(of).parameters
    nested = {name: _call(hints[name], given) for name in names if is_dataclass(hints[name])}
    return of(**nested, **{name: given[name] for name in names if name in given})


def _with_dashes(word: str, flags: Iterable[str]) -> str:
    """Return a flag written with underscores, as torchrun's may be, with dashes; any other word as
    it is."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.replace("_", "-") in flags else word


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return what a docstring says before ``Args:``, and of each parameter."""
    about, _, args = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    texts = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", args, re.M)
    return about.strip(), {name: " ".join(text.split()) for name, text in texts}


def refuse(flags: Mapping[str, object], why: str) -> None:
    """Raise :class:`BadInput` for flags, by name, that have a value: it would have no effect.

    None, False and an empty tuple are what a flag has that was not given.
    """
    if given := [
        name
        for name, value in flags.items()
        if value is not None and value is not False and value != ()
    ]:
        raise BadInput(f"{why}, so {', '.join(given)} would have no effect; leave that out")


def check_folders(files: Mapping[str, Path | None]) -> None:
    """Raise :class:`BadInput` for a file, given by a flag, that is to be written where there is no
    folder."""
    for name, path in files.items():
        if path is not None and not path.parent.is_dir():
            raise BadInput(f"{name} {path}: there is no folder {path.parent}; make it first")
