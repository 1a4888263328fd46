"""The example on distributed training learns the same in one process and in two."""

from __future__ import annotations

import contextlib
import re
import signal
import time

import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.sharding.many import PATIENCE, ROOT, VARIABLES, Process, free_port
from tests.warm import Warm

EXAMPLE = ROOT / "examples" / "distributed.py"
# What it imports, at once or later; half of the time of a run of it.
IMPORTS = ["optax", "sklearn.datasets", "sklearn.model_selection"]
IMPORTS += [f"pax_export.{room}" for room in ("checkpoint", "experimental", "optim", "sharding")]


@pytest.fixture
def warm():
    with contextlib.closing(Warm(IMPORTS, VARIABLES)) as process:
        yield process


def start(stack, warm, *arguments, devices):
    """The example, in one process that is killed with the stack."""
    return stack.enter_context(Process([EXAMPLE, *arguments], devices, warm))


def start_two(stack, warm, *arguments):
    """The example in two processes with two devices each."""
    joined = ["--coordinator", f"localhost:{free_port()}", "--processes", 2, "--process"]
    return [start(stack, warm, *joined, index, *arguments, devices=2) for index in range(2)]


def losses(process):
    found = re.findall(r"^epoch +\d+: loss ([0-9.]+)", process.out, re.M)
    return [float(loss) for loss in found]


# One test, for one set of runs; while one pair waits, others run.
def test_the_same_losses_on_any_number_of_devices_and_processes(warm, tmp_path):
    two_epochs, sharded = ("--epochs", 2), "--fully-sharded"
    with contextlib.ExitStack() as stack:
        saved = ("--checkpoints", tmp_path / "checkpoints")
        endless = start_two(stack, warm, "--epochs", 100_000, "--timeout", 12, *saved)
        alone = start(stack, warm, *two_epochs, devices=1)
        one_of_two_is_killed(endless)
        assert alone.end() == 0, alone.err
        expected = losses(alone)
        assert expected[1] < expected[0] / 2
        assert_close(losses(endless[0])[:2], expected, atol=1e-5)

        four = start(stack, warm, *two_epochs, sharded, devices=4)
        mixed = start(stack, warm, "--epochs", 1, "--mixed-precision", devices=2)
        pair = start_two(stack, warm, *two_epochs, sharded, "--output", tmp_path / "model")
        one_process_with_four_devices(four, expected)
        the_other_misses_it(*endless)
        resumed = start(stack, warm, "--epochs", 100_000, sharded, *saved, devices=4)
        it_goes_on(resumed, losses(endless[0]))
        two_processes_that_export(pair, expected, tmp_path / "model")
        assert mixed.end() == 0, mixed.err
        assert_close(losses(mixed), expected[:1], atol=0.01)


def one_process_with_four_devices(process, expected):
    assert process.end() == 0, process.err
    assert "1 processes, 4 devices\n" in process.out
    assert_close(losses(process), expected, atol=1e-5)


def two_processes_that_export(pair, expected, model):
    zero, one = pair
    assert (zero.end(), one.end()) == (0, 0), zero.err + one.err
    assert "2 processes, 4 devices\n" in zero.out
    assert_close(losses(zero), expected, atol=1e-5)
    assert losses(one) == []
    assert float(re.search(r"held-out accuracy: ([0-9.]+)%", zero.out)[1]) > 80
    served = pax.export.load(model)
    assert served(np.zeros((3, 8, 8, 1), np.float32)).shape == (3, 10)


def wait_for_epochs(process, count):
    deadline = time.monotonic() + PATIENCE
    while len(losses(process)) < count:
        assert time.monotonic() < deadline and process.is_running, process.err
        time.sleep(0.1)


def one_of_two_is_killed(pair):
    wait_for_epochs(pair[0], 3)
    pair[1].signal(signal.SIGKILL)


def it_goes_on(process, before):
    """The checkpoint of two processes, fully sharded over four devices of one."""
    wait_for_epochs(process, 1)
    done = int(re.search(r"^goes on after epoch (\d+)$", process.out, re.M)[1])
    assert 1 <= done <= len(before)
    if done < len(before):  # the next epoch was not saved any more, but printed
        assert_close(losses(process)[0], before[done], atol=1e-4)
    assert losses(process)[0] < before[0] / 2
    process.signal(signal.SIGKILL)


def the_other_misses_it(zero, one):
    assert zero.end() != 0, zero.out  # by jax's runtime, or as a collective has no partner


def test_a_batch_that_does_not_divide():
    with Process([EXAMPLE, "--batch", 30], devices=4) as process:
        assert process.end() == 1
        assert process.err.endswith("--batch 30: 4 devices need a multiple of 4\n")


def test_it_is_short_enough_to_be_read():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 170
