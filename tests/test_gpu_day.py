"""scripts/gpu_day.sh and benches/gpu_day.py: results outlive what happens to a call, one process at
a time has the device, and all parts run at toy size."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def gpu_day(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setenv("BACK", str(tmp_path / "back"))
    from benches import gpu_day

    return gpu_day


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def told(gpu_day, monkeypatch, *said: dict | str):
    """Let a task's process print these, and end."""
    asked = []

    def lines_of(task, names, until):
        asked.append(list(names))
        for line in said:
            if isinstance(line, str) or line["name"] in names:
                yield line if isinstance(line, str) else json.dumps(line)

    monkeypatch.setattr(gpu_day, "lines_of", lines_of)
    return asked


def test_a_result_is_found_out_once(gpu_day, monkeypatch, tmp_path, capsys):
    both = {"name": "a", "begins": True}, {"name": "a", "ms": 3}
    both += {"name": "b", "begins": True}, {"name": "b", "ms": 4}
    asked = told(gpu_day, monkeypatch, "a warning", *both)
    day, task = gpu_day.Day(tmp_path / "here", tmp_path / "copy"), gpu_day.Task("x", ("a", "b"))
    gpu_day.work(day, task)
    gpu_day.work(gpu_day.Day(tmp_path / "here"), task)
    assert asked == [["a", "b"]] and day.known["b"]["ms"] == 4
    assert lines(tmp_path / "here") == lines(tmp_path / "copy")
    assert [line["name"] for line in lines(tmp_path / "here")] == ["a", "b"]
    assert '"ms": 3' in capsys.readouterr().out


def test_what_ends_its_process_twice_is_left_out(gpu_day, monkeypatch, tmp_path):
    def lines_of(task, names, until):
        for name in names:
            yield json.dumps({"name": name, "begins": True})
            if name == "b":
                yield "CUDA error: an illegal address"
                return
            yield json.dumps({"name": name, "ms": 1})

    monkeypatch.setattr(gpu_day, "lines_of", lines_of)
    day = gpu_day.Day(tmp_path)
    gpu_day.work(day, gpu_day.Task("x", ("a", "b", "c")))
    assert day.known["b"]["failed"] == "its process ended 2 times: CUDA error: an illegal address"
    assert [line["name"] for line in lines(tmp_path)] == ["a", "b", "b", "c"]
    said = "\n".join(gpu_day.table(day.known))
    assert "- b: its process ended 2 times: CUDA error" in said and "- c" not in said


def test_a_line_that_was_cut_off_loses_itself_alone(gpu_day, tmp_path):
    (tmp_path / "results.jsonl").write_text('{"name": "a", "seconds": 1.0}\n{"name": "b", "sec')
    day = gpu_day.Day(tmp_path)
    day.write("c", seconds=2.0)
    assert set(gpu_day.Day(tmp_path).known) == {"a", "c"} and day.known["a"]["seconds"] == 1.0


def test_a_call_whose_time_is_over_begins_nothing(gpu_day, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_day, "SECONDS", -1.0)
    monkeypatch.setattr(gpu_day, "TOY", True)
    one = [gpu_day.Task("x", ("a",))]
    monkeypatch.setitem(gpu_day.gpu_tasks.PARTS, "quarter", lambda folder: one)
    assert gpu_day.main("quarter", str(tmp_path)) == gpu_day.LATER
    assert "make the call again" in capsys.readouterr().out


def test_the_next_machine_takes_over_results_and_programs(gpu_day, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_day, "PIECE", 10_000)
    first, out, second = (tmp_path / name for name in ("first", "back", "second"))
    gpu_day.Day(first, out).write("a", seconds=1.0)
    (first / "cache" / "xla").mkdir(parents=True)
    made = {f"jit_step-{n}-cache": os.urandom(9_000) for n in range(3)}
    for name, content in made.items():
        (first / "cache" / "xla" / name).write_bytes(content)
    gpu_day.pack(first / "cache", out)
    pieces = sorted(out.glob("cache.tar.*"))
    assert 3 <= len(pieces) <= gpu_day.PIECES and all(p.stat().st_size <= 10_000 for p in pieces)
    for _ in range(2):  # the second time there is nothing new
        gpu_day.read_back(second)
    assert lines(second) == lines(first)
    assert {p.name: p.read_bytes() for p in (second / "cache" / "xla").iterdir()} == made


