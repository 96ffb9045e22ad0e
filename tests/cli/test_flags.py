"""The command ``jspeed``: help, examples, and what it says to words that it does not know."""

import logging
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from jspeed.cli import main, satellites
from jspeed.cli.flags import Command, Group, example_lines, parse
from jspeed.fields import Count, CountOrZero, Fields, File, Folder, Positive, Wants

from ..refusals import refused

TOP = Group(main.ABOUT, satellites.commands(), satellites.command, main.EXAMPLES)


def leaves(group: Group = TOP, prog: str = "jspeed") -> dict[str, Command]:
    """Every command by its words; the benches, whose modules take seconds to import, apart."""
    found: dict[str, Command] = {}
    for name in group.commands:
        if (one := group.load(name)) and isinstance(one, Group):
            found |= leaves(one, f"{prog} {name}") if name != "bench" else {}
        else:
            found[f"{prog} {name}"] = one
    return found


LEAVES = leaves()


def said(words: str, name: str = "") -> str:
    return refused("", main.call, shlex.split(words), name)


@pytest.mark.parametrize("prog", LEAVES)
def test_help_says_what_is_wanted_and_ends_with_examples(prog, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        parse(LEAVES[prog], ["--help"], prog)
    text = capsys.readouterr().out
    assert ended.value.code == 0 and text.startswith(f"usage: {prog} [-h]")
    assert not re.search(r"\b(None|STR|INT|FLOAT|PATH)\b", text)
    assert max(map(len, text.splitlines())) <= 110
    if LEAVES[prog].examples:
        assert text.endswith(example_lines(LEAVES[prog].examples, prog) + "\n")


@pytest.mark.parametrize("prog", [prog for prog, one in LEAVES.items() if one.examples])
def test_examples_are_command_lines(prog):
    for line in LEAVES[prog].examples:
        words, _, why = line.partition("  #")
        assert why and callable(parse(LEAVES[prog], shlex.split(words), prog))


def test_examples_of_all_name_commands():
    for line in main.EXAMPLES:
        words = shlex.split(line.partition("  #")[0])
        assert words[0] in satellites.COMMANDS
        if words[0] == "prepare":
            parse(LEAVES["jspeed prepare text"], words[2:], "jspeed prepare text")
        else:
            parse(LEAVES[f"jspeed {words[0]}"], words[1:], "jspeed")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("runn", "'run'"),
        ("--hepl", "'--help'"),
        ("leaderboard ad", "'add'"),
        ("run --stepz 3", "'--steps'"),
        ("run --step 3", "'--steps'"),
        ("run --no-resum", "'--no-resume'"),
        ("run stdlbi", "'stdlib'"),
        ("run a b", "'b'"),
        ("run --steps", "--steps"),
        ("run --steps --resume", "--steps"),
        ("run --steps 2.5", "--steps"),
        ("run --steps=", "--steps"),
        ("run --resume=yes", "--resume"),
        ("run --target-loss low", "--target-loss"),
        ("run --data=", "--data"),
        ("run --seed 'a\nb'", "--seed"),
        ("run '--se\ned' 1", "'--seed'"),
        ("prepare text a --out b --end-of-text befor", "--end-of-text"),
        ("prepare text a", "--out"),
        *(
            (f"prepare text a --out b --processes {number}", "--processes")
            for number in (0, -1, 1025)
        ),
        *(
            (f"prepare text a --out b --val-fraction {part}", "--val-fraction")
            for part in (0, 1, -1, "nan")
        ),
        *((f"prepare {name} --seed -1", "--seed") for name in ("text a --out b", "openwebtext")),
        ("export --out x", "MODEL"),
        ("leaderboard add", "RUN_DIR"),
        ("leaderboard race a b --rounds 0", "--rounds"),
        ("leaderboard race a b --rounds 251", "--rounds"),
        ("leaderboard race a b --steps 0", "--steps"),
        ("leaderboard reproduce a --n 0", "--n"),
        ("leaderboard reproduce a --n 1001", "--n"),
        ("sample a --number 10001", "--number"),
        *((f"sample a --temperature={number}", "--temperature") for number in (-0.1, "nan", "inf")),
        *((f"sample a --top-p {number}", "--top-p") for number in (0, 1.5)),
        ("sample a --top-k 0", "--top-k"),
        *((f"sample a --seed={number}", "--seed") for number in (-1, 2**32)),
        ("launch --nnodes 2", "run|SCRIPT.py"),
        ("launch --nodes 2 run", "'--nnodes'"),
    ],
)
def test_an_error_names_the_flag_or_what_was_meant(words, named):
    assert named in said(words)


def test_nothing_asked_is_answered_with_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main.call([])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert all(f"  {name}" in err for name in satellites.COMMANDS)


def given(
    one: Annotated[str, Wants("ONE", positional=True)],
    many: Annotated[tuple[str, ...], Wants("MANY", positional=True)] = (),
    number_: float = 1.0,
    when: Literal["now", "later"] = "now",
    path: Folder | None = None,
    out: File | None = None,
    sure: bool = True,
    set: Fields = (),
) -> int:
    """Give back what was given.

    Args:
        one: A word.
        many: More
            words.
    """
    global got
    got = (one, many, number_, when, path and path.name, out and out.name, sure, set)
    return 3


