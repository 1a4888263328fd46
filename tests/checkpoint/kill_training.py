"""Trains, is killed at random moments while it trains and saves, and goes on.

python -m tests.checkpoint.kill_training DIRECTORY KILLS

Run in a process of its own, which imports everything and does nothing with it:
each life of the training then begins in a fork, and costs no import.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import jax
import orbax.checkpoint  # noqa: F401  it is imported once, for all forks

from pax_export.checkpoint import Checkpoints
from tests.checkpoint.models import batch, make_state, train_step
from tests.forks import done, in_fork

SAVE_EVERY = 2


def train(folder, steps):
    """A training program: it goes on from the last checkpoint, if there is one."""
    jax.config.update("jax_compilation_cache_dir", str(folder.parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    state, start = make_state(), 0
    with (
        Checkpoints(folder / "run", keep=2, best="loss") as checkpoints,
        (folder / "losses").open("a") as losses,
    ):
        if checkpoints.latest is not None:
            state = checkpoints.restore(**state)
            start = state.step
        print("from", start, file=losses, flush=True)
        for step in range(start + 1, steps + 1):
            state, loss = train_step(dict(state), *batch(step))
            print(step, float(loss).hex(), file=losses, flush=True)
            if step % SAVE_EVERY == 0:
                checkpoints.save(step, metrics={"loss": loss}, **state)


def finish(folder, steps):
    done(in_fork(lambda: train(folder, steps)))


def count(folder):
    path = folder / "losses"
    return path.read_text().count("\n") if path.exists() else 0


def kill_one(folder, steps, lines, moment):
    """Lets it train for some steps, and kills it in a moment of one of them."""
    goal = count(folder) + lines
    child = in_fork(lambda: train(folder, steps))
    while count(folder) < goal:
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.002)
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def read(folder):
    """The losses by step, each as often as it was computed; and where each life began."""
    losses, starts = {}, []
    for line in (folder / "losses").read_text().splitlines():
        first, second = line.split()
        if first == "from":
            starts.append(int(second))
        else:
            losses.setdefault(int(first), []).append(second)
    return losses, starts


def main(folder, kills):
    warnings.filterwarnings("ignore", message=".*fork")
    steps = 1000 * kills  # more than it lives to do
    draw, half_written = random.Random(0), 0
    for name in ("killed", "whole"):
        (folder / name).mkdir(parents=True)
    for _ in range(kills):
        kill_one(folder / "killed", steps, draw.randint(2, 9), draw.uniform(0, 0.1))
        half_written += any((folder / "killed" / "run").glob("*tmp*"))
    last = Checkpoints(folder / "killed" / "run").latest + 4
    finish(folder / "killed", last)
    finish(folder / "whole", last)
    (seen, starts), (expected, _) = read(folder / "killed"), read(folder / "whole")
    wrong = [step for step in expected if set(seen.get(step, ())) != set(expected[step])]
    left = sorted(entry.name for entry in (folder / "killed" / "run").iterdir())
    figures = {"kills": kills, "half_written": half_written, "steps": last, "wrong": wrong}
    print(json.dumps({**figures, "starts": starts, "left": left}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
