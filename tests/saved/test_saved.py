"""A run's programs are saved and loaded, and never where another trace could be another program."""

import dataclasses
import fnmatch
import os
import pickle
import shutil
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.base.files import PROGRAMS, cache_folder
from jspeed.base.jax_versions import machine_code
from jspeed.errors import BadInput
from jspeed.parallel.mesh import batch_lanes
from jspeed.record.provenance import PACKAGE
from jspeed.run.compute.device import device_of
from jspeed.run.compute.division import place
from jspeed.run.compute.inside import text_hash
from jspeed.run.evidence.carried import programs_of
from jspeed.run.find_recipe import find
from jspeed.run.hooks import NO_HOOKS
from jspeed.run.options import Options
from jspeed.run.train import train
from jspeed.saved import programs as saved
from jspeed.saved.hooks import add

from ..multi_process import SAME_BITS, TOY, ended, environment, metrics, places, shards, start, toy
from ..run.compute.steps import batches, mesh_of
from ..toys import TINY, TOYS

HOOKS = add(NO_HOOKS)

ROWS = 4


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache folder of its own, and the folder of programs in it."""
    monkeypatch.setenv("JSPEED_CACHE", str(tmp_path / "cache"))
    return cache_folder() / PROGRAMS


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder of programs as a first run leaves it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JSPEED_CACHE", str(tmp_path_factory.mktemp("compiled")))
        assert not tried().loaded
        return cache_folder() / PROGRAMS


@pytest.fixture
def filled(folder, compiled):
    return shutil.copytree(compiled, folder)


@pytest.fixture
def no_compiler(monkeypatch):
    """Nothing may be traced or compiled after a call of this."""

    def refuse(*_, **__):
        raise AssertionError("was traced")

    return lambda: monkeypatch.setattr(saved, "compile_program", refuse)


def tried(*sets, recipe="stdlib", mesh=None, rows=ROWS, given=None):
    """The programs of a toy, compiled or loaded."""
    loaded = find(str(recipe), [*TOYS.get(str(recipe), TINY), *sets])
    mesh = mesh or mesh_of(2)
    placement = place(loaded.recipe, mesh, "zero1", device_of(mesh, recipe=loaded.recipe))
    return saved.programs_of_run(loaded, placement, rows, True, given)


def losses(program, recipe, mesh, count=3):
    state, found = program.init(7), []
    for tokens in batches(recipe, count):
        state, made = program.steps[0][0](state, jax.device_put(tokens, batch_lanes(mesh)))
        found.append(float(made["loss"]))
    return found


def test_what_is_loaded_is_what_was_compiled(folder, no_compiler):
    mesh, recipe = mesh_of(2), find("stdlib", TINY).recipe
    first = tried()
    assert not first.loaded and len(list(folder.iterdir())) == 5  # four executables and a list
    no_compiler()
    again = tried()
    assert again.loaded and again.parts == first.parts and again.eval_lanes == first.eval_lanes
    assert again.need == first.need
    assert programs_of(again)["sha256"] == programs_of(first)["sha256"]
    assert again.host_calls() == set() and vars(again.inside["step"]) == vars(first.inside["step"])
    np.testing.assert_allclose(losses(again, recipe, mesh), losses(first, recipe, mesh), rtol=1e-6)


@pytest.mark.slow
def test_phases_and_averages(no_compiler):
    """Executables that phases share are one; that of averages is kept too."""
    first = tried(recipe="r92")
    no_compiler()
    again = tried(recipe="r92")
    shared = [
        [[phases.index(step) for step in phases] for phases in each.steps]
        for each in (first, again)
    ]
    assert again.loaded and shared[0] == shared[1]
    assert saved.unchanged not in (first.at_end, again.at_end)


def test_other_programs_are_others(filled, no_compiler, monkeypatch):
    no_compiler()
    before = jax.config.jax_numpy_rank_promotion
    with pytest.raises(AssertionError, match="was traced"):
        tried("MUON_LR=0.5")
    with pytest.raises(AssertionError, match="was traced"):
        tried(mesh=mesh_of(1))
    with pytest.raises(AssertionError, match="was traced"):
        tried(rows=ROWS + 9)
    jax.config.update("jax_numpy_rank_promotion", "warn")
    try:
        with pytest.raises(AssertionError, match="was traced"):
            tried()
    finally:
        jax.config.update("jax_numpy_rank_promotion", before)
    assert tried().loaded
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_enable_fast_math=true")
    with pytest.raises(AssertionError, match="was traced"):
        tried()


def cut(content):
    return content[: len(content) // 2]


def flipped(content):
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


@pytest.mark.parametrize(("which", "damage"), [("list", cut), ("executable", flipped)])
def test_damaged_files_are_made_again(filled, capfd, which, damage, no_compiler):
    damaged = [path for path in filled.iterdir() if path.name.startswith("stdlib-")]
    if which == "executable":
        damaged = [path for path in filled.iterdir() if path not in damaged][:1]
    (path,) = damaged
    path.write_bytes(damage(path.read_bytes()))
    assert not tried().loaded
    lines = set(capfd.readouterr().err.splitlines())
    assert lines == {f"note: {path} is not used: it is damaged"}
    no_compiler()
    assert tried().loaded


def test_another_users_files_are_not_run(filled, capfd, monkeypatch, no_compiler):
    no_compiler()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(AssertionError, match="was traced"):
        tried()
    assert "is not used: it is another user's" in capfd.readouterr().err


def test_a_module_that_changed_makes_programs_old(tmp_path, capfd, monkeypatch, no_compiler):
    path = tmp_path / "helper.py"
    path.write_text("SCALE = 2\n")
    module = types.ModuleType("helper")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "helper", module)
    tried()
    no_compiler()
    assert tried().loaded
    path.write_text("SCALE = 3\n")
    with pytest.raises(AssertionError, match="was traced"):
        tried()
    assert f"compiled again: {path} has changed" in capfd.readouterr().err
    other = types.ModuleType("patches")
    other.__file__ = str(tmp_path / "patches.py")
    path.write_text("SCALE = 2\n")
    assert tried().loaded
    monkeypatch.setitem(sys.modules, "patches", other)
    with pytest.raises(AssertionError, match="was traced"):
        tried()


READ = {
    "import os\nLANES_OF = int(os.environ.get('SIZE', 8))": "imports os",
    "import numpy as np\nTABLE = np.load('table.npy')": "uses attribute load",
    "import helper": "imports helper",
    "TABLE = open('table')": "uses open",
    "import numpy as np\nTABLE = np.random.rand(4)": "uses np.random",
    "from numpy import random": "imports random",
    "SALT = hash('text')": "uses hash",
}


@pytest.mark.parametrize("text", READ)
def test_what_a_recipe_could_read_elsewhere_is_seen(text):
    assert any(READ[text] in why for why in saved.unrepeatable(text))


def test_a_recipe_that_reads_elsewhere_is_traced_again(tmp_path, folder):
    path = tmp_path / "mine.py"
    path.write_text(find("stdlib").source + "\nimport time\n")
    assert not tried(recipe=path).loaded
    before = {each.name: each.stat().st_ino for each in folder.iterdir()}
    assert len(before) == 4  # executables, by their text
    assert not tried(recipe=path).loaded
    assert {each.name: each.stat().st_ino for each in folder.iterdir()} == before


def test_room_is_bounded(filled, monkeypatch):
    folder = filled
    theirs = folder / "somebody.txt"
    theirs.write_text("x" * 1000)
    old = folder / f"old{saved.SUFFIX}"
    left = folder / f".killed{saved.SUFFIX}.ab12"
    for path in (old, left):
        path.write_bytes(bytes(1000))
        os.utime(path, (1, 1))
    own = sum(path.stat().st_size for path in folder.glob("[0-9a-z]*.saved")) - 1000
    monkeypatch.setattr(saved, "MOST", own)
    saved.make_room(folder)
    assert theirs.exists() and not old.exists() and not left.exists() and tried().loaded
    monkeypatch.setattr(saved, "MOST", 0)
    saved.make_room(folder)
    assert list(folder.iterdir()) == [theirs]


def test_a_planned_run_neither_loads_nor_saves(tmp_path, folder, monkeypatch):
    data = shards(tmp_path / "shards")
    words = Options(
        "stdlib", data=data, steps=1, set_=(*TOY, "LAYERS=1"), progress=False, sample=False
    )

    def run(name, hooks=HOOKS, saves=True):
        train(dataclasses.replace(words, run_dir=tmp_path / name), hooks, saves=saves)
        return metrics(tmp_path / name)

    run("usual", saves=False)  # of a program of somebody's own
    assert not folder.exists()
    run("first")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(before) == 5
    monkeypatch.delattr(saved, "read")
    announced = dataclasses.replace(HOOKS, announced=lambda _: True)
    run("announced", announced)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


KILLED = """
import os, signal, sys
from jspeed.cli.main import main
from jspeed.saved import programs as saved
def killed(path, content):
    path.with_name(f".{path.name}.ab").write_bytes(content[:100])
    os.kill(os.getpid(), signal.SIGKILL)
