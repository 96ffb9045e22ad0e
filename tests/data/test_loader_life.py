"""Loader lifetime: no buffer is overwritten while it is referenced, and the thread always stops."""

import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jspeed.data import TokenLoader

from ..refusals import refused
from .on_disk import shard_bytes, shards_of


def threads():
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def thread_ends():
    """True when no loader thread is left: /proc may list a joined thread for some moments more."""
    deadline = time.monotonic() + 10
    while "jspeed-loader" in threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    return "jspeed-loader" not in threads()


def test_batches_stay_as_they_were_while_anyone_holds_them():
    shards = shards_of(np.arange(60_000))
    loader = TokenLoader(shards, lanes=4, lane_len=64, align=None, max_docs=3, epochs=None)
    batch = next(loader)
    tokens, offsets = batch.tokens, batch.doc_offsets
    assert tokens.ctypes.data % 64 == offsets.ctypes.data % 64 == 0
    assert tokens.flags.c_contiguous and tokens.dtype == np.uint16 and offsets.dtype == np.int32
    with pytest.raises(ValueError):
        tokens[0, 0] = 1
    with pytest.raises(ValueError):
        tokens.setflags(write=True)
    on_device, expected = jax.device_put(tokens), np.arange(4)[:, None] * 64 + np.arange(65)
    view = batch.targets
    del batch, tokens
    gc.collect()
    seen = {next(loader).tokens.ctypes.data for _ in range(100)}
    assert len(seen) <= 8 * 2 + 2  # what is made ahead at most, one in use, one in the making
    assert np.array_equal(np.asarray(on_device), expected) and np.array_equal(view, expected[:, 1:])


def test_life_cycle():
    shards = shards_of(np.arange(1000))
    with TokenLoader(shards, lanes=2, lane_len=5, align=None) as loader:
        assert iter(loader) is loader
        loader.start()
        loader.start()
        kept = next(loader)
        assert "jspeed-loader" in threads()
    assert thread_ends()
    assert kept.tokens[1, 0] == 5
    loader.close()
    for call in (
        loader.start,
        lambda: next(loader),
        lambda: loader.load_state_dict(loader.state_dict()),
    ):
        refused("the loader is closed", call)
    dropped = TokenLoader(shards, lanes=2, lane_len=5, align=None)
    next(dropped)
    del dropped
    gc.collect()
    assert thread_ends()
    ended = TokenLoader(shards, lanes=2, lane_len=5, align=None)
    assert len(list(ended)) == 99 and next(ended, "end") == "end"
    stats = ended.stats()
    assert stats["bytes_read"] >= 99 * 2 * 6 * 2 - 99 * 2 * 2
    assert 0 <= stats["wait_p50"] <= stats["wait_p99"] <= stats["wait_max"] <= stats["wait_seconds"]


def test_four_threads_share_one_stream():
    loader = TokenLoader(shards_of(np.arange(20_001)), lanes=2, lane_len=50, align=None)
    steps = []

    def consume():
        steps.extend(batch.step for batch in loader)

    consumers = [threading.Thread(target=consume) for _ in range(4)]
    for consumer in consumers:
        consumer.start()
    for consumer in consumers:
        consumer.join(20)
    assert sorted(steps) == list(range(200))


SLOW = """
    import os, sys, time, threading
    from pathlib import Path
    import numpy as np
    from jspeed.data import TokenLoader, open_shards
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 100_000_000
    first = Path("a_000.bin")
    first.write_bytes(header.tobytes())
    os.truncate(first, 1024 + 200_000_000)
    for i in range(1, 500):
        os.link(first, f"a_{i:03}.bin")
    loader = TokenLoader(open_shards("a_*.bin"), lanes=2, lane_len=100, align="bos", bos_id=7)
"""


def run_slow(folder, body):
    """A program whose loader scans for minutes: shards without a single document start."""
    source = textwrap.dedent(SLOW) + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("prefetch", [0, 2])
def test_control_c_ends_a_wait_at_once(prefetch, tmp_path):
    """The best of three, so that a busy machine does not count."""
    body = f"""
    loader = TokenLoader(open_shards("a_*.bin"), lanes=2, lane_len=100, align="bos", bos_id=7, \
prefetch={prefetch})
    for _ in range(3):
        print("waiting", flush=True)
        try:
            next(loader)
        except KeyboardInterrupt:
            print(time.monotonic(), flush=True)
    os._exit(0)
    """
    process, delays = run_slow(tmp_path, body), []
    with process:
        for _ in range(3):
            assert process.stdout.readline() == "waiting\n"
            time.sleep(0.2)
            sent = time.monotonic()
            process.send_signal(signal.SIGINT)
            delays.append(float(process.stdout.readline()) - sent)
    assert process.returncode == 0 and min(delays) < 0.2


def test_memory_does_not_grow_over_an_epoch(tmp_path):
    """Four shards of 8 MB: at most two of them mapped, and a heap of a few batches."""
    for index in range(4):
        (tmp_path / f"m_{index}.bin").write_bytes(shard_bytes(np.resize(np.arange(500), 4_000_000)))
    code = """
    import sys
    from jspeed.data import TokenLoader, open_shards
    def kilobytes(name):
        return next(int(line.split()[1]) for line in open("/proc/self/status") if \
line.startswith(name))
    loader = TokenLoader(open_shards(sys.argv[1]), lanes=8, lane_len=4096, align="bos", bos_id=0)
    next(loader)
    heap, mapped, most = kilobytes("RssAnon"), kilobytes("RssFile"), 0
    for batch in loader:
        most = max(most, kilobytes("RssFile") - mapped)
    print(kilobytes("RssAnon") - heap, most, loader.stats()["shard_switches"])
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "m_*.bin")]
    heap, mapped, switches = map(
        int, subprocess.check_output(command, text=True, timeout=30).split()
    )
    assert heap < 32_000 and mapped < 2 * 8_100 and switches == 3


def test_other_threads_run_during_a_wait(tmp_path):
    body = """
    thread = threading.Thread(target=lambda: next(loader, None), daemon=True)
    thread.start()
    count, end = 0, time.monotonic() + 0.3
    while time.monotonic() < end:
        count += 1
    print(count, loader.stats()["queue_empty"], flush=True)
    child = os.fork()
    if child == 0:
        for call in (lambda: next(loader), loader.start, loader.state_dict, loader.stats):
            try:
                call()
            except Exception as error:
                print(type(error).__name__, error, flush=True)
        print(loader, flush=True)
        loader.close()
        os._exit(0)
    os.waitpid(child, 0)
    os._exit(0)
    """
    out, _ = run_slow(tmp_path, body).communicate(timeout=20)
    first, *refusals, shown = out.splitlines()
    assert int(first.split()[0]) > 10_000 and first.split()[1] == "1"
    assert len(refusals) == 4 and shown.endswith("made before a fork)")
    assert all(
        line.startswith("LoaderForkedError this loader was made in process") for line in refusals
    )
