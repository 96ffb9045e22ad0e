"""A file system that refuses a call which checkpoints need is told before the run begins. The
calls are refused below Python, where TensorStore makes them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jspeed.base.file_system import failed_call, refused_call

from .multi_process import ended, environment, shards, start, toy

SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
static int refused(const char *call) {
    const char *told = getenv("REFUSED");
    return told && !strcmp(told, call) ? (errno = EOPNOTSUPP) : 0;
}
#define NEXT(name) dlsym(RTLD_NEXT, name)
int fsync(int file) { return refused("fsync") ? -1 : ((int (*)(int))NEXT("fsync"))(file); }
int chmod(const char *path, mode_t mode) {
    return refused("chmod") ? -1 : ((int (*)(const char *, mode_t))NEXT("chmod"))(path, mode);
}
int fcntl(int file, int command, ...) {
    va_list more;
    va_start(more, command);
    void *argument = va_arg(more, void *);
    va_end(more);
    int posix = command == F_SETLK || command == F_SETLKW;
    int own = command == F_OFD_SETLK || command == F_OFD_SETLKW;
    if ((posix || own) && refused("lock")) return -1;
    return ((int (*)(int, int, ...))NEXT("fcntl"))(file, command, argument);
}
int flock(int file, int how) {
    return refused("lock") ? -1 : ((int (*)(int, int))NEXT("flock"))(file, how);
}
int rename(const char *from, const char *to) {
    struct stat is;
    if (!stat(to, &is) && refused("rename over")) return -1;
    if (!stat(from, &is) && S_ISDIR(is.st_mode) && refused("rename a folder")) return -1;
    return ((int (*)(const char *, const char *))NEXT("rename"))(from, to);
}
"""
ASKS = """
import json, os, sys
from pathlib import Path
from jspeed.base.file_system import refused_call
told = {}
for call in sys.argv[2:]:
    os.environ["REFUSED"] = call
    told[call] = refused_call(Path(sys.argv[1]))
print(json.dumps(told))
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    (folder / "refuse.c").write_text(SOURCE)
    command = ["cc", "-shared", "-fPIC", "-o", "refuse.so", "refuse.c", "-ldl"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "refuse.so"


def test_each_call_that_checkpoints_need_is_named(library, tmp_path):
    calls = ["", "fsync", "lock", "rename over", "rename a folder", "chmod"]
    answer = subprocess.run(
        [sys.executable, "-c", ASKS, tmp_path, *calls],
        env=os.environ | {"LD_PRELOAD": str(library)},
        stdout=subprocess.PIPE,
        check=True,
    )
    why = "Operation not supported"
    assert json.loads(answer.stdout) == {
        "": None,
        "fsync": f"fsync file: {why}",
        "lock": f"lock file: {why}",
        "rename over": f"rename: {why}",
        "rename a folder": f"rename a folder: {why}",
        "chmod": None,
    }
    assert not any(tmp_path.iterdir())


def test_a_run_with_checkpoints_is_refused_before_it_begins(library, tmp_path):
    shards(tmp_path / "shards")
    variables = environment(LD_PRELOAD=library, REFUSED="lock")
    words = ["--run-dir", "run", "--data", "shards", "--checkpoint-every", 2, *toy("STEPS=2")]
    [(code, _, err)] = ended([start(tmp_path, variables, *words)])
    assert code == 2 and "lock file: Operation not supported" in err
    assert "leave out --checkpoint-every" in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_errors_of_other_causes_keep_their_words(tmp_path):
    assert failed_call(ValueError("No such array")) is None
    assert refused_call(tmp_path) is None
