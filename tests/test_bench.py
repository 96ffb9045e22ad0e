"""The benchmarks run and report; their limits are not enforced here, where the machine may be busy."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.profiler import ProfileData

from jspeed.data import find_split
from jspeed.data.manifest import read_manifest
from jspeed.errors import BadInput
from jspeed.parallel.mesh import make_mesh
from jspeed.run.find_recipe import find

from .data.on_disk import shard_bytes
from .toys import TINY

SCRIPTS = Path(__file__).parents[1] / "scripts"
STDLIB = SCRIPTS.parent / "python" / "jspeed" / "recipes" / "stdlib.py"
# Two devices; what modded-nanogpt prints, and lines that are not for us.
GPU_TOY = ["--set", *TINY, "LAYERS=1", "STEPS=4", "EVAL_EVERY=2"]
THEIR_LOG = """echo "step:0/9 train_time:0ms step_avg:nanms"
test -d "$JSPEED_DATA" -a "$DATA_PATH" = "$JSPEED_DATA" || exit 9
echo "step:0/9 val_loss:9.5000 train_time:0ms step_avg:nanms"
echo "step:5/9 val_loss:0.5000 train_time:9000ms step_avg:1800.00ms"
echo "step:9/9 val_loss:nan train_time:10000ms step_avg:1111.11ms"
"""


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPTS / "bench.py", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    return subprocess.run([str(a) for a in command], capture_output=True, text=True, timeout=120, env=environment)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for split in "train", "val":
        (folder / f"toy_{split}_000000.bin").write_bytes(shard_bytes([256, *b"round and round " * 200]))
    return folder


@pytest.mark.slow
def test_the_loader_is_measured(tmp_path):
    done = bench("loader", "--quick", "--json", tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    failed = [row for row in rows if row["passed"] is False]
    assert done.returncode == bool(failed), done.stderr
    assert len([row for row in rows if row["below"]]) == 11 and done.stdout.count("\n") == len(rows) + 1
    assert all(row["what"] in done.stdout for row in rows)


@pytest.mark.slow
def test_steps_are_measured_and_a_recipe_that_cannot_be_does_not_stop_the_others(shards, tmp_path):
    odd = tmp_path / "odd.py"
    odd.write_text(STDLIB.read_text().replace("lanes=LANES", "lanes=LANES + 1").replace('name="stdlib"', 'name="odd"'))
    file = tmp_path / "gpu.json"
    done = bench("gpu", "--recipe", odd, "stdlib", "--steps", 3, "--data", shards, "--json", file, *GPU_TOY)
    assert done.returncode == 1, done.stderr
    content = json.loads(file.read_text())
    assert list(content["failed"]) == ["odd"] and "cannot be divided over 2 devices" in content["failed"]["odd"]
    assert content["failed"]["odd"][:60] in done.stdout
    (row,) = content["rows"]
    assert (row["recipe"], row["lanes"], row["lane_len"], row["steps"]) == ("stdlib", 8, 16, 3)
    assert 0 < row["step_ms_median"] <= row["step_ms_p99"] and row["compile_seconds"] > 0
    assert row["tokens_per_second"] == pytest.approx(8 * 16 / row["step_ms_in_a_row"] * 1e3)
    assert row["tokens_per_second_per_device"] == pytest.approx(row["tokens_per_second"] / 2)
    assert 0 < row["data_wait_ms"] < row["step_ms_in_a_row"] and 0 < row["loss"] < 6 and row["memory_needed"] > 0
    # A CPU has no peak in the table, an allocator that counts nothing, and no kernels: each is said or left out.
    assert row["mfu"] is row["memory_peak"] is None and "no kernel table" in row["profile"]
    assert "no MFU" in done.stdout and row["profile"] in done.stdout


class Later:
    """An array that is being computed: a step that naps for 20 ms returned it before."""

    def __init__(self, pool):
        self.nap = pool.submit(time.sleep, 0.02)

    def block_until_ready(self):
        self.nap.result()

    def __array__(self, *_, **__):
        self.nap.result()
        return np.ones(())


@pytest.mark.parametrize("count", [2, 10])
def test_time_grows_with_steps(monkeypatch, count):
    """JAX returns from a step before it is computed; a clock that does not wait for it reads what a call takes."""
    monkeypatch.syspath_prepend(SCRIPTS)
    from benches import steps

    monkeypatch.setattr(steps, "profile", lambda one: "none")
    recipe, mesh = find("stdlib", TINY).recipe, make_mesh({"data": 1}, jax.devices()[:1])
    setting = steps.Setting(mesh, None, None, count, None)

    def step(state, tokens):
        later = Later(pool)
        return later, {"loss": later}

    with ThreadPoolExecutor(1) as pool:
        _, times = steps.run([step], Later(pool), recipe, recipe.stages[0], setting)
    assert len(times["alone"]) == count and min(times["alone"]) >= 0.02 and times["in_a_row"] >= 0.02


@pytest.mark.slow
def test_two_programs_race_on_the_same_tokens(shards, tmp_path):
    files = ["--json", tmp_path / "race.json", "--svg", tmp_path / "race.svg"]
    done = bench("gpu", "--recipe", "stdlib", "--data", shards, "--versus", THEIR_LOG, *files, *GPU_TOY)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "race.json").read_text())
    assert content["curves"]["theirs"][0][:2] == [[0, 0.0, 9.5], [5, 9.0, 0.5]]
    ours = content["curves"]["ours"][0]
    assert [step for step, *_ in ours] == [0, 2, 4]
    lowest = content["needed"][-1]
    assert lowest["loss"] == min(loss for *_, loss in ours) and lowest["theirs"] == pytest.approx(9.5 - lowest["loss"])
    assert f"{lowest['loss']:.4f}" in done.stdout and "jspeed, round 1" in (tmp_path / "race.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--recipe", "stdlib", "--micro-batch", "7", *GPU_TOY], ["--micro-batch 7", "give one of 16, 32, 64"]),
        pytest.param(["--recipe", "stdlbi"], ["stdlbi", "did you mean 'stdlib'"], marks=pytest.mark.slow),
        pytest.param(["--versus", "true"], ["--versus", "--data"], marks=pytest.mark.slow),
        pytest.param(["--rounds", "2"], ["--rounds would have no effect"], marks=pytest.mark.slow),
        (["--json", "no/such/folder.json"], ["there is no folder"]),
    ],
)
def test_bad_input_is_one_error_message(arguments, words):
    done = bench("gpu", *arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ") and all(word in done.stderr for word in words)


def test_a_log_that_cannot_be_read_is_one_error_message(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from benches.versus import their_curve

    with pytest.raises(BadInput, match="printed no validation that can be read; expected modded-nanogpt's log"):
        their_curve("echo step 1, loss 2", tmp_path)
    with pytest.raises(BadInput, match="ended with exit code 3"):
        their_curve("exit 3", tmp_path)


def test_seconds_to_a_loss_are_linear_between_validations(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from benches.versus import compare, seconds_to

    ours = [(0, 0.0, 8.0), (1, 10.0, 4.0), (2, 20.0, 5.0), (3, 30.0, 3.0)]
    assert [seconds_to(ours, loss) for loss in (9.0, 6.0, 4.5, 3.5, 2.0)] == [0.0, 5.0, 8.75, 27.5, None]
    theirs = [(0, 0.0, 7.5), (1, 30.0, 4.5), (2, 60.0, float("nan"))]
    assert compare([ours, ours], [theirs, theirs])[:2] == [
        {"loss": 7.0, "ours": 2.5, "theirs": 5.0, "ratio": 2.0},
        {"loss": 6.0, "ours": 5.0, "theirs": 15.0, "ratio": 3.0},
    ]
    assert compare([ours], [theirs])[-1] == {"loss": 4.5, "ours": 8.75, "theirs": 30.0, "ratio": 30 / 8.75}


def test_seconds_of_nanogpt_leave_evaluation_out(monkeypatch, shards, tmp_path):
    monkeypatch.syspath_prepend(SCRIPTS)
    from benches import nanogpt

    said = ["step 0: train loss 4.2, val loss 4.2874", "iter 0: loss 4.2, time 900.00ms, mfu -100.00%"]
    said += [f"iter {n}: loss 3.0, time {20 + n}.00ms, mfu 0.01%" for n in (1, 2, 3)]
    said += ["step 4: train loss 1.7, val loss 1.8799", "saving checkpoint", "iter 4: loss 1.7, time 800.00ms, mfu 1%"]
    said += ["iter 5: loss 1.7, time 24.00ms, mfu 1%", "step 6: train loss 1.6, val loss 1.8000"]
    clone = tmp_path / "clone"
    (clone / "config").mkdir(parents=True)
    for name in ("model.py", "configurator.py", "config/train_shakespeare_char.py"):
        (clone / name).write_text("")
    with pytest.raises(BadInput, match=r"has no train.py; give the folder of a clone"):
        nanogpt.nanogpt(clone, shards, tmp_path / "none")
    (clone / "train.py").write_text("print(" + repr("\n".join(said)) + ")")
    copy = nanogpt.nanogpt(clone, shards, tmp_path / "copy")
    text = np.fromfile(copy / "data" / "shakespeare_char" / "val.bin", np.uint16)
    assert text.tolist() == [256, *b"round and round " * 200]
    found = nanogpt.their_run(copy, Path(sys.executable))
    assert found == {"seconds": pytest.approx(0.0225 + 0.021 + 0.022 + 0.023), "loss": 1.8799, "steps": 4}
    (copy / "train.py").write_text("import pytorch")
    with pytest.raises(BadInput, match=r"exit code 1 and said: .*No module named 'pytorch'; give a Python"):
        nanogpt.their_run(copy, Path(sys.executable))


@pytest.mark.parametrize("name", ["llmc", "track3", "r21", "r29", "r62", "r89", "jspeed1", "jspeed2"])
def test_recipes_at_small_size_keep_their_schedule(monkeypatch, name):
    monkeypatch.syspath_prepend(SCRIPTS)
    from benches.quality import settings, tokens_after

    full, small = (find(name, sets, trace=False).recipe for sets in ((), settings(name, 4.0)))
    assert small.steps == pytest.approx(full.steps / 4, abs=4)
    assert tokens_after(name, settings(name, 4.0))[-1] == small.tokens
    own = find(name, settings(f"{name}:EVAL_CHUNK=8", 4.0), trace=False)
    assert own.fields["EVAL_CHUNK"] == 8


def test_a_run_that_diverges_has_a_curve(monkeypatch, tmp_path):
    """run.json has null for a loss that is not finite."""
    monkeypatch.syspath_prepend(SCRIPTS)
    from benches import nanogpt, quality, versus

    point = {"timed_seconds": 1.0, "step": 1, "val_loss": None}
    run = {"curve": [point | {"step": 0, "val_loss": 8.0}, point], "timed_seconds": 1.0, "val_loss": None, "steps": 1}
    run |= {"target_loss": 3.0, "recipe": "r29", "devices": {"kind": "cpu"}}
    for module in (nanogpt, quality, versus):
        monkeypatch.setattr(module, "our_run", lambda *_: run)
    monkeypatch.setattr(versus, "their_curve", lambda *_: [(0, 0.0, 8.0), (1, 1.0, 5.0)])
    assert versus.race("r29", "theirs", tmp_path, 1, {}, (), tmp_path / "race.json", None) == 0
    assert np.isnan(json.loads((tmp_path / "race.json").read_text())["curves"]["ours"][0][1][2])
    monkeypatch.setattr(quality, "write_tokens", lambda out, texts, most: [256] * 2000)
    quality.quality((), ("r29", "r62"), seeds=2, json_=tmp_path / "kept.json")
    assert np.isnan(json.loads((tmp_path / "kept.json").read_text())["compared"]["r29"]["loss"])
    monkeypatch.setattr(nanogpt, "data_folder", lambda *_: tmp_path)
    monkeypatch.setattr(nanogpt, "nanogpt", lambda *_: tmp_path)
    monkeypatch.setattr(nanogpt, "their_run", lambda *_: {"seconds": 2.0, "loss": 1.8, "steps": 4})
    assert nanogpt.contest("shakespeare-char", tmp_path, None, 1, None) == 1


def test_a_recipe_is_measured_with_the_attention_that_it_trains_with(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from benches import steps

    recipe, mesh, asked = find("stdlib", TINY).recipe, make_mesh({"data": 1}, jax.devices()[:1]), []
    monkeypatch.setattr(steps, "device_of", lambda *arguments, **named: asked.append((*arguments, named)) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(steps.measured(recipe, "hash", steps.Setting(mesh, "xla", None, 2, None)))
    assert asked == [(mesh, "xla", {"recipe": recipe})]


@pytest.mark.parametrize(("name", "flag"), [("tokenise", "rounds"), ("generate", "rounds"), ("fused", "rounds")])
def test_no_rounds_are_refused(monkeypatch, name, flag):
    monkeypatch.syspath_prepend(SCRIPTS)
    from benches import fused, text

    call = {"tokenise": partial(text.tokenise, ()), "generate": text.generate, "fused": fused.fused}[name]
    with pytest.raises(BadInput, match=f"--{flag} 0: must be at least 1"):
        call(**{flag: 0})


def test_a_text_does_not_validate_what_it_trains(monkeypatch, tmp_path, gpt2_vocabulary):
    monkeypatch.syspath_prepend(SCRIPTS)
    from benches.quality import write_tokens

    (tmp_path / "a.txt").write_text("One document.")
    with pytest.raises(BadInput, match="give at least two"):
        write_tokens(tmp_path / "tokens", [tmp_path / "a.txt"], 1000)


def test_texts_become_a_folder_that_trains(monkeypatch, tmp_path, gpt2_vocabulary):
    monkeypatch.syspath_prepend(SCRIPTS)
    from benches.quality import VOCAB, write_tokens

    for name, text in (("a.txt", "One document.\n\nAnother one.\n"), ("b.txt", "To validate.\n" * 50)):
        (tmp_path / name).write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "A long one. " * 200}) + "\n")
    texts = [tmp_path / name for name in ("a.jsonl", "a.txt", "b.txt")]
    lengths = write_tokens(tmp_path / "tokens", texts, 1000)
    assert lengths[0] == 256 > lengths[-1] and sum(lengths) == find_split(tmp_path / "tokens", "train").num_tokens
    manifest = read_manifest(tmp_path / "tokens")
    assert manifest and manifest["bos_id"] == VOCAB - 1 and manifest["source"]["texts"] == [text.name for text in texts]


def test_a_comparison_goes_on_where_it_stopped(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(SCRIPTS)
    from benches import quality

    made = []

    def our_run(name, data, run_dir, seed, flags, sets):
        made.append((name, seed))
        return {"curve": [{"step": 0, "val_loss": 8.0}, {"step": 1, "val_loss": 5.0 - seed / 10}]}

    monkeypatch.setattr(quality, "our_run", our_run)
    monkeypatch.setattr(quality, "write_tokens", lambda out, texts, most: [256] * 2000)
    kept = tmp_path / "kept.json"
    quality.quality((), ("r29",), seeds=2, json_=kept)
    quality.quality((), ("r29", "r62"), seeds=2, json_=kept)
    assert made == [("r29", 1), ("r29", 2), ("r62", 1), ("r62", 2)]
    assert json.loads(kept.read_text())["compared"]["r29"]["losses"] == [4.9, 4.8]
    with pytest.raises(BadInput, match="r29 trains on 1,9.* and 2,000 documents have 512,000 .* more text"):
        quality.quality((), ("r29",), shorter=1.0)
    with pytest.raises(BadInput, match="is of --shorter 4.0, not 2.0"):
        quality.quality((), ("r29",), shorter=2.0, json_=kept)
    kept.write_text('{"shorter": 4.0, "curves": {}}')
    with pytest.raises(BadInput, match="is of other parts of documents than their first 256"):
        quality.quality((), ("r29",), json_=kept)


def test_a_change_of_a_recipe_may_hold_colons(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from benches.quality import settings

    sets = settings("r89:COOLDOWN={400: 0.0, 1200: 1.0}:MUDD_WIDTH=8", 4.0)
    fields = find("r89", sets, trace=False).fields
    assert (fields["COOLDOWN"], fields["MUDD_WIDTH"]) == ({100: 0.0, 300: 1.0}, 8)


def test_curves_are_compared_with_the_first_recipe(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from benches.quality import compare

    first, second = [[(0, 8.0), (100, 4.0)], [(0, 8.0), (100, 4.2)]], [[(0, 8.0), (50, 4.0)], [(0, 8.0), (60, 4.0)]]
    rows = compare({"one": first, "two": second, "three": [[(0, 8.0), (90, 5.0)]], "none yet": []})
    assert list(rows) == ["one", "two", "three"]
    assert rows["one"]["loss"] == pytest.approx(4.1) and rows["one"]["p"] is None
    # At 4.1, which the second run of "one" does not reach; "three" ends at 5.0.
    assert rows["two"]["fraction"] == pytest.approx((50 + 60) * (3.9 / 4) / (97.5 + 100))
    assert rows["three"]["fraction"] == pytest.approx(2 * 90 / (75 + 100 * 3 / 3.8))
    assert rows["two"]["p"] < 0.5 < rows["three"]["p"]


def test_kernels_of_a_gpu_are_added_up(monkeypatch):
    """A profile as CUPTI leaves it: streams whose kernels overlap, and a line that repeats them by module."""
    monkeypatch.syspath_prepend(SCRIPTS)
    from benches.kernel_profile import Kernel, read

    def line(name: str, *events: tuple[int, int, int]) -> str:
        text = [
            f"events {{ metadata_id: {i} offset_ps: {a}000000000 duration_ps: {b}000000000 }}" for i, a, b in events
        ]
        return f'lines {{ name: "{name}" timestamp_ns: 1000 {" ".join(text)} }}'

    names = "".join(f'event_metadata {{ key: {i} value {{ id: {i} name: "{n}" }} }}' for i, n in enumerate("abc", 1))
    first = line("Stream #7(Compute)", (1, 0, 3), (2, 4, 1), (1, 6, 3)) + line("Stream #8(NCCL)", (3, 1, 3))
    gpu = f'planes {{ name: "/device:GPU:0" {first} {line("XLA Modules", (2, 0, 90))} {names} }}'
    other = f'planes {{ name: "/device:GPU:1" {line("Stream #7(Compute)", (1, 0, 50))} {names} }}'
    profile = read(ProfileData.from_text_proto(f'planes {{ name: "/host:CPU" }} {other} {gpu}'))
    assert profile.kernels == [Kernel("a", 2, 6.0, 0.6), Kernel("c", 1, 3.0, 0.3), Kernel("b", 1, 1.0, 0.1)]
    assert (profile.device, profile.distinct, profile.kernel_ms, profile.busy_ms) == ("/device:GPU:0", 3, 10.0, 8.0)
    assert "no kernels" in read(ProfileData.from_text_proto('planes { name: "/device:GPU:0" }'))


def test_a_gpu_day_goes_on_after_a_part_that_fails(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *track3*) exit 4;; *fa4_jax*) exit 1;; esac\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "OUT": str(tmp_path / "day")}
    done = subprocess.run([SCRIPTS / "gpu_day.sh"], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1, done.stdout
    passed = "gpu-llmc gpu-r21 gpu-r29 gpu-r62 gpu-r89 lane-r62 lane-r89 jspeed2-own-off jspeed2-own-on fused"
    assert f"passed: devices tests {passed} attention-cudnn attention-triton\n" in done.stdout.replace(
        "nvidia-smi ", ""
    )
    assert "gpu-track3 (4)" in done.stdout and "training: no TOKEN_FOLDER given, skipped" in done.stdout
    assert (tmp_path / "day" / "log.txt").read_text() == done.stdout


@pytest.mark.parametrize("what", ["missing", "a file", "empty", "no python", "no results"])
def test_a_gpu_day_says_what_is_wrong_with_its_input(tmp_path, what):
    folder, environment = tmp_path / "tokens", os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path / "day")}
    if what == "a file":
        folder.touch()
    elif what != "missing":
        folder.mkdir()
    if what.startswith("no "):
        (folder / "x_train_000001.bin").touch()
        environment |= {"PYTHON": "/nowhere/python"} if what == "no python" else {"OUT": "/proc/day"}
    done = subprocess.run([SCRIPTS / "gpu_day.sh", folder], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not (tmp_path / "day").exists()
    named = {"no python": "/nowhere/python", "no results": "/proc/day"}.get(what, str(folder))
    assert named in done.stderr


def test_a_step_that_does_not_fit_is_one_error_message(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from benches import gpu

    mesh, recipe = make_mesh({"data": 1}, jax.local_devices()[:1]), find("stdlib").recipe
    said = gpu.why(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 70823337560 bytes.\nmore"), recipe, mesh)
    assert said.startswith(
        "recipe stdlib does not fit into the memory of 1 x cpu: 70.8 GB were asked for at once; give"
    )
    assert gpu.why(RuntimeError("INTERNAL: no\nmore"), recipe, mesh) == "recipe stdlib failed: INTERNAL: no"
