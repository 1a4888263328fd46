"""Kills saves at random moments, and looks at what they leave.

python -m tests.export.kill_saves DIRECTORY KILLS

Run in a process of its own, which imports everything and does nothing with it:
each save then begins in a fork, and costs no import.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import tensorflow  # noqa: F401  it is imported once, for all forks

from pax_export.export import Report, load, spec, to_saved_model
from tests.export.models import affine
from tests.forks import done, in_fork

VALUES = {"one": 1.0, "two": 2.0}


def save(path, name, validate):
    params = {"w": np.full((3, 4), VALUES[name], np.float32), "b": np.ones(4, np.float32)}
    to_saved_model((params, affine), path, spec("n, 3"), validate=validate, overwrite=True)


def content(path):
    """Every file of an export but its report, which counts seconds, and the hash of that."""
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name not in ("pax_export.json", "SHA256SUMS")
    }


def which(path, whole):
    """The name of the one whole export that lies there."""
    Report.read(path)
    (name,) = (name for name, files in whole.items() if files == content(path))
    return name


def kill_one(path, first, validate, saves, moment):
    """Saves again and again, in turn; kills it in a moment of the first or second one."""

    def work():
        order = sorted(VALUES, key=lambda name: name != first)
        while True:
            for name in order:
                save(path, name, validate)

    child = in_fork(work)
    begun = set()
    while len(begun) < saves:
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.002)
        begun.update(path.parent.glob(".*.part"))
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main(folder, kills):
    warnings.filterwarnings("ignore", message=".*fork")
    whole = {}
    for name in VALUES:
        done(in_fork(lambda name=name: save(folder / name, name, False)))
        whole[name] = content(folder / name)
    path = folder / "killed" / "model"
    done(in_fork(lambda: save(path, "one", False)))
    draw, leftovers, changed, there = random.Random(0), 0, 0, "one"
    for number in range(kills):
        other = "two" if there == "one" else "one"
        for leftover in path.parent.glob(".*.part"):
            # The next save would remove it; the moment must count from that save's own.
            leftover.rename(folder / leftover.name)
            leftovers += 1
        # The first save of a process is slow, the second is not.
        saves = 1 if number % 3 else 2
        moment = draw.uniform(0, 0.7 if saves == 1 else 0.3)
        kill_one(path, other, bool(number % 2), saves, moment)
        before, there = there, which(path, whole)
        changed += there != before
    for leftover in folder.glob(".*.part"):
        leftover.rename(path.parent / leftover.name)
    done(in_fork(lambda: load(path)(np.ones((2, 3), np.float32))))
    done(in_fork(lambda: save(path, "two", False)))
    assert which(path, whole) == "two"
    left = sorted(entry.name for entry in path.parent.iterdir())
    print(json.dumps({"leftovers": leftovers, "changed": changed, "left": left}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
