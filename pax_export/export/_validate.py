"""Runs what was written beside what was meant, and compares every element."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export as jax_export

from pax_export._errors import ValidationError
from pax_export._jax import dimension_value
from pax_export.export import _dtypes, _served

#: What the symbolic dimensions are in the tests, different ones side by side.
SIZES: tuple[int, ...] = (1, 2, 5)
#: What they are where constraints forbid these.
OTHER_SIZES: tuple[int, ...] = (3, 4, 6, 8, 10, 12, 16, 24, 32, 64, 128, 256, 512, 1024)
_MOST_TRIES = 2000
#: How far two programs for one computation may differ, relative to its size.
TOLERANCE = {
    "float64": 1e-9,
    "complex128": 1e-9,
    "float32": 2e-4,
    "complex64": 2e-4,
    "bfloat16": 3e-2,
    "float16": 5e-3,
    "float8_e4m3fn": 0.25,
    "float8_e5m2": 0.5,
}


@dataclass
class Case:
    """One call: what goes in, and what must come out."""

    signature: str
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    cotangents: dict[str, np.ndarray] = field(default_factory=dict)
    label: str = ""

    def call(self) -> dict[str, Any]:
        """What a process that does not know the answers is given."""
        return {
            "signature": self.signature,
            "inputs": self.inputs,
            "cotangents": self.cotangents,
        }


def sizes(
    structs: Sequence[jax.ShapeDtypeStruct], dimensions: Sequence[str]
) -> list[dict[str, int]]:
    """Sizes for the symbolic dimensions that their constraints allow."""
    if not dimensions:
        return [{}]
    allowed = _Allowed(structs)
    count = len(dimensions)
    rotated = (itertools.islice(itertools.cycle(SIZES), start, start + count) for start in range(3))
    first = [
        chosen for chosen in (dict(zip(dimensions, each)) for each in rotated) if allowed(chosen)
    ]
    if first:
        return first
    # A constraint wants more; the smallest sizes that it allows must do.
    every = itertools.product(SIZES + OTHER_SIZES, repeat=count)
    tries = (dict(zip(dimensions, each)) for each in itertools.islice(every, _MOST_TRIES))
    return list(itertools.islice(filter(allowed, tries), len(SIZES)))


class _Allowed:
    """Tells whether sizes satisfy the constraints, by asking jax."""

    def __init__(self, structs: Sequence[jax.ShapeDtypeStruct]):
        self._structs = [_dtypes.stored(struct) for struct in structs]
        nothing = jax.jit(lambda *operands: 0)
        self._called = jax_export.export(nothing, platforms=("cpu",))(*self._structs).call

    def __call__(self, chosen: Mapping[str, int]) -> bool:
        try:
            given = [
                jax.ShapeDtypeStruct(shape_of(struct, chosen), struct.dtype)
                for struct in self._structs
            ]
            jax.eval_shape(self._called, *given)
        except ValueError:
            return False
        return True


def shape_of(struct: jax.ShapeDtypeStruct, chosen: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an input for these sizes."""
    return tuple(dimension_value(size, chosen) for size in struct.shape)


def random_array(
    struct: jax.ShapeDtypeStruct, chosen: Mapping[str, int], random: np.random.Generator
) -> np.ndarray:
    """A random input: normal numbers, small integers, coin tosses, key data."""
    struct = _dtypes.stored(struct)
    shape, dtype = shape_of(struct, chosen), np.dtype(struct.dtype)
    if dtype == np.bool_:
        return random.random(shape) < 0.5
    if np.issubdtype(dtype, np.complexfloating):
        return (random.normal(size=shape) + 1j * random.normal(size=shape)).astype(dtype)
    if jax.numpy.issubdtype(dtype, np.integer):
        return random.integers(0, 4, shape).astype(dtype)
    return random.normal(size=shape).astype(dtype)


