"""Shards that change while they are read: no signal, no wrong batch, other handlers work."""

import os
import random
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from .on_disk import wide_bytes

TOKENS, BOS = 250_000, 2**31
TIMES = int(os.environ.get("JSPEED_TEST_TRUNCATIONS", 100))  # 10,000 take minutes
PAGE = 4096

READS = """
    import faulthandler, os, sys
    faulthandler.enable()
    import jax, numpy as np
    from jspeed.data import ShardTruncatedError, TokenLoader, open_shards
    jax.devices()
    path, bos = sys.argv[1], 2**31

    def check(batch):
        tokens = batch.tokens.astype(np.int64)
        places = tokens - np.arange(tokens.shape[1])
        assert ((places == places[:, 1:2]) | (tokens == bos)).all(), batch

    for turn, _ in enumerate(sys.stdin):
        options = {"lanes": 4, "lane_len": 8_000, "bos_id": bos, "epochs": None}
        options["align"] = (None, "bos")[turn % 2]
        with TokenLoader(open_shards(path), **options) as loader:
            check(next(loader))
            print("reading", flush=True)
            try:
                for batch in loader:
                    check(batch)
            except ShardTruncatedError as error:
                print(error, flush=True)
"""


def write_new(path, whole):
    """A whole shard in place of the file, written to long ago."""
    new = path.with_suffix(".new")
    shutil.copyfile(whole, new)
    os.utime(new, (1, 1))
    os.replace(new, path)


def damage(path, rng):
    """Change the file as one that copies, or fills, a disk might."""
    size, kind = path.stat().st_size, rng.randrange(6)
    if kind < 3:
        os.truncate(path, [0, rng.randrange(size), size - 1][kind])
    elif kind == 3:
        os.truncate(path, rng.randrange(size))
        os.truncate(path, size)
    elif kind == 4:
        path.write_bytes(bytes(size))
    else:
        with open(path, "r+b") as file:
            file.seek(rng.randrange(1024, size - PAGE))
            file.write(bytes(PAGE))


def test_damage_during_reads_is_an_error_and_no_signal(tmp_path):
    path, whole, rng = tmp_path / "x_train_000001.bin", tmp_path / "whole", random.Random(TIMES)
    tokens = np.arange(TOKENS)
    tokens[::500] = BOS
    whole.write_bytes(wide_bytes(tokens))
    command = [sys.executable, "-c", textwrap.dedent(READS), str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        for _ in range(TIMES):
            write_new(path, whole)
            reader.stdin.write("go\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == "reading\n"
            for _ in range(rng.randrange(10_000)):  # up to half a millisecond
                pass
            damage(path, rng)
            assert reader.stdout.readline().startswith(f"shard {path} ")
        reader.stdin.close()
        assert reader.wait(20) == 0


OTHERS = """
    import faulthandler, mmap, os, signal, sys, threading
    from jspeed.data import ShardTruncatedError, TokenLoader, open_shards
    path, whole = sys.argv[1], open(sys.argv[1], "rb").read()

    def drain(loader):
        try:
            for _ in loader:
                pass
        except ShardTruncatedError:
            print("an error\\n", end="", flush=True)

    def truncated(between=lambda: None):
        own = f"{path}-{os.getpid()}"
        with open(own, "wb") as file:
            file.write(whole)
        loader = TokenLoader(open_shards(own), lanes=1, lane_len=5_000, prefetch=0)
        next(loader)
        between()
        next(loader)
        os.truncate(own, 1024)
        drain(loader)

    def threads(count):
        options = {"lanes": 1, "lane_len": 50, "epochs": None}
        loaders = [TokenLoader(open_shards(path), **options) for _ in range(count)]
        for loader in loaders:
            next(loader)
        os.truncate(path, 1024)
        readers = [threading.Thread(target=drain, args=[loader]) for loader in loaders]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()

    def foreign():
        with open(path + ".other", "w+b") as file:
            os.truncate(file.fileno(), 8192)
            other = mmap.mmap(file.fileno(), 8192)
            os.truncate(file.fileno(), 0)
        print("touching", flush=True)
        other[5000]

    def called(number, frame):
        print("called", flush=True)

    def sent():
        os.kill(os.getpid(), signal.SIGBUS)
        signal.pthread_sigmask(signal.SIG_BLOCK, [])  # where Python runs its handlers
"""

DUMPED = ["Fatal Python error: Bus error", "in foreign"]
CASES = {
    "a fault of another kills": ("truncated(); foreign()", ["an error", "touching"], -7),
    "faulthandler before": (
        "faulthandler.enable(); truncated(); foreign()",
        ["an error", "touching", *DUMPED],
        -7,
    ),
    "faulthandler after": (
        "truncated(); faulthandler.enable(); truncated(); foreign()",
        ["an error", "an error", "touching", *DUMPED],
        -7,
    ),
    "faulthandler between batches": ("truncated(faulthandler.enable)", ["an error"], 0),
    "a handler of Python's": (
        "signal.signal(signal.SIGBUS, called); truncated(); sent(); truncated(); sent(); sent(); "
        "truncated()",
        ["an error", "called", "an error", "called", "called", "an error"],
        0,
    ),
    "a signal that was sent kills": ("truncated(); sent()", ["an error"], -7),
    "all signals blocked": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); truncated()",
        ["an error"],
        0,
    ),
    "in a fork": (
        "truncated(); child = os.fork(); truncated(); child and os.waitpid(child, 0)",
        ["an error"] * 3,
        0,
    ),
    "seventy loaders": ("threads(70)", ["an error"] * 70, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_other_handlers_of_the_signal_keep_working(case, tmp_path):
    body, told, code = CASES[case]
    path = tmp_path / "x_train_000001.bin"
    path.write_bytes(wide_bytes(np.arange(100_000)))
    command = [sys.executable, "-c", textwrap.dedent(OTHERS) + body, str(path)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=20
    )
    assert done.returncode == code, done.stdout
    lines = iter(done.stdout.splitlines())
    assert all(any(part in line for line in lines) for part in told), done.stdout
