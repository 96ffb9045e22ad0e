"""What a first quarter of an hour on a GPU finds out, and the hours after it, in calls of at most
ten minutes; ``scripts/gpu_day.sh`` calls it.

Each task is a process. Several prepare at once (imports, traces, compilations), and one at a time
has the device, so that it measures nearly always. Every result is one line of JSON, on disk before
the next is told, the cheapest and most decisive first. A call that was stopped goes on where it
was, on another machine too: what it left in OUT, results and compiled programs, is read back.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from benches import gpu_tasks
from benches.gpu_tables import say_plan, table
from benches.gpu_tasks import HAS_THE_DEVICE, TOY, Task
from jspeed.base import accelerators
from jspeed.errors import BadInput, run_script

# a call begins no task after these, and ends those that run after as many and GRACE
SECONDS = float(os.environ.get("PART_SECONDS", 520))
GRACE = 30.0
SILENT = 240.0  # seconds that a task may have the device and say nothing; then it is ended
TRIES = 2  # what ended its process as often is left
LATER = 75  # exit code: make the call again, it has more to do (EX_TEMPFAIL)
AT_ONCE = 2 if TOY else 8  # processes; a GPU has 16 cores beside it or more
# Of a toy, which is not measured for its speed.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
PIECE, PIECES = 15 * 2**20, 4  # bytes of a file of compiled programs, and their number


class Day:
    """The results so far, by name, in ``results.jsonl`` of each of ``folders``; the first is
    read."""

    def __init__(self, *folders: Path) -> None:
        self.files = [folder / "results.jsonl" for folder in folders]
        self.began = time.time()
        self.known: dict[str, dict[str, Any]] = {}
        self.lock = threading.Lock()
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        if self.files[0].exists() and not self.files[0].read_text().endswith("\n"):
            with self.files[0].open("a") as file:
                file.write("\n")
        for line in whole_lines(self.files[0]):
            one = json.loads(line)
            self.known[one["name"]] = self.known.get(one["name"], {}) | one

    def write(self, name: str, **facts: Any) -> None:
        """Keep a result and print it. It says when it was told (``at``), and in which call."""
        facts |= {"at": round(time.time(), 2), "call": round(self.began, 2)}
        line = json.dumps({"name": name, **facts}, default=str)
        with self.lock:
            self.known[name] = self.known.get(name, {}) | json.loads(line)
            for path in self.files:
                with path.open("a") as file:
                    file.write(line + "\n")
                    file.flush()
                    os.fsync(file.fileno())
            print(line[:400], flush=True)

    def left(self, task: Task) -> list[str]:
        """The results of a task that are not known."""
        return [name for name in task.names if "seconds" not in self.known.get(name, {})]

    @property
    def late(self) -> bool:
        """Whether this call begins nothing more."""
        return time.time() - self.began > SECONDS


def whole_lines(path: Path) -> list[str]:
    """Lines of a file of results, but for those that a kill cut short."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            json.loads(line)
            found.append(line)
    return found


def main(part: str, *folders: str) -> int:
    """Make a call, or print a table; returns an exit code."""
    own, *copies = map(Path, folders)
    read_back(own)
    day = Day(own, *copies)
    if part == "table":
        print("\n".join(table(day.known)))
        return 0
    if part == "plan":
        print("\n".join(say_plan(day.known, own)))
        return 0
    if not TOY and not accelerators.find().gpus:
        raise BadInput("there is no NVIDIA GPU in /dev; GPU_DAY=toy tries the parts on a CPU")
    for path in copies:
        if day.known:
            shutil.copyfile(own / "results.jsonl", path / "results.jsonl")
    os.environ["TURN"] = str(own / "turn")
    tasks = [task for task in gpu_tasks.PARTS[part](own) if day.left(task)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(lambda task: work(day, task), tasks):
            pass
    for path in copies:
        pack(own / "cache", path)
    left = [name for task in tasks for name in day.left(task)]
    if tasks:
        day.write("end of a call", left=len(left))
    if left:
        print(f"{part}: time is over with {len(left)} results to go, make the call again")
    return LATER if left else 0


def work(day: Day, task: Task) -> None:
    """Find out what is not known of a task's results, in as many processes as that takes."""
    while (names := day.left(task)) and not day.late:
        begun = time.time()
        running = names[0]
        last = ""
        for line in lines_of(task, names, day.began + SECONDS + GRACE):
            told: Any = {}
            with suppress(ValueError):
                told = json.loads(line)
            if not isinstance(told, dict) or told.get("name") not in names:
                last = line.strip() or last
            elif "begins" in told:
                running, begun = told["name"], time.time()
            else:
                seconds = {"seconds": round(time.time() - begun, 1)}
                day.write(told.pop("name"), **seconds | told)
        if running in day.left(task) and time.time() < day.began + SECONDS + GRACE:
            tries = day.known.get(running, {}).get("tries", 0) + 1
            facts: dict[str, Any] = {"tries": tries, "died": last[:300]}
            if tries >= TRIES:
                facts |= {
                    "seconds": 0.0,
                    "failed": f"its process ended {tries} times: {last[:300]}",
                }
            day.write(running, **facts)


def lines_of(task: Task, names: Sequence[str], until: float) -> Iterator[str]:
    """Yield what a process prints that finds out ``names``; it ends ``until`` then, when a kernel
    does not, and with this process."""
    words = [sys.executable, "-m", "benches.gpu_tasks", task.kind, json.dumps(names)]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {task.flags} {QUICK if TOY else ''}".strip()
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"XLA_FLAGS": flags},
    ) as process:
        assert process.stdout is not None

        def watched(line: str = "") -> threading.Timer:
            left = max(0.0, until - time.time())
            hangs = min(SILENT, left) if line.strip() == HAS_THE_DEVICE else left
            timer = threading.Timer(hangs, process.kill)
            timer.daemon = True
            timer.start()
            return timer

        timer = watched()
        for line in process.stdout:
            timer.cancel()
            timer = watched(line)
            yield line
        timer.cancel()


def pack(cache: Path, out: Path) -> None:
    """Write compiled programs, the newest first, into files ``cache.tar.N`` of ``out`` that are
    small enough to be carried; no more than PIECES of them."""
    entries = sorted(
        (path for path in cache.rglob("*") if path.is_file() and not path.name.endswith("-atime")),
        key=lambda path: -path.stat().st_mtime,
    )
    whole = BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for path in entries:
            if whole.tell() + path.stat().st_size + 4096 < PIECE * PIECES:
                tar.add(path, path.relative_to(cache))
    data = whole.getvalue()
    for number in range(PIECES):
        piece = data[number * PIECE : (number + 1) * PIECE]
        target = out / f"cache.tar.{number}"
        target.unlink(missing_ok=True)
        if piece:
            target.write_bytes(piece)


def read_back(own: Path) -> None:
    """Take over what an earlier call left in its OUT and someone put into the folder BACK."""
    back = Path(os.environ.get("BACK", "dist/back"))
    own.mkdir(parents=True, exist_ok=True)
    results = own / "results.jsonl"
    known = set(whole_lines(results))
    more = [line for line in whole_lines(back / "results.jsonl") if line not in known]
    if more:
        with results.open("a") as file:
            file.write("".join(f"{line}\n" for line in more))
    pieces = sorted(back.glob("cache.tar.*"))
    if pieces and not (own / "cache").exists():
        data = BytesIO(b"".join(path.read_bytes() for path in pieces))
        with tarfile.open(fileobj=data) as tar:
            tar.extractall(own / "cache", filter="data")


if __name__ == "__main__":
    run_script(lambda: main(*sys.argv[1:]))
