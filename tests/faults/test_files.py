"""Missing, damaged or unwritable files: a clear error message, no partial output, and the run can
be resumed."""

import os
import shutil
import subprocess

import pytest

from jspeed.run.checkpoint import NOTES, UNFINISHED, damage, newest

from ..multi_process import ended, metrics, places, start, toy
from .conftest import Run


@pytest.fixture(scope="session")
def saved(undisturbed: Run, folder) -> Run:
    """A run that was stopped after step 120, with checkpoints of 100 and 120."""
    run = Run(folder, "saved").start(
        "--checkpoint-every", 20, "--steps", 120, JSPEED_CACHE=folder / "cache"
    )
    assert run.ended(120) == 0 and run.checkpoints() == ["100", "120"]
    return run


def largest(folder):
    return max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def test_a_truncated_checkpoint_is_passed_over(run, saved, undisturbed):
    shutil.copytree(saved.path, run.path)
    checkpoints = run.path / "checkpoints"
    path = largest(checkpoints / "120")
    os.truncate(path, path.stat().st_size // 2)
    for name in NOTES:
        (checkpoints / "100" / name).write_text("{")
    assert run.resumable().ended(120) in (0, 1), run.said()
    assert "the checkpoint of step 120" in run.printed() and "the SHA-256 of" in run.printed()
    assert run.is_as(undisturbed) and run.record()["resumed"] == [100]


def test_every_file_of_a_checkpoint_that_counts_is_watched(saved, tmp_path):
    """Truncated, with a bit flipped, or gone; without its hashes no checkpoint counts."""
    whole = saved.path / "checkpoints"
    files = [path.relative_to(whole) for path in (whole / "120").rglob("*") if path.is_file()]
    assert len(files) > 5 and damage(whole, 120) is None
    for file in files:
        for how in ("truncated", "flipped", "gone"):
            shutil.rmtree(tmp_path)
            shutil.copytree(whole, tmp_path)
            content = bytearray((tmp_path / file).read_bytes())
            if how == "gone":
                (tmp_path / file).unlink()
            elif how == "truncated":
                (tmp_path / file).write_bytes(content[:-9])
            else:
                content[len(content) // 2] ^= 1
                (tmp_path / file).write_bytes(content)
            if file.name not in NOTES:
                assert damage(tmp_path, 120), (file, how)
                step, said = newest(tmp_path)
                assert step == 100 and list(said) == [120] and (tmp_path / "120").exists()


@pytest.fixture
def small_disk(run):
    """The run's folder on a file system of 8 MB, with a file that fills it but for 3 MB."""
    run.path.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(run.path)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("a small file system can only be mounted by root")
    filler = run.path / "filler"
    yield filler
    subprocess.run(["umount", "--lazy", str(run.path)], check=True)


def fill(filler):
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


@pytest.mark.parametrize("saving", [True, False], ids=["in a save", "between saves"])
def test_a_disk_that_fills_up(run, small_disk, undisturbed, saving):
    run.resumable().until(50 if saving else 70)
    # the process that cannot write gives up, and the other does not wait for it at Orbax's barrier
    if saving:
        run.wait_for(lambda: list((run.path / "checkpoints").glob(f"60{UNFINISHED}*")))
    fill(small_disk)
    assert run.ended(60) == 2
    assert len(run.errors()) == 1 and "No space left on device" in run.errors()[0]
    assert all(line.startswith(("error: ", "note: ")) for line in run.said().splitlines())
    assert not list((run.path / "checkpoints").glob("*tmp*"))
    small_disk.unlink()
    assert metrics(run.path)
    last = run.newest()
    assert last in (40, 60, 80) and damage(run.path / "checkpoints", last) is None
    assert run.resumable().ended(120) in (0, 1), run.said()
    assert run.is_as(undisturbed) and run.record()["resumed"] == [last]


def test_a_disk_that_is_full_from_the_start(run, small_disk):
    fill(small_disk)
    assert run.start("--checkpoint-every", 20).ended(60) == 2
    assert len(run.errors()) == 1 and "No space left on device" in run.errors()[0]
    assert len(run.said().splitlines()) == 1
    assert [path.name for path in run.path.iterdir()] == ["filler"]


def test_data_that_is_lost(run, undisturbed, folder):
    run.resumable().until(50)
    (folder / "shards").rename(folder / "elsewhere")
    try:
        assert run.ended(60) == 2
        (error,) = run.said().splitlines()
        assert error.startswith("error: ") and "toy_train_" in error and "No such file" in error
        again = Run(folder, f"{run.name}-again").start()
        assert again.ended(60) == 2 and len(again.said().splitlines()) == 1
        assert "shards" in again.said()
        assert not again.path.exists()
    finally:
        (folder / "elsewhere").rename(folder / "shards")
    assert run.resumable().ended(120) in (0, 1), run.said()
    assert run.is_as(undisturbed) and len(run.record()["resumed"]) == 1


@pytest.mark.parametrize(
    ("word", "first", "second"),
    [
        ("MUON_LR is 0.5 here but 0.0", [], ["MUON_LR=0.5"]),
        ("--checkpoint-every is 20 here but 0 on process 0", [], ["--checkpoint-every", 20]),
        ("mesh", ["--mesh", "data=2"], ["--mesh", "data=1"]),
    ],
)
def test_processes_with_different_settings(tmp_path, folder, word, first, second):
    data = folder / "shards"
    one, two = places(2)
    common = ["--run-dir", "run", "--data", data, *toy()]
    flags = [word for word in second if "=" not in str(word) or word.startswith("data")]
    fields = [word for word in second if word not in flags]
    pair = [start(tmp_path, one, *first, *common), start(tmp_path, two, *flags, *common, *fields)]
    results = ended(pair, 60)
    errors = results[0][2] + results[1][2]
    assert [code for code, _, _ in results] == [2, 2], results
    assert errors.startswith("error: ") and errors.count("\n") == 1 and word in errors
    assert not (tmp_path / "run").exists()