saved.write_whole = killed
main("run")
"""


@pytest.mark.slow
def test_killed_while_saving(tmp_path):
    """Nothing is lost: the next start compiles and saves, and the one after it loads."""
    shards(tmp_path / "shards")
    words = ["--data", "shards", "--steps", 3, "--run-dir"]
    variables = environment(**SAME_BITS)
    command = [sys.executable, "-c", KILLED, *map(str, words), "0", *toy()]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    found = []
    for name in ("1", "2"):
        ((code, _, err),) = ended([start(tmp_path, variables, *words, name, *toy())])
        assert code == 0, err
        found.append(metrics(tmp_path / name))
    assert found[0] == found[1]
    assert '"loaded": false' in (tmp_path / "1" / "run.json").read_text()
    assert '"loaded": true' in (tmp_path / "2" / "run.json").read_text()


def test_a_hash_is_of_the_program_alone():
    text = 'HloModule jit_f\n\nFileNames\n1 "a.py"\n\n%f (x: f32[]) -> f32[] {\n'
    line = '  ROOT %a = f32[] add(%x, %x), metadata={op_name="f/{g}" stack_frame_id=3}\n}\n'
    other = text.replace('1 "a.py"\n', '1 "b.py"\n2 "c.py"\n') + line.replace("3}", "5}")
    assert text_hash(text + line) == text_hash(other)
    assert text_hash(text + line) != text_hash(text + line.replace("add", "multiply"))


LOADS = """
import pickle
import sys
import jax
import numpy as np
from jspeed.base.jax_versions import from_machine_code
kept = pickle.loads(sys.stdin.buffer.read())
made = from_machine_code(kept, jax.devices()[:1])
sys.stdout.buffer.write(np.asarray(made(np.eye(4, dtype=np.float32) + 1)).tobytes())
"""


def test_a_process_that_loads_lapack_finds_it():
    """As track3-soap's programs do, on a CPU."""
    matrix = np.eye(4, dtype=np.float32) + 1
    made = jax.jit(lambda x: jnp.linalg.qr(x)[0]).lower(matrix).compile()
    command, kept = [sys.executable, "-c", LOADS], pickle.dumps(machine_code(made))
    done = subprocess.run(command, input=kept, env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == np.asarray(made(matrix)).tobytes()


ELSEWHERE = """
import sys
from jspeed.saved import programs as saved
from jspeed.cli.main import main
def refuse(*_, **__):
    raise AssertionError("was traced")
if saved.__file__.startswith(sys.argv.pop()):
    saved.compile_program = refuse
main("run")
"""


def test_another_installation_loads_what_one_has_made(tmp_path):
    """At another path, with other times of change, a cache of its own and an extension of its own:
    nothing is traced or compiled, and the losses are the same bits."""
    shards(tmp_path / "shards")
    for name in ("here", "there"):
        shutil.copytree(PACKAGE, tmp_path / name / "jspeed", ignore=lambda *_: ["__pycache__"])
        for path in (tmp_path / name).rglob("*.py"):
            os.utime(path)
        with (tmp_path / name / "jspeed" / "_dataloader.abi3.so").open("ab") as file:
            file.write(name.encode())
        words = ["--data", "shards", "--steps", 3, "--programs", "programs", "--run-dir", name]
        words += [*toy("LAYERS=1"), tmp_path / "there"]
        command = [sys.executable, "-P", "-c", ELSEWHERE, *map(str, words)]
        variables = environment(
            PYTHONPATH=tmp_path / name, JSPEED_CACHE=tmp_path / f"{name}-cache", **SAME_BITS
        )
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0 and "note: the programs" not in done.stderr, done.stderr
        loaded = "true" if name == "there" else "false"
        assert f'"loaded": {loaded}' in (tmp_path / name / "run.json").read_text()
        assert not list(tmp_path.glob(f"{name}-cache/{PROGRAMS}/*"))
    assert metrics(tmp_path / "here") == metrics(tmp_path / "there")


def test_a_given_folder_says_what_differs(tmp_path, capfd, monkeypatch, no_compiler):
    """And is left as it was; its owner's files are taken, who need not be this user."""
    given = tmp_path / "given"
    assert not tried(given=given).loaded and not capfd.readouterr().err
    made = {path.name: path.read_bytes() for path in given.iterdir()}
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert tried(given=given).loaded
    no_compiler()
    monkeypatch.setattr(saved, "instructions", lambda: "flags : fpu vme amx")
    for rows, said in (
        (ROWS, "processor's instructions: expected * found amx"),
        (ROWS + 9, f"rows of an evaluation: expected {ROWS}, found {ROWS + 9}"),
    ):
        with pytest.raises(AssertionError, match="was traced"):
            tried(given=given, rows=rows)
        (line,) = capfd.readouterr().err.splitlines()
        start = f"note: the programs of stdlib in {given} are not used: "
        assert fnmatch.fnmatchcase(line, f"{start}{said}"), line
    assert {path.name: path.read_bytes() for path in given.iterdir()} == made


def test_a_given_folder_that_cannot_hold_a_run_says_so(tmp_path, capfd, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text(find("stdlib").source + "\nimport time\n")
    start = f"note: starts with --programs {tmp_path} trace"
    assert not tried(recipe=path, given=tmp_path).loaded
    assert capfd.readouterr().err.startswith(f"{start} stdlib again: it imports time in line")
    monkeypatch.setattr(saved, "write_whole", None)  # as on a full disk
    assert not tried(given=tmp_path / "full").loaded
    assert capfd.readouterr().err.endswith("it has programs that cannot be saved there\n")


def test_programs_made_elsewhere_are_for_a_command_alone(tmp_path):
    """Neither for a preregistered run nor for a caller that may have changed functions."""
    options = Options("stdlib", data=tmp_path, programs=tmp_path)
    planned = dataclasses.replace(HOOKS, announced=lambda _: True)
    for hooks, saves in ((planned, True), (HOOKS, False)):
        with pytest.raises(BadInput, match="--programs: only jspeed run takes programs"):
            train(options, hooks, saves=saves)
    with pytest.raises(BadInput, match="--programs needs jspeed.saved"):
        NO_HOOKS.saved(None, None, ROWS, True, tmp_path)


FIRST_ALONE = """
from jspeed.base import processes
from jspeed.cli.main import main
from jspeed.saved import programs as saved
compile_program = saved.compile_program
def of_first(*given, **named):
    assert processes.index() == 0, "another process compiles"
    return compile_program(*given, **named)
saved.compile_program = of_first
main("run")
"""


def of_two(cwd, *words):
    """Start two processes, of which the second may not compile."""
    command = [sys.executable, "-c", FIRST_ALONE, *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    variables = places(2, JAX_NUM_CPU_DEVICES=1, **SAME_BITS)
    return ended([subprocess.Popen(command, cwd=cwd, env=each, **pipes) for each in variables])


def test_the_first_of_two_processes_compiles_for_both(tmp_path):
    """It saves what it compiles; the next start loads it, and sends it too."""
    shards(tmp_path / "shards")
    words = ["--data", "shards", "--steps", 3, *toy("LAYERS=1"), "--run-dir"]
    for name, loaded in (("compiled", "false"), ("loaded", "true")):
        done = of_two(tmp_path, *words, name)
        assert [code for code, _, _ in done] == [0, 0], done
        assert f'"loaded": {loaded}' in (tmp_path / name / "run.json").read_text()
    assert metrics(tmp_path / "compiled") == metrics(tmp_path / "loaded")


def test_what_the_first_raises_all_raise(monkeypatch):
    """As bad input or as JAX's error, with its text. Of what it compiled, only what is in its
    program is sent."""
    sent = {}

    def first(name, make):
        return sent[name] if sent else sent.setdefault(name, make())

    monkeypatch.setattr(saved.processes, "first", first)
    for error, kind in (
        (BadInput("no room"), BadInput),
        (KeyError("x"), jax.errors.JaxRuntimeError),
    ):
        sent.clear()

        def fails(error=error):
            raise error

        with pytest.raises(type(error)):
            saved.from_first(fails, None)
        with pytest.raises(kind, match=str(error)):
            saved.from_first(None, None)
    sent.clear()
    program, store = tried(), saved.Store(types.SimpleNamespace(mesh=mesh_of(2)))
    used = [*program.others, program.sums, *program.compiled]
    store.names = {id(each): f"program {n}" for n, each in enumerate(used)}
    store.code = dict.fromkeys([*store.names.values(), "too large for the device"], "code")
    saved.from_first(lambda: program, store)
    assert pickle.loads(sent["programs"])[1].keys() == {*store.names.values()}