def test_programs_that_are_too_many_are_left_out(gpu_day, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_day, "PIECE", 10_000)
    (tmp_path / "cache").mkdir()
    for n in range(9):
        (tmp_path / "cache" / str(n)).write_bytes(os.urandom(9_000))
    gpu_day.pack(tmp_path / "cache", tmp_path)
    assert len(list(tmp_path.glob("cache.tar.*"))) == gpu_day.PIECES


def test_one_process_at_a_time_has_the_device(gpu_day, tmp_path, monkeypatch):
    from benches.gpu_measurements import turn

    monkeypatch.setenv("TURN", str(tmp_path / "turn"))

    def one(_):
        with turn() as span:
            time.sleep(0.03)
        return span

    with ThreadPoolExecutor(4) as pool:
        spans = sorted(pool.map(one, range(8)))
    assert all(after[0] >= before[1] for before, after in zip(spans, spans[1:], strict=False))


def test_a_task_ends_with_the_call(tmp_path):
    """However that ends: `kill -9` cannot be caught."""
    child = "from benches.gpu_tasks import end_with_parent; import time; end_with_parent();"
    child += "print('ready', flush=True); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    words = [sys.executable, "-c", parent]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        assert process.stdout.read() == ""  # the pipe's last writer, the child, is gone


def rate(family: str, ms: float, flops: float = 0.0, moved: float = 0.0) -> dict:
    facts = {"seconds": 2.0, "family": family, "flops": flops, "bytes": moved, "ms": ms / 2}
    return facts | {"sustained_ms": ms, "call": 100.0, "at": 130.0}


# An H100's 989.4 TFLOP/s of bf16 and 1,978.9 of FP8, 3.35 TB/s.
KNOWN = {
    "environment": {"seconds": 1.0, "device_kind": "cpu", "versions": {"jax": "0.11.2"},
    "date": "2026-12-01", "call": 100.0, "at": 110.0},
    "bf16 head": rate("matmul", 1.0, 0.5 * 989.4e9) | {"span": [110.0, 114.0]},
    "FP8 head, fast sums": rate("fp8_matmul", 1.0, 0.6 * 1978.9e9) | {"span": [112.0, 116.0]},
    "FP8 head, fp32 sums": rate("fp8_matmul", 2.0, 0.6 * 1978.9e9) | {"span": [116.0, 120.0]},
    "copy": rate("memory", 1.0, 0.0, 0.9 * 3.35e9),
    "attention cudnn, window 129, forward": rate("attention_forward", 1.0, 2e11),
    "attention cudnn, window 129, both": rate("attention_backward", 3.0, 7e11),
    "stage r92": {"seconds": 60.0, "step_ms_in_a_row": 10.0, "memory_needed": 33e9, "fp8_calls": 89,
                  "attention": "cudnn", "first_loss": 9.57, "loss": 8.0,
                  "counted": [["matmul", "bf16", 0.65 * 989.4e9, 1.0, 0, 2.0],
                              ["fusion", "", 0.0, 0.85 * 3.35e9, 0, 3.0]],
                  "measured_ms": {"matmul": 2.5, "unknown": 2.0}, "call": 200.0, "at": 210.0},
    "run r29": {"seconds": 200.0, "status": "stopped", "steps": 40, "timed_seconds": 4.0,
    "compile_seconds": 50.0, "val_loss": 7.0},
    "attention as r92": {"seconds": 9.0, "shape": [1, 49152, 6, 128], "documents": 192,
                         "longest": 2048,
                         "cudnn": {"both_ms": 4.0, "forward_ms": 1.0, "need_GB": 1.5},
                         "cudnn_lanes": {"both_ms": 4.0 + 3 * 192 * 6 * (384 - 16) / 132 / 1e3,
                                         "forward_ms": 1.0, "need_GB": 1.5}},
    "began": {"tries": 1},
}  # fmt: skip


