"""scripts/gpu_day.sh and benches/gpu_day.py: results outlive what happens to a part, and all parts
run at toy size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jspeed.recipe import OWN_KERNELS

ROOT = Path(__file__).parents[1]


@pytest.fixture
def gpu_day(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from benches import gpu_day

    return gpu_day


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_result_is_found_out_once(gpu_day, tmp_path, capsys):
    day, calls = gpu_day.Day(tmp_path / "here", tmp_path / "copy"), []

    def call():
        calls.append(1)
        return {"ms": 3}

    day.result("a", call)
    day.result("a", call)
    gpu_day.Day(tmp_path / "here").result("a", call)
    assert calls == [1] and day.known["a"]["ms"] == 3
    assert lines(tmp_path / "here") == lines(tmp_path / "copy")
    assert [set(line) for line in lines(tmp_path / "here")] == [
        {"name", "began"},
        {"name", "seconds", "ms"},
    ]
    assert '"ms": 3' in capsys.readouterr().out


def test_what_fails_or_twice_takes_the_process_with_it_is_a_result(gpu_day, tmp_path):
    def fails():
        raise ValueError("no such kernel\nmore")

    day = gpu_day.Day(tmp_path)
    day.result("fails", fails)
    assert day.known["fails"]["failed"] == "ValueError: no such kernel"
    killed = "import os, pathlib, sys; from benches.gpu_day import Day\n"
    killed += "Day(pathlib.Path(sys.argv[1])).result('kills', lambda: os._exit(9))"
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'scripts'}{os.pathsep}{ROOT / 'python'}"}
    assert (
        subprocess.run(
            [sys.executable, "-c", killed, tmp_path], env=environment, timeout=120
        ).returncode
        == 9
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", killed, tmp_path], env=environment, timeout=120
        ).returncode
        == 9
    )
    again = gpu_day.Day(tmp_path)
    again.result("kills", dict)
    assert again.known["kills"]["failed"] == "the process ended before it, 2 times"
    said = "\n".join(gpu_day.table(again.known))
    assert (
        "- fails: ValueError: no such kernel" in said
        and "- kills: the process ended before it, 2 times" in said
    )


def test_a_line_that_was_cut_off_loses_itself_alone(gpu_day, tmp_path):
    (tmp_path / "results.jsonl").write_text('{"name": "a", "seconds": 1.0}\n{"name": "b", "sec')
    day = gpu_day.Day(tmp_path)
    day.result("c", dict)
    assert set(gpu_day.Day(tmp_path).known) == {"a", "c"} and day.known["a"] == {
        "name": "a",
        "seconds": 1.0,
    }


def test_a_part_whose_time_is_over_begins_nothing(gpu_day, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_day, "SECONDS", -1.0)
    monkeypatch.setattr(gpu_day, "TOY", True)
    monkeypatch.setitem(gpu_day.PARTS, "probe", lambda day: day.result("a", dict))
    assert gpu_day.main("probe", str(tmp_path)) == gpu_day.LATER
    assert "run it again" in capsys.readouterr().out and not (tmp_path / "results.jsonl").exists()


def test_predicted_beside_measured(gpu_day):
    shape = [1, 49152, 6, 128]
    attention = {
        "seconds": 9.0,
        "shape": shape,
        "documents": 192,
        "longest": 2048,
        "forward_ms": 1.0,
        "need_GB": 1.5,
    }
    known = {
        "environment": {"seconds": 1.0, "device": "NVIDIA H100", "versions": {"jax": "0.11.2"},
        "date": "2026-12-01"},
        "attention cudnn as r92": attention | {"both_ms": 4.0},
        "attention cudnn_lanes as r92": attention | {"both_ms": 4.0 + 3 * 192 * 6 * (384 - 16) /
        132 / 1e3},
        "stage r29": {"seconds": 60.0, "step_ms_in_a_row": 100.0, "memory_needed": 33e9,
        "fp8_calls": 3,
                      "attention": "cudnn", "predicted_ms": {"matmul": 40.0, "fusion": 10.0},
                      "measured_ms": {"matmul": 50.0, "idle": 2.0}},
        "run r29": {"seconds": 200.0, "status": "stopped", "steps": 40, "timed_seconds": 4.0,
        "compile_seconds": 50.0,
                    "val_loss": 7.0},
        "began": {"began": True},
    }  # fmt: skip
    said = "\n".join(gpu_day.table(known))
    assert said.startswith("NVIDIA H100, jax 0.11.2") and "- began: not finished" in said
    assert "| matmul | 40.00 | 50.00 | 1.25 |" in said and "| fusion | 10.00 |  |  |" in said
    assert "empty blocks as r92: 1.000 us of an SM" in said  # that is how the figures were made
    assert "run r29: stopped after 40 steps" in said


def test_kernels_are_told_apart_by_their_instruction(gpu_day):
    from benches.gpu_measurements import by_family

    text = """HloModule jit_step

ENTRY %main (p: bf16[16,16]) -> bf16[16,16] {
  %p = bf16[16,16]{1,0} parameter(0)
  %gemm.1 = bf16[16,16]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %copy.2 = bf16[16,16]{1,0} copy(%gemm.1)
}
"""
    assert by_family({"gemm.1": 3.0, "%copy.2": 1.0, "": 0.5}, [text]) == {
        "matmul": 3.0,
        "other": 1.0,
        "unknown": 0.5,
    }


@pytest.fixture
def day(tmp_path: Path) -> Path:
    """A day's folder, where scripts/gpu_day.sh installs packages: this checkout's."""
    (tmp_path / "day" / "site").mkdir(parents=True)
    (tmp_path / "day" / "site" / "jspeed").symlink_to(ROOT / "python" / "jspeed")
    return tmp_path / "day"


def script(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    environment = (
        os.environ | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ""} | more
    )
    words = [str(ROOT / "scripts" / "gpu_day.sh"), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=500, env=environment)


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["everything"], {}, "error: everything is no part"),
        (["probe"], {"PYTHON": "/bin/false"}, "error: jspeed is not"),
    ]
    + [(["probe"], {"GPU_DAY": ""}, "error: there is no NVIDIA GPU in /dev; GPU_DAY=toy")],
)
def test_wrong_input_is_one_sentence(arguments, environment, said, day):
    done = script(*arguments, DAY=str(day), **environment)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(said), done


@pytest.mark.slow
def test_the_parts_at_toy_size(day, tmp_path):
    """But for stages and own, which compile record 89 and jspeed2: minutes (`GPU_DAY=toy
    scripts/gpu_day.sh`)."""
    toy = {"GPU_DAY": "toy", "DAY": str(day), "OUT": str(tmp_path / "out")}
    for part in ("probe", "product"):
        done = script(part, **toy)
        assert done.returncode == 0, done.stderr
    found = {line["name"]: line for line in lines(day)}
    assert lines(tmp_path / "out") == lines(day)
    failed = [
        name
        for name, one in found.items()
        if one.get("failed") or one.get("wrong") or "seconds" not in one
    ]
    # which need a GPU
    assert failed == [f"preflight own kernel {kernel}" for kernel in sorted(OWN_KERNELS)]
    assert (
        found["attention xla as jspeed3"]["both_ms"] > 0
        and found["attention xla as jspeed3"]["near"] == 5
    )
    assert found["run r29"]["status"] == "stopped"
    assert found["run stdlib"]["steps"] == 6 and all(found["run r29"]["probes"].values())
    again = script("probe", **toy)
    assert again.returncode == 0 and again.stdout == "", "all of it was known"
    assert "| attention xla as jspeed3 |" in script("table", **toy).stdout
