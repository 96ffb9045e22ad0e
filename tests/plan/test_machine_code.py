"""Compiling without machine code: what is read of the file that XLA keeps, and what follows where
it keeps none. tests/aot compares with whole compilations."""

from types import SimpleNamespace

import jax
import pytest

from jspeed.base import compiler
from jspeed.plan.absent import machine_code

GPU = SimpleNamespace(platform="cuda")


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """A protocol buffer of whole numbers below 2^28 and of bytes."""

    def number(value: int) -> bytes:
        sevens = [value >> shift & 127 for shift in (0, 7, 14, 21)]
        return bytes([*(seven | 128 for seven in sevens[:-1]), sevens[-1]])

    parts = (
        number(key << 3 | 2) + number(len(value)) + value
        if isinstance(value, bytes)
        else number(key << 3) + number(value)
        for key, value in fields
    )
    return b"".join(parts)


def test_fields_of_a_message():
    fields = [(1, b"module"), (300, 2**21), (3, b""), (3, bytes(200))]
    assert list(machine_code.fields(message(*fields))) == fields


def allocation(size: int, **uses: int) -> tuple[int, bytes]:
    """A BufferAllocation of a BufferAssignment."""
    numbers = {"thread_local": 3, "argument": 5, "live_out": 7, "constant": 12}
    return 3, message((1, 9), (2, size), *((numbers[use], value) for use, value in uses.items()))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A folder with what XLA keeps of a program for 8 devices."""
    buffers = message(
        (1, b"a logical buffer"),
        allocation(1000, argument=1),
        allocation(200, argument=1, live_out=1),
        allocation(30, live_out=1),
        allocation(4, constant=1),
        allocation(5, thread_local=1),
        allocation(60_000),
    )
    program = message((1, b"HloModule step\nENTRY"), (3, buffers))
    (tmp_path / "module_0001.step.sm_9.0a_gpu_after_optimizations.hlo.pb").write_bytes(program)
    (tmp_path / "module_0001.step.config.pbtxt").write_text("a: 1\nnum_partitions: 8\nb: 2\n")
    monkeypatch.setattr(machine_code, "hlo_text", bytes.decode)
    return tmp_path


def test_a_kept_program_is_read(kept):
    found = machine_code.read(kept)
    assert found.as_text() == "HloModule step, num_partitions=8\nENTRY"
    assert found.memory_analysis() == (1200, 230, 200, 60_000)
    assert compiler.memory_needed(found) == 61_230


def test_without_what_is_needed_nothing_is_read(kept, monkeypatch):
    monkeypatch.setattr(machine_code, "hlo_text", lambda module: None)  # of another JAX
    assert machine_code.read(kept) is None
    monkeypatch.undo()
    (kept / "module_0001.step.config.pbtxt").unlink()
    assert machine_code.read(kept) is None


def test_where_nothing_is_kept_all_is_compiled(monkeypatch):
    """And its own error is what the caller sees."""
    tried = []

    def fails(lowered, device, more):
        tried.append(set(more))
        raise jax.errors.JaxRuntimeError(f"attempt {len(tried)}")

    monkeypatch.setattr(compiler, "compiled", fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="attempt 2"):
        machine_code.compiled(None, GPU)
    assert "xla_dump_to" in tried[0] and "xla_dump_to" not in tried[1]
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/somewhere")
    tried.clear()
    with pytest.raises(jax.errors.JaxRuntimeError, match="attempt 1"):
        machine_code.compiled(None, GPU)