def test_predicted_beside_measured(gpu_day):
    said = "\n".join(gpu_day.table(KNOWN))
    assert said.startswith("cpu, jax 0.11.2") and "- began: not finished" in said
    # [110, 116] and [116, 120], of 30 and 10 seconds
    assert "the device measured for 10 of 40 s (25%), 2 calls" in said
    assert "| bf16 head | 0.5000 | 1.0000 | 0.7692 | 989 TFLOP/s |" in said
    assert "10.00 ms a step, predicted 5.00" in said and "loss 9.57 to 8.00" in said
    assert "| matmul | 2.00 | 2.50 | 1.25 |" in said and "| fusion | 3.00 |  |  |" in said
    assert "empty blocks as r92: 1.000 us of an SM" in said  # that is how the figures were made
    assert "run r29: stopped after 40 steps" in said


def test_measured_rates_go_into_the_plan(gpu_day, tmp_path, monkeypatch):
    from benches import gpu_tables
    from jspeed.plan import assumed, target

    said = "\n".join(gpu_day.say_plan(KNOWN, tmp_path))
    assert f"written to {tmp_path / 'rates.toml'}" in said, "a CPU is no target"
    assert "| matmul | 0.65 | 0.5 |" in said and "| memory | 0.85 | 0.9 |" in said
    assert "| fp8_matmul | 0.55 | 0.4 |" in said  # 1.2 peaks' work in 3 ms
    assert "| attention_backward | 0.4 | 0.2527 |" in said  # 5e11 in 2 ms
    # 2 x 0.65 / 0.5 + 3 x 0.85 / 0.9, and the gaps
    assert "assumed rates 5.00 ms, measured rates 5.44, measured 10.00" in said
    assert "| matmul | 2.60 | 2.50 | 0.96 |" in said
    monkeypatch.setattr(target, "MEASURED", tmp_path / "measured")
    monkeypatch.setattr(gpu_tables, "MEASURED", tmp_path / "measured")
    kind = target.load_target("h100").device_kind
    on_h100 = KNOWN | {"environment": KNOWN["environment"] | {"device_kind": kind}}
    said = "\n".join(gpu_day.say_plan(on_h100, tmp_path))
    assert f"written to {tmp_path / 'measured' / 'h100.toml'}" in said
    sheet = target.load_target("h100").data_sheet
    assert sheet.fractions["matmul"] == 0.5 and not target.load_target("a100").data_sheet.fractions
    seconds = assumed.kernel_seconds(gpu_tables.kernel("matmul", "bf16", 989.4e9, 1.0), sheet)[0]
    assert seconds == pytest.approx(2e-3)


def test_kernels_are_told_apart_by_their_instruction(gpu_day):
    from benches.gpu_measurements import by_family, kernels, summary

    text = """HloModule jit_step

ENTRY %main (p: bf16[16,16]) -> bf16[16,16] {
  %p = bf16[16,16]{1,0} parameter(0)
  %gemm.1 = bf16[16,16]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %copy.2 = bf16[16,16]{1,0} copy(%gemm.1)
}
"""
    in_graph = {
        "copy_2": 1.0,
        "nvjet_sm90_qrtst_128x160_128x5_2x1_v_ssched_bz_coopA_algo2_TNT": 2.0,
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128": 4.0,
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128": 8.0,
        "anything": 0.5,
    }
    seen = {"gemm.1": {"nvjet_sm90_tst": 3.0}, "%copy.2": {"copy_2": 1.0}, "": in_graph}
    assert by_family(seen, [kernels(text)], [text]) == {
        "matmul": 3.0,
        "other": 2.0,
        "fp8_matmul": 2.0,
        "attention_backward": 4.0,
        "attention_forward": 8.0,
        "unknown": 0.5,
    }
    assert summary([kernels(text)] * 2) == [
        ["matmul", "bf16", 2.0 * 16**3, 3 * 512, 0, 1.0],
        ["other", "", 0.0, 2 * 512, 0, 1.0],
    ]


def test_every_task_of_the_first_quarter_has_results_of_its_own(gpu_day, tmp_path):
    tasks = [task for part in gpu_day.gpu_tasks.PARTS.values() for task in part(tmp_path)]
    names = [name for task in tasks for name in task.names]
    assert len(names) == len(set(names))
    assert all(task.kind in gpu_day.gpu_tasks.KINDS for task in tasks)


