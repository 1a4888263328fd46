"""Processes of their own: what is installed as `pax` stays installed until the end."""

import atexit
import functools
import os
import subprocess
import tempfile
from pathlib import Path

from tests import processes
from tests.warm import Warm

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))


# The numbers hardly depend on how well XLA compiles, and it takes half the time.
_VARIABLES = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def python(*arguments, check=True, cwd=None):
    """Runs Python on the sources of this checkout."""
    return processes.python(*arguments, check=check, cwd=cwd, env=_VARIABLES)


def code(text, cwd=None, fresh=False):
    """Runs a few lines, in a fork that has imported jax; returns what they print, as lines."""
    if fresh:
        return python("-W", "error", "-c", text, cwd=cwd).stdout.splitlines()
    text = f"import warnings; warnings.simplefilter('error')\n{text}"
    return _forked(["-c", text], "jax.numpy", cwd=cwd).stdout.splitlines()


def _forked(command, *modules, check=True, cwd=None):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = _warm(*modules).start(command, out.fileno(), err.fileno(), cwd=cwd).wait(900)
        texts = [os.pread(file.fileno(), 1 << 24, 0).decode() for file in (out, err)]
    assert not check or code == 0, texts[1]
    return subprocess.CompletedProcess(command, code, *texts)


@functools.cache
def _warm(*modules):
    warm = Warm(modules, _VARIABLES)
    atexit.register(warm.close)
    return warm
