"""jax's own cases for its primitives: each is right in a format, or refused by its name."""

from __future__ import annotations

import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.internal_test_util.test_harnesses import all_harnesses
from numpy.random import RandomState

from pax_export import export
from pax_export.errors import PaxError
from tests.closeness import assert_close

#: So many cases of a primitive at most in each format, spread over all that there are.
FORMATS = {"onnx": 100000, "tflite": 100000}
#: Two ways of writing differ in the last places, and a case sums up to some hundred numbers.
TOLERANCES = {"bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-10}


def _open(harness: Any) -> bool:
    """Whether jax's numbers are no measure: of a broken promise, or on CPUs of NaN in order."""
    beyond = "out_of_bounds" in harness.name and "PROMISE_IN_BOUNDS" in harness.name
    return beyond or harness.fullname.startswith("top_k_sort_inf_nan")


GROUPS = defaultdict(list)
for _harness in all_harnesses:
    if _harness.filter("cpu") and not _open(_harness):
        GROUPS[_harness.group_name].append(_harness)


def export_and_run(format: str, function: Any, args: list[Any], path: Path) -> Any:
    """What a runtime gives for a function, exported for arrays like these."""
    write = getattr(export, f"to_{format}")
    specs = tuple(export.spec(each.shape, each.dtype) for each in args)
    write(({}, lambda _, *given: function(*given)), path, specs, validate=False, card=False)
    return export.load(path)(*args)


def same(harness: Any, found: Any, expected: Any) -> None:
    """Fails unless two results are equal, but for what a primitive leaves open."""
    name = harness.group_name
    one, other = (list(map(np.asarray, jax.tree.leaves(each))) for each in (found, expected))
    assert len(one) == len(other)
    if name == "approx_top_k" or "isstable_False" in harness.name:  # ties have no order
        count = harness.params.get("num_keys", 1)
        one, other = one[:count], other[:count]
    for mine, theirs in zip(one, other):
        assert mine.dtype == theirs.dtype
        if name in ("svd", "eigh", "qr"):  # vectors may have other signs
            mine, theirs = np.abs(mine), np.abs(theirs)
        if name == "cholesky":  # the other half holds anything
            mine, theirs = np.tril(mine), np.tril(theirs)
        rtol = TOLERANCES.get(str(theirs.dtype), 1e-4)
        if name == "tan":  # near a pole
            rtol *= 5
        assert_close(mine, theirs, rtol=rtol, atol=rtol / 10, where=name)


def in_parts(harness: Any) -> tuple[list[np.ndarray], Any]:
    """A case's arguments and function, with two real arrays in the place of each complex one."""
    given = [np.asarray(jnp.asarray(each)) for each in harness.dyn_args_maker(RandomState(0))]
    args = [part for each in given for part in parts(each)]

    def function(*args: Any) -> Any:
        left = iter(args)
        whole = [
            jax.lax.complex(next(left), next(left)) if np.iscomplexobj(each) else next(left)
            for each in given
        ]
        return jax.tree.map(parts, harness.dyn_fun(*whole))

    return args, function


def parts(array: Any) -> tuple[Any, ...]:
    return (array.real, array.imag) if jnp.iscomplexobj(array) else (array,)


def outcome(format: str, harness: Any, path: Path) -> str:
    """Why a case is refused; "" where it is right, and else this fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args, function = in_parts(harness)
        expected = jax.jit(function)(*args)
        try:
            found = export_and_run(format, function, args, path)
        except PaxError as error:
            return str(error)
    same(harness, found, expected)
    return ""


def spread(cases: list[Any], most: int) -> list[Any]:
    """Some of them, from all over."""
    return [cases[number] for number in sorted({*np.linspace(0, len(cases) - 1, most).astype(int)})]


@pytest.mark.parametrize("group", sorted(GROUPS))
@pytest.mark.parametrize("format", FORMATS)
def test_cases_of_jax(format, group, tmp_path):
    for number, harness in enumerate(spread(GROUPS[group], FORMATS[format])):
        try:
            outcome(format, harness, tmp_path / f"{number}.{format}")
        except Exception as error:
            raise AssertionError(f"{harness.fullname}: {error}") from error
