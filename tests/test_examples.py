"""The examples, run as a reader would."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jspeed.parallel.mesh import make_mesh

from .multi_process import QUICK

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(cwd, *arguments, seconds=300, **variables):
    kept = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    own = QUICK | {"JAX_PLATFORMS": "cpu", "JSPEED_CACHE": str(cwd / "cache"), "MPLBACKEND": "Agg"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=cwd,
        env=kept | own | variables,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def test_rules_that_cannot_be_meant():
    spec = importlib.util.spec_from_file_location("placement", EXAMPLES / "placement.py")
    placement = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(placement)
    mesh = make_mesh({"data": 4, "model": 2})
    tree = {"a": {"w": np.ones((6, 3)), "b": np.ones(6)}}
    placed = placement.place(tree, [("a/.*", ("model", "data"))], mesh)
    assert [(one.path, one.spec, one.why) for one in placed] == [
        ("a/b", PartitionSpec(), "the rule is for 2 dimensions"),
        ("a/w", PartitionSpec("model", None), "3 is no multiple of data"),
    ]
    with pytest.raises(ValueError, match="rule 'a' names 'pipe'; the mesh has data, model"):
        placement.place(tree, [("a", ("pipe",))], mesh)
    with pytest.raises(ValueError, match="cuts two dimensions over one axis"):
        placement.place(tree, [("a", ("data", "data"))], mesh)


def test_placement_by_path_and_size(tmp_path):
    """27 arrays by rules; one of a dimension, which is asked about no columns, is reported as
    without one."""
    done = run(tmp_path, EXAMPLES / "placement.py")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    specs = {line.split()[0]: line.partition(" on ")[2].split(")")[0] + ")" for line in lines}
    columns, rows = "(None, 'model')", "('model', None)"
    expected = {"gain": "()", "embed": "()", "head": "()", "positions": columns}
    for layer in range(4):
        names = ("query", "key", "value", "up", "out", "down")
        expected |= {
            f"layers/{layer}/{name}": rows if name in ("out", "down") else columns for name in names
        }
    assert specs == expected and len(specs) == 28
    assert last == "28 arrays, 1 without a rule: gain"
    assert "fewer than 2048 elements" in next(line for line in lines if line.startswith("head"))
    up = next(line for line in lines if line.startswith("layers/0/up"))
    assert f"{64 * 256 / 2 * 4 / 1e3:.2f} kB" in up


@pytest.mark.slow
def test_two_processes_are_one_of_eight_devices(tmp_path):
    """And the page that shows the program shows its output too."""
    program, page = (
        EXAMPLES / "two_processes.py",
        (EXAMPLES.parent / "docs" / "reference" / "join.md").read_text(),
    )
    assert f"```python\n{program.read_text()}```" in page
    launch = [
        *"-m jspeed launch --standalone --nproc-per-node".split(),
        2,
        "--results",
        "results.json",
        program,
    ]
    two = run(tmp_path, *launch, seconds=60)
    assert two.returncode == 0 and not two.stderr, two.stderr
    *steps, zero, one = two.stdout.splitlines()
    assert len(steps) == 4 and "\n".join(f"    {line}" for line in steps) in page
    assert zero.startswith("process 0: {'rows': 32, 'devices': 1, 'loss': 0.0005")
    assert one == f"process 1{zero[9:]}"
    first, second = json.loads((tmp_path / "results.json").read_text())
    assert (first.pop("rank"), second.pop("rank")) == (0, 1) and first == second
    assert first["exit_code"] == 0
    alone = run(tmp_path, program, JAX_NUM_CPU_DEVICES="8")
    assert alone.returncode == 0 and alone.stdout.splitlines()[:4] == steps, alone.stderr
    assert alone.stdout.splitlines()[4].startswith(
        "process 0: {'rows': 64, 'devices': 8, 'loss': 0.0005"
    )
    np.testing.assert_allclose(first["weights"], np.arange(8), atol=0.02)


def test_loader(tmp_path):
    """Documents where the tables say, blocks in another order, the same tokens after resuming."""
    done = run(tmp_path, EXAMPLES / "loader.py", tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("batch 0: (10, 256) tokens, documents per lane [")
    first, last = "lane 0 has documents at [0, ", "of 256 tokens"
    assert lines[1].startswith(first) and lines[1].endswith(last)
    assert lines[2:] == [
        "resumed at step 1 with the same tokens",
        "blocks in a random order: 15 of the first 50 are so in the files",
    ]


def code_of(name):
    """The code cells of a notebook."""
    notebook = json.loads((EXAMPLES / name).read_text())
    assert notebook["nbformat"] == 4 and not any(cell.get("outputs") for cell in notebook["cells"])
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_sizing_notebook_says_the_published_numbers(tmp_path):
    """Parameters of GPT-2 and GPT-3, 6 N D over 312e12 x 8 x 0.3 a second, the tutorial's table of
    GPT-3, nanoGPT's grid for approach 3, its line for approach 2, and its FLOPs of GPT-2."""
    (tmp_path / "notebook.py").write_text("\n".join(code_of("sizing.ipynb")))
    done = run(tmp_path, "notebook.py")
    assert done.returncode == 0, done.stderr
    eight = (
        "parameters, bf16 43.65; gradients, bf16 43.65; master copy, fp32 87.30; Adam's moments,"
        " fp32 174.60"
    )
    best = "2.21e+19 FLOPs: 326.1 M parameters, 11.29 B tokens; on the grid 316.23 M, 11.65 B"
    laws = "tokens 1.9031; D ~ N^1.04096, so for 124 M parameters 2.2924 B tokens"
    counts = "124,439,808 parameters", "174,604,259,328 parameters", "874,944,921,600 FLOPs"
    for words in (*counts, "3.46 days", eight, "64 devices", "all 43.65", best, laws):
        assert words in done.stdout


