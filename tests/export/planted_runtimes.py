"""What runtimes may do: what a process of its own runs instead of `openvino`."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np


def answers(file, cases):
    return [{"output": np.sin(case["inputs"]["x"])} for case in cases]


def differs(file, cases):
    return [{"output": np.sin(case["inputs"]["x"]) + 1} for case in cases]


def differs_far_away(file, cases):
    return [{"output": 2 * np.clip(case["inputs"]["x"], -50, 50)} for case in cases]


def refuses(file, cases):
    raise RuntimeError("no kernel")


def crashes(file, cases):
    print("out of registers", file=sys.stderr, flush=True)
    os.abort()


def hangs(file, cases):
    """With a process of its own, whose id it leaves beside the model."""
    started = subprocess.Popen(["sleep", "60"])
    Path(file).with_name("started").write_text(str(started.pid))
    time.sleep(60)


def affine(file, cases):
    """The model of that name of tests/cli."""
    weights = np.arange(12.0, dtype=np.float32).reshape(3, 4) / 7
    return [{"y": case["inputs"]["x"] @ weights + 1} for case in cases]


def other(file, cases):
    return [{"y": each["y"] + 1} for each in affine(file, cases)]
