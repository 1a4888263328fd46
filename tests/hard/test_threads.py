"""Sixteen threads call one loaded model: every answer is the one that a single thread gets."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.export import load, spec, to_onnx, to_saved_model, to_stablehlo, to_tflite
from tests.closeness import assert_close, is_close
from tests.export.models import random
from tests.hard.size import runs

THREADS = 16
SECONDS = runs(short=1, long=60)
CALLS = runs(short=10, long=500)  # of each thread, where every call is counted


class Net(pax.Module):
    """Two functions over the same weights, so that two signatures share a runtime."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = pax.Linear(8, 64), pax.Linear(64, 4)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))

    def encode(self, x):
        return jnp.tanh(self.hidden(x))


def exported(to_format, folder, signatures, **options):
    """The path of an export of a `Net`."""
    pax.seed_rng_key(0)
    path = folder / "model"
    if len(signatures) == 1:
        to_format(Net(), path, spec("4, 8"), **options)
    else:
        inputs = dict.fromkeys(signatures, spec("4, 8"))
        to_format(Net(), path, inputs, methods=signatures, **options)
    return path


BOTH = {"serving_default": "__call__", "encode": "encode"}
FORMATS = {
    "tflite": (to_tflite, BOTH),
    "saved_model": (to_saved_model, BOTH),
    "stablehlo": (to_stablehlo, BOTH),
    "onnx": (to_onnx, {"serving_default": "__call__"}),
}


def together(work):
    """Runs `work(number)` in all threads, begun at one moment; gives what it returned in each."""
    start = threading.Barrier(THREADS)

    def run(number):
        start.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def wrong_answers(functions, seconds):
    """How many calls, and how many of them gave other numbers than alone.

    Each thread asks in turn all functions for answers that belong to no other thread.
    """
    inputs = [random(4, 8) * (1 + number) for number in range(THREADS)]
    expected = [[np.array(function(x)) for function in functions] for x in inputs]

    def work(number):
        calls = wrong = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            place = calls % len(functions)
            found = functions[place](inputs[number])
            # Looked at late: the arrays of a call must not change with the next one.
            time.sleep(0)
            wrong += not is_close(found, expected[number][place], rtol=1e-5)
            calls += 1
        return calls, wrong

    return tuple(map(sum, zip(*together(work))))


@pytest.mark.parametrize("name", FORMATS)
def test_each_thread_gets_its_own_answer(name, tmp_path):
    model = load(exported(FORMATS[name][0], tmp_path, FORMATS[name][1]))
    calls, wrong = wrong_answers(list(model.signatures.values()), SECONDS)
    print(f"{name}: {calls} calls, {wrong} wrong")
    assert calls > THREADS and wrong == 0


def test_the_first_calls_may_be_made_at_once(tmp_path):
    """What a call prepares for the next ones is prepared by all threads at the same time."""
    for name, (to_format, signatures) in FORMATS.items():
        if name == "onnx":
            continue  # there is nothing to prepare
        (folder := tmp_path / name).mkdir()
        path = exported(to_format, folder, signatures)
        expected = np.array(load(path)(random(4, 8)))
        model = load(path)
        for found in together(lambda number, model=model: model(random(4, 8))):
            assert_close(found, expected, rtol=1e-5)


def test_gradients_of_a_bundle(tmp_path):
    model = load(exported(to_stablehlo, tmp_path, BOTH, vjp_order=1))
    gradient = jax.grad(lambda x: (model(x) ** 2).sum())
    calls, wrong = wrong_answers([gradient, jax.jit(gradient)], SECONDS)
    print(f"gradients: {calls} calls, {wrong} wrong")
    assert calls > THREADS and wrong == 0


class Pair(pax.Module):
    """Two counts that are always equal, if nobody sees the half of a change."""

    def __init__(self):
        super().__init__()
        self.first, self.second = jnp.zeros(200_000), jnp.zeros(200_000)

    def __call__(self, x):
        return jnp.stack([self.first.max(), self.second.max(), self.first.min()]) + 0 * x

    def count(self, x):
        self.first, self.second = self.first + x, self.second + x
        return self(x)


def test_no_step_of_training_is_lost_or_seen_by_half(tmp_path):
    def step(pair, optimizer, x):
        pair = pair.replace(first=pair.first + x, second=pair.second + x)
        return pair, optimizer, {"first": pair.first.max(), "second": pair.second.max()}

    path = tmp_path / "model"
    to_saved_model(
        Pair().eval(), path, spec(""), train_step=step, optimizer=None, train_inputs=(spec(""),)
    )
    model = load(path)
    train, one = model.signatures["train_step"], np.float32(1)

    def work(number):
        halves = 0
        for _ in range(CALLS):
            counts = list(train(one).values()) if number % 2 else model(np.float32(0))
            halves += len({float(count) for count in counts}) != 1
        return halves

    assert sum(together(work)) == 0
    assert model(np.float32(0)).tolist() == [CALLS * THREADS / 2] * 3


def test_no_update_of_a_state_is_lost(tmp_path):
    path = tmp_path / "model"
    to_saved_model(
        Pair(), path, {"count": spec(""), "show": spec("")},
        methods={"count": "count", "show": "__call__"}, state="update",
    )  # fmt: skip
    model = load(path)
    seen = together(
        lambda number: [
            tuple(model.signatures["count"](np.float32(1)).tolist()) for _ in range(CALLS)
        ]
    )
    # Every call has its own number, as in one thread.
    counts = sorted(first for each in seen for first, _, _ in each)
    assert counts == list(range(1, CALLS * THREADS + 1))
    assert all(len(set(numbers)) == 1 for each in seen for numbers in each)


def test_a_bundle_with_state_changes_for_nobody(tmp_path):
    path = tmp_path / "model"
    to_stablehlo(
        Pair(), path, {"count": spec("")}, methods={"count": "count"}, state="update",
    )  # fmt: skip
    model = load(path)

    def work(number):
        own = model
        for _ in range(CALLS):
            own, counts = own.signatures["count"].purecall(np.float32(number))
        return counts.tolist()

    assert together(work) == [[CALLS * number] * 3 for number in range(THREADS)]
    assert not model.weights["first"].any()