def test_shardings_notebook_says_the_tutorials_numbers(tmp_path):
    """Those of seeds.md, sections 4 to 6, and where a tutorial is wrong what is right: see the
    comments."""
    (tmp_path / "notebook.py").write_text("\n".join(code_of("shardings.ipynb")))
    done = run(tmp_path, "notebook.py")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()

    def after(words):
        [line] = [line for line in lines if line.startswith(words)]
        return line.removeprefix(words).strip()

    assert lines[:7] == [
        "8 devices",
        "int32[4,8] in tiles of 2x2 on devices",
        *[
            "┌───┬───┬───┬───┐",
            "│ 0 │ 1 │ 2 │ 3 │",
            "├───┼───┼───┼───┤",
            "│ 4 │ 5 │ 6 │ 7 │",
            "└───┴───┴───┴───┘",
        ],
    ]
    assert "│ 0,4 │ 1,5 │ 2,6 │ 3,7 │" in lines  # the sums of columns
    # the turned mesh
    assert "│ 0 │ 2 │ 4 │ 6 │" in lines and after("the same array:") == "True"
    assert after("int32[4@X,8@Y]") == "summed over rows: int32[8@Y]"
    assert "float32[32@X] float32[32@X,4]" in done.stdout
    for mode in ("automatic  [", "explicit   [", "manual     ["):
        values = [float(word) for word in after(mode).removesuffix("]").split()]
        assert values == pytest.approx([0.01422223, 0.9701333, 0.00124826, 0.08572862], abs=1e-6)
    assert any(line.split()[:3] == ["all-reduce", "X", "16"] for line in lines)
    assert (
        done.stdout.count("unreduced-result - ") == done.stdout.count("ungathered-weight - ") == 1
    )
    assert after("sums of parts") == "[  6  22  38  54  70  86 102 118], psum 496"
    assert after("psum of means") == "124.0, pmean 15.5, mean 15.5"
    assert after("head 0, right:") == "[[0, 1], [0, 1], [0, 1], [0, 1]]"
    assert after("heads:").endswith("exchanged: nothing") and "all-gather" in after("not_heads:")
    factors = [
        float(line.split(" times")[0].split()[-1]) for line in lines if "times the FLOPs, " in line
    ]
    assert factors == pytest.approx([1, 4, 2, 8, 1], abs=0.05)
    assert after("the same numbers:") == "True"
    assert "note: fsdp: w is sharded over the batch axis 'data'" in done.stdout
    for mode in ("automatic  start", "manual     start", "explicit   start"):
        # One that trains nothing stays at 0.2495842, the loss after one step.
        start, one, hundred = (float(part.split()[-1]) for part in after(mode).split(","))
        assert (start, one) == (0.25, pytest.approx(0.2495842, abs=1e-6))
        assert hundred == pytest.approx(0.2137404, abs=1e-6)
    assert lines[-1] == "all agree to 1e-6: True"