def test_a_program_made_elsewhere(gpu_day, tmp_path, monkeypatch):
    """It is loaded, run and compared; one that is not there, or is damaged, is a result too."""
    for name, value in {"GPU_DAY": "toy", "DAY": tmp_path, "DIST": tmp_path / "none"}.items():
        monkeypatch.setenv(name, str(value))
    from benches import elsewhere

    (name,) = (f"{elsewhere.PREFIX}{case}" for case in elsewhere.CASES if case == "XLA")
    words = [sys.executable, "-m", "benches.gpu_tasks", "elsewhere", json.dumps([name])]
    found = []
    for toy in ("toy", ""):
        variables = os.environ | {"GPU_DAY": toy, "PYTHONPATH": str(ROOT / "scripts")}
        done = subprocess.run(words, capture_output=True, text=True, env=variables, cwd=ROOT)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0]["difference"] == 0 and found[0]["made by"] == found[0]["loaded by"]
    assert found[1]["failed"].endswith("is not there; scripts/gpu_day.sh pack makes it")
    said = "\n".join(gpu_day.table({name: found[0] | {"seconds": 1}}))
    assert f"- {name}: runs; at most 0 from what is compiled here" in said


@pytest.fixture
def day(tmp_path: Path) -> Path:
    """A day's folder, where scripts/gpu_day.sh installs packages: this checkout's."""
    (tmp_path / "day" / "site").mkdir(parents=True)
    (tmp_path / "day" / "site" / "jspeed").symlink_to(ROOT / "python" / "jspeed")
    return tmp_path / "day"


def script(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ""}
    environment |= {"DIST": "/nonexistent"} | more
    words = [str(ROOT / "scripts" / "gpu_day.sh"), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=700, env=environment)


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["everything"], {}, "error: everything is no part"),
        (["quarter"], {"PYTHON": "/bin/false"}, "error: jspeed is not"),
    ]
    + [(["quarter"], {"GPU_DAY": ""}, "error: there is no NVIDIA GPU in /dev; GPU_DAY=toy")],
)
def test_wrong_input_is_one_sentence(arguments, environment, said, day):
    done = script(*arguments, DAY=str(day), **environment)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(said), done


@pytest.mark.slow
def test_a_mended_wheel_replaces_what_it_installed(day, tmp_path):
    def wheel(value: int) -> None:
        with zipfile.ZipFile(tmp_path / "mended_wheel-1.0-py3-none-any.whl", "w") as file:
            info = "mended_wheel-1.0.dist-info"
            file.writestr("mended_wheel.py", f"VALUE = {value}\n")
            file.writestr(
                f"{info}/METADATA", "Metadata-Version: 2.1\nName: mended-wheel\nVersion: 1.0\n"
            )
            file.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            file.writestr(f"{info}/RECORD", "")

    for value in (1, 2):
        wheel(value)
        script("no part", DAY=str(day), DIST=str(tmp_path))  # it is prepared for all the same
        assert (day / "site" / "mended_wheel.py").read_text() == f"VALUE = {value}\n"


@pytest.mark.slow
def test_the_first_quarter_at_toy_size(day, tmp_path):
    """Calls, each within its time, until nothing is left; `more` and `product` take minutes."""
    toy = {"GPU_DAY": "toy", "DAY": str(day), "OUT": str(tmp_path / "out"), "PART_SECONDS": "300"}
    for _ in range(8):
        done = script("quarter", **toy)
        assert done.returncode in (0, 75), done.stdout + done.stderr
        if done.returncode == 0:
            break
    found = {line["name"]: line for line in lines(day)}
    assert lines(tmp_path / "out") == lines(day)
    failed = [name for name, one in found.items() if one.get("failed") or one.get("wrong")]
    # which need a GPU
    assert all("own" in name for name in failed), failed
    stages = [one for name, one in found.items() if name.startswith("stage ")]
    assert len(stages) == 8 and all(0 < one["loss"] < one["first_loss"] < 7 for one in stages)
    assert "the device measured for" in script("table", **toy).stdout
    assert "| matmul | 0.65 |" in script("plan", **toy).stdout
