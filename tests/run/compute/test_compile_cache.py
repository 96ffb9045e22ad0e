"""Compilation cache: damaged or unwritable entries are reported once and replaced."""

import math
import os
import subprocess
import sys
import warnings

import jax
import pytest

from jspeed.base import compile_cache

TWICE = """
import resource, sys
from pathlib import Path
import jax
from jspeed.base.compile_cache import use_compile_cache

use_compile_cache()
use_compile_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

def programs(number):
    def same_name(x):
        return x * number
    return jax.jit(same_name)

def compile_all():
    jax.clear_caches()
    return [int(programs(number)(7)) for number in (2, 3, 4)]

def entries():
    return {path.name: path.read_bytes() for path in Path(sys.argv[1]).glob("*same_name*")}

assert compile_all() == [14, 21, 28]
whole = entries()
assert len(whole) == 3
for name, how in zip(list(whole)[:2], (lambda b: b[: len(b) // 2], lambda b: b[:99] + bytes(99) + \
b[198:])):
    Path(sys.argv[1], name).write_bytes(how(whole[name]))
print("damaged", file=sys.stderr)
assert compile_all() == [14, 21, 28]
print("mended", file=sys.stderr)
assert compile_all() == [14, 21, 28]
assert entries().keys() == whole.keys()
for name in whole:
    Path(sys.argv[1], name).unlink()
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
print("full", file=sys.stderr)
assert compile_all() == [14, 21, 28]
assert not entries()
"""


def test_damaged_entries_are_replaced_and_none_half_written(tmp_path):
    variables = {"JSPEED_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", TWICE, str(tmp_path / "xla")]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    damaged, mended, full = (
        done.stderr.splitlines().index(word) for word in ("damaged", "mended", "full")
    )
    said = done.stderr.splitlines()
    assert len(said[damaged + 1 : mended]) == 1 and full == mended + 1, done.stderr
    assert all(
        "compiled program 'jit_same_name'" in line and "replaced" in line
        for line in said[damaged + 1 : mended]
    )
    assert said[full + 1 :] and all("could not be written" in line for line in said[full + 1 :]), (
        done.stderr
    )


@pytest.fixture
def settings(monkeypatch):
    """What the cache changes of JAX and of warnings, to see and to have back."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    jax.config.update(names[0], None)
    yield lambda: tuple(jax.config.values[name] for name in names)
    for name, value in before.items():
        jax.config.update(name, value)


def test_where_programs_cannot_be_kept_one_line_says_so(tmp_path, monkeypatch, settings, capsys):
    def used() -> tuple[object, float, str]:
        compile_cache.use_compile_cache()
        return (*settings(), capsys.readouterr().err)

    (tmp_path / "file").touch()
    monkeypatch.setenv("JSPEED_CACHE", str(tmp_path / "file" / "x"))
    place, least, line = used()
    assert place is None and least == math.inf and line.count("\n") == 1
    assert line.startswith("note: programs that this run compiles are not kept: the cache folder")
    assert "JSPEED" in line
    monkeypatch.setenv("JSPEED_CACHE", str(tmp_path / "cache"))
    place, least, line = used()
    assert place == str(tmp_path / "cache" / "xla") and least < 1 and not line
    assert os.path.isdir(place)
    # read-only: its programs are used, and none is added
    monkeypatch.setattr(os, "access", lambda *_: False)
    place, least, line = used()
    assert place == str(tmp_path / "cache" / "xla") and least == math.inf
    assert "xla is read-only" in line
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/xla")  # JAX's own matter
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/xla")
    assert used()[0] == "gs://bucket/xla" and not os.path.exists("gs:")