def test_notebooks_say_what_opens_them():
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        assert "pip install notebook" in first, path


WHEEL = "/x/jspeed-0.1.0-cp311-abi3-linux_x86_64.whl"


@pytest.mark.parametrize(
    ("found", "cargo", "source", "wanted"),
    [
        ("CPU", True, "", [f"jspeed @ {EXAMPLES.parent.as_uri()}"]),
        (
            "GPU",
            False,
            "git+https://host/jspeed",
            ["rustup.rs", "jspeed[cuda12] @ git+https://host/jspeed"],
        ),
        ("TPU", False, WHEEL, [f"jspeed[tpu] @ file://{WHEEL}"]),
        ("GPU", True, "git+https://host/jspeed", ["jspeed[cuda12] @ git+https://host/jspeed"]),
    ],
)
def test_notebook_installs_what_the_machine_needs(
    found, cargo, source, wanted, monkeypatch, tmp_path
):
    """The cell as it is, on machines that it is told about: Colab's and Kaggle's with a GPU, a TPU,
    or neither."""
    commands = []

    def run(command, **_):
        if command == ["nvidia-smi", "-L"]:
            return subprocess.CompletedProcess(command, 0, b"GPU 0: Tesla T4\n")
        commands.append(command)

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(
        shutil, "which", lambda name: {"nvidia-smi": found == "GPU", "cargo": cargo}[name] or None
    )
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(Path, "glob", lambda place, _: [place / "accel0"] * (found == "TPU"))
    monkeypatch.setenv("JSPEED_SOURCE", source)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    cell = code_of("names.ipynb")[0]
    monkeypatch.chdir(EXAMPLES if not source else tmp_path)
    exec(compile(cell, "cell", "exec"), {})
    *before, pip = commands
    assert len(commands) == len(wanted)
    assert all(words in line for words, line in zip(wanted, before, strict=False))
    assert pip == [sys.executable, "-m", "pip", "install", "-q", wanted[-1]]
    assert (".cargo/bin" in os.environ["PATH"].split(os.pathsep)[0]) >= bool(before)
    monkeypatch.setenv("JSPEED_SOURCE", "")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="set SOURCE to git"):
        exec(compile(cell, "cell", "exec"), {})


def test_notebook_from_top_to_bottom(tmp_path):
    """As on a CPU; and once more the last cell, which there says why it is left out, as if JAX had
    said "a T4"."""
    *cells, last = code_of("names.ipynb")
    again = last.replace(
        '("STEPS=1000", "COOLDOWN=1000")',
        '("WIDTH=32", "LAYERS=1", "HEADS=2", "LANES=8", "LANE_LEN=16", "EVAL_LEN=16",'
        ' "EVAL_TOKENS=160", "STEPS=3")',
    )
    assert again != last
    told = 'platform, found["devices"]["compute_capability"] = "gpu", "7.5"'
    shown = 'print(json.loads((work / "large" / "config.json").read_text())["fields"]["COMPUTE"])'
    (tmp_path / "notebook.py").write_text("\n".join([*cells, last, told, again, shown]))
    middles = ("n", "l", "r", "st", "nd", "v", "th")
    names = [
        a + b + c
        for a in ("ma", "bri", "car", "do", "e", "jo")
        for b in middles
        for c in ("a", "e", "o", "y")
    ]
    (tmp_path / "names.txt").write_text("\n".join(names))
    (tmp_path / "play.txt").write_text("What is a name?\nAnother name.\n" * 100)
    files = {"NAMES": str(tmp_path / "names.txt"), "SHAKESPEARE": str(tmp_path / "play.txt")}
    # Most of its time is compilation, which LLVM's optimisations double; the limit is for what
    # hangs on a busy machine.
    quick = {"STEPS": "20"}
    done = run(tmp_path, "notebook.py", seconds=1800, **quick, **files)
    assert done.returncode == 0, done.stderr
    loss = done.stdout.partition("loss over the last 50 steps: ")[2]
    assert float(loss.split()[0]) < 2.5
    assert done.stdout.count("temperature ") == 3 and "#" in done.stdout
    assert "jspeed is installed; this machine has a " in done.stdout
    assert "attention: xla (the only" in done.stdout
    assert "skipped: it is for a GPU or a TPU, and this is a cpu" in done.stdout
    assert done.stdout.endswith("float32\n")
