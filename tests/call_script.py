"""Test helper: run a script's command line in this process, because a subprocess costs seconds."""

import contextlib
import io
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

SCRIPTS = Path(__file__).parents[1] / "scripts"


class Done(NamedTuple):
    code: int
    out: str
    err: str


def call(cwd: Path, script: str, *arguments: object) -> Done:
    """Run ``scripts/SCRIPT``, or the command line of the module that ``script`` names, as
    ``__main__`` in ``cwd``.

    Devices cannot be asked for any more: there are those of conftest.py.
    """
    words = [script, *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    told = {"JAX_NUM_CPU_DEVICES": "8", "COLUMNS": "200"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(cwd))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(mock.patch.object(sys, "argv", words))
        stack.enter_context(mock.patch.dict(os.environ, told))
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        try:
            if script.endswith(".py"):
                runpy.run_path(str(SCRIPTS / script), run_name="__main__")
            else:
                sys.modules.pop(f"{script}.__main__", None)  # another test may have imported it
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            raise AssertionError(f"{words} ended without an exit code")
        except SystemExit as ended:
            code = ended.code
    return Done(code if isinstance(code, int) else int(bool(code)), out.getvalue(), err.getvalue())