def test_flags_follow_from_the_signature():
    command = Command(given, groups={"where it goes": "path out"})
    words = "a b c --number=-1e3 --when later --path x/p --out o --no-sure --set A=1 B=2 --set C=3"
    assert parse(command, words.split(), "given")() == 3
    assert got == ("a", ("b", "c"), -1000.0, "later", "p", "o", False, ("A=1", "B=2", "C=3"))
    parse(command, ["a"], "given")()
    assert got == ("a", (), 1.0, "now", None, None, True, ())


@dataclass(frozen=True)
class Shape:
    """Two sides.

    Args:
        width: How wide.
        set_: What
            to set.
    """

    name: Annotated[str, Wants("NAME", positional=True)] = ""
    width: Count = 1
    height: int = 0
    set_: Fields = ()


def drawn(shape: Shape, dry: bool = False) -> int:
    """Draw.

    Args:
        dry: Draw nothing.
    """
    global got
    got = (shape, dry)
    return 3


def test_the_fields_of_a_dataclass_are_flags(capsys):
    command = Command(drawn, groups={"size": "height dry width", "rest": "set_"})
    assert parse(command, "a --width 2 --dry --height 3 --set A=1 B=2".split(), "drawn")() == 3
    assert got == (Shape("a", 2, 3, ("A=1", "B=2")), True)
    assert parse(command, [], "drawn")() == 3 and got == (Shape(), False)
    refused("--width", parse, command, ["--width", "0"], "drawn")
    with pytest.raises(SystemExit):
        parse(command, ["--help"], "drawn")
    text = capsys.readouterr().out
    places = [
        text.index(words)
        for words in ("How wide. (default: 1)", "Draw nothing", "\nrest:", "What to set.")
    ]
    assert places == sorted(places)


def test_the_words_after_a_command_are_left_alone():
    def launch(
        sure: bool = False,
        number: int = 0,
        rest: Annotated[tuple[str, ...], Wants("REST", True)] = (),
    ) -> None:
        """Take the rest."""
        global got
        got = (sure, number, rest)

    launch.__annotations__ = dict(
        sure=bool, number=int, rest=Annotated[tuple[str, ...], Wants("REST", True)]
    )
    parse(
        Command(launch, rest="rest"),
        "--sure --number 2 run --sure --number 3 -h -- x".split(),
        "launch",
    )()
    assert got == (True, 2, ("run", "--sure", "--number", "3", "-h", "--", "x"))


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_the_first_screen_is_there_at_once(words):
    code = "import sys; sys.argv = ['jspeed', *sys.argv[1:]]; from jspeed.cli.main import main\n"
    code += "try: main()\nexcept SystemExit as end: sys.exit(end.code or 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and "jspeed" in done.stdout


@pytest.mark.parametrize(("devices", "kept"), [("", False), ("0", True)])
def test_a_cuda_plugin_that_fails_is_news_only_beside_a_gpu(monkeypatch, devices, kept):
    logger = logging.getLogger("jax._src.xla_bridge")
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    main.settle_logs()
    told = "Jax plugin configuration error: Exception when calling %s.initialize()"
    record = logger.makeRecord(
        logger.name, logging.ERROR, "", 0, told, ("jax_plugins.xla_cuda12",), None
    )
    assert bool(logger.filter(record)) == kept
    assert logger.filter(logger.makeRecord(logger.name, logging.ERROR, "", 0, "another", (), None))


def checked(
    few: Annotated[Count, Wants("N")] = 1,
    rate: Positive | None = None,
    some: tuple[CountOrZero, ...] = (),
) -> None:
    """Take what fits."""
    global got
    got = (few, rate, some)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--few 0", "--few"),
        (f"--few {'9' * 4000}", "--few"),
        (f"--few {'9' * 5000}", "--few"),  # more digits than Python reads
        ("--few x", "--few"),
        ("--rate nan", "--rate"),
        ("--rate inf", "--rate"),
        ("--some 1 -2", "--some '-2'"),
    ],
)
def test_the_rule_of_an_annotation_is_checked(words, named):
    parse(Command(checked), "--few 2 --rate 0.5 --some 0 3".split(), "checked")()
    assert got == (2, 0.5, (0, 3))
    refused(named, parse, Command(checked), words.split(), "checked")


def test_a_home_folder_is_meant_wherever_a_file_may_be_named(tmp_path, monkeypatch):
    """A shell leaves ~ in --out=~/x; ``--tokenizer`` and RECIPE take a name too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("some text")
    assert f"{tmp_path}/t.json cannot be read" in said(
        "prepare text ~/a.txt --out=~/x --tokenizer=~/t.json"
    )
    assert f"{tmp_path}/mine.py" in said("plan ~/mine.py --no-compile")
    told = said("prepare text ~/a.txt --out=~nobody-of-that-name/x")
    assert "no user of that name" in told and "./~nobody-of-that-name/x" in told
