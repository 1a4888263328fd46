"""A distribution as its users get it: installed where nothing else is, and used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

EXAMPLES = ("digits.py", "serve_digits.py")

_ASK = """
import json, pax_export
print(json.dumps({"version": pax_export.__version__, "file": pax_export.__file__}))
"""
# What would let the trial find other packages than those of its environment.
_UNSET = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_SET = {
    "PYTHONNOUSERSITE": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "-1",
    "JAX_PLATFORMS": "cpu",
}


def try_out(distribution: Path, examples: Path, place: Path, version: str) -> list[str]:
    """Installs a distribution in a new environment under `place`, and runs the digits example.

    Returns:
        What is wrong with what was found there.

    Raises:
        subprocess.CalledProcessError: it cannot be installed, or the example fails.
    """
    environment, work = place / "environment", place / "work"
    python = environment / "bin" / "python"
    run([sys.executable, "-m", "venv", environment], place)
    run([python, "-m", "pip", "install", "--quiet", f"{distribution}[examples]"], place)
    # The scripts are copied: Python puts their folder at the head of its path.
    work.mkdir()
    for name in EXAMPLES:
        shutil.copy(examples / name, work)
    (work / "ask.py").write_text(_ASK, encoding="utf-8")
    about = json.loads(run([python, "ask.py"], work))
    command = run([environment / "bin" / "pax-export", "--version"], work)
    return [
        *installed_faults(about, environment, version),
        *([] if command.strip() == f"pax-export {version}" else [f"the command says {command!r}"]),
        *example_faults(run([python, "digits.py"], work, shown=True)),
    ]


def installed_faults(about: Mapping[str, object], environment: Path, version: str) -> list[str]:
    """What is wrong with the package that a Python found, as `ask.py` says it."""
    found = []
    if not Path(str(about["file"])).resolve().is_relative_to(environment.resolve()):
        found.append(f"pax_export was not the installed one: {about['file']}")
    if about["version"] != version:
        found.append(f"the installed version is {about['version']}, not {version}")
    return found


def example_faults(text: str) -> list[str]:
    """What is wrong with what the digits example printed."""
    accuracy = re.search(r"^held-out accuracy: ([0-9.]+)%$", text, re.MULTILINE)
    found = []
    if not accuracy or float(accuracy[1]) < 95:
        found.append("the digits example did not learn: its held-out accuracy is below 95 %")
    if "the served classes agree: True\n" not in text:
        found.append("the digits example: the served model gives other classes than jax")
    return found


def run(command: list[str | Path], place: Path, shown: bool = False) -> str:
    """Runs a command away from the checkout; returns what it printed."""
    env = {key: value for key, value in os.environ.items() if key not in _UNSET} | _SET
    # Errors go where those of the release go.
    done = subprocess.run(
        list(map(str, command)), cwd=place, env=env, check=True, stdout=subprocess.PIPE, text=True
    )
    if shown:
        print(done.stdout, end="", flush=True)
    return done.stdout