def validate(directory: Path, cases: Sequence[Case], separate: bool) -> dict[str, float]:
    """Makes all calls of an export and compares their results.

    Args:
        directory: of the export.
        cases: the calls with the results that jax gives.
        separate: run the export in a fresh process that cannot import jax.

    Returns:
        The largest absolute difference for each result of each signature.

    Raises:
        ValidationError: something differs, or the export cannot be called.
    """
    calls = [case.call() for case in cases]
    try:
        results = (_in_process if separate else _here)(directory, calls)
    except Exception as error:
        raise ValidationError(
            "The exported model cannot be called.", got=f"{type(error).__name__}: {error}"[-2000:]
        ) from error
    errors: dict[str, float] = {}
    for case, got in zip(cases, results):
        for name, difference in compare(case, got).items():
            key = f"{case.signature}: {name}"
            errors[key] = max(difference, errors.get(key, 0.0))
    return errors


def _here(directory: Path, calls: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    return _served.run(str(directory), calls)


def _in_process(directory: Path, calls: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    with tempfile.TemporaryDirectory() as folder:
        cases, results = Path(folder, "cases.npz"), Path(folder, "results.npz")
        _served.save(cases, calls)
        program = [sys.executable, _served.__file__, str(directory), str(cases), str(results)]
        done = subprocess.run(program, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-1500:])
        return [entry["results"] for entry in _served.load(results)]


def compare(case: Case, got: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The largest difference of each result.

    Raises:
        ValidationError: a result is missing, has another shape or dtype, or
            differs by more than its dtype explains.
    """
    where = f"{case.signature} {case.label}".strip()
    if sorted(got) != sorted(case.expected):
        raise ValidationError(
            "The exported model gives other results than the model.",
            where=where,
            got=f"{sorted(got)} instead of {sorted(case.expected)}",
        )
    return {
        name: _difference(np.asarray(expected), np.asarray(got[name]), f"{where}: {name}")
        for name, expected in case.expected.items()
    }


def _difference(expected: np.ndarray, got: np.ndarray, where: str) -> float:
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        raise ValidationError(
            "A result of the exported model has another shape or dtype.",
            where=where,
            got=f"{got.dtype}{list(got.shape)} instead of {expected.dtype}{list(expected.shape)}",
        )
    relative = TOLERANCE.get(expected.dtype.name, 0.0)
    wide = np.complex128 if np.issubdtype(expected.dtype, np.complexfloating) else np.float64
    if not relative:
        wrong = expected != got
        return _report(
            wrong, _largest(expected.astype(object) - got) if wrong.any() else 0.0, where
        )
    one, other = expected.astype(wide), got.astype(wide)
    finite = np.isfinite(one)
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - other)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    apart = np.where(same, 0.0, apart)
    allowed = relative * (np.where(finite, np.abs(one), 0.0) + 0.1 * _largest(one[finite]))
    # `not <=` is true of NaN, so a NaN in one of them only is wrong.
    return _report(~(apart <= allowed), _largest(apart), where)


def _largest(values: Any) -> float:
    return float(np.max(np.abs(values), initial=0.0))


def _report(wrong: np.ndarray, difference: float, where: str) -> float:
    if wrong.any():
        raise ValidationError(
            "A result of the exported model differs from the model's.",
            where=where,
            got=f"{int(wrong.sum())} of {wrong.size} elements differ, by {difference:.3g} at most",
            write="validate=False to look at the export all the same, and please report it",
        )
    return difference


def cases(
    signature: str,
    structs: Mapping[str, jax.ShapeDtypeStruct],
    dimensions: Sequence[str],
    expected: Callable[[dict[str, np.ndarray], dict[str, int]], dict[str, np.ndarray]],
) -> Iterator[Case]:
    """Random calls of one signature, at several sizes."""
    random = np.random.default_rng(0)
    for chosen in sizes(list(structs.values()), dimensions):
        inputs = {name: random_array(struct, chosen, random) for name, struct in structs.items()}
        label = ", ".join(itertools.starmap("{}={}".format, chosen.items()))
        yield Case(signature, inputs, expected(inputs, chosen), label=label and f"({label})")
