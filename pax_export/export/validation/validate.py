"""Runs what was written beside what was meant, and compares every element."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pax_export._errors import ValidationError
from pax_export._jax import dimension_value, scope_constraints
from pax_export.export.artifact import dimensions as _dimensions
from pax_export.export.artifact import random_arrays
from pax_export.export.formats.saved_model import checkpoint
from pax_export.export.tracing import dtypes
from pax_export.export.validation import fresh_process, serve

#: So many elements are compared at a time.
_PIECE = 1 << 18
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
#: How much farther decompositions may be apart: a random matrix may be nearly singular.
_ILL_CONDITIONED = 10.0


@dataclass
class Case:
    """One call: what goes in, and what must come out."""

    signature: str
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    cotangents: dict[str, np.ndarray] = field(default_factory=dict)
    label: str = ""
    #: What jax gives with the rules that the export was made with, where those
    #: are not its own for this machine.
    general: Callable[[], dict[str, np.ndarray]] | None = None
    slack: dict[str, float] = field(default_factory=dict)  # beyond what the dtype explains
    unchanged: dict[str, Any] = field(default_factory=dict)  # what a result is if none is given
    stage: str = ""  # "model": without what stands around it; "all": one after the other
    expect: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None

    def without_gradients(self) -> Case:
        """The same call, of which no gradients are wanted."""
        rest = {k: v for k, v in self.expected.items() if not k.startswith("gradient:")}
        return dataclasses.replace(self, expected=rest, cotangents={})

    def call(self) -> dict[str, Any]:
        """What a process that does not know the answers is given."""
        return {
            "signature": self.signature,
            "inputs": self.inputs,
            "cotangents": self.cotangents,
            "stage": self.stage,
        }


def sizes(
    structs: Sequence[jax.ShapeDtypeStruct], dimensions: Sequence[str]
) -> list[dict[str, int]]:
    """Sizes for the symbolic dimensions that their constraints allow."""
    if not dimensions:
        return [{}]
    symbolic = [size for struct in structs for size in struct.shape if not isinstance(size, int)]
    constraints = dict.fromkeys(text for size in symbolic for text in scope_constraints(size.scope))
    return _dimensions.choose([tuple(map(str, symbolic))], tuple(constraints))


def shape_of(struct: jax.ShapeDtypeStruct, chosen: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an input for these sizes."""
    return tuple(dimension_value(size, chosen) for size in struct.shape)


def random_array(
    struct: jax.ShapeDtypeStruct, chosen: Mapping[str, int], random: np.random.Generator
) -> np.ndarray:
    """A random input: normal numbers, small integers, coin tosses, key data."""
    struct = dtypes.stored(struct)
    return random_arrays.random_array(shape_of(struct, chosen), np.dtype(struct.dtype), random)


def validate(
    place: Path,
    cases: Sequence[Case],
    separate: bool,
    runtime: str = "saved_model",
    factor: float = 1.0,
    weights: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Makes all calls of an export and compares their results.

    Args:
        place: of the export, a directory or a file.
        cases: the calls with the results that jax gives.
        separate: run the export in a fresh process that cannot import jax.
        runtime: the key of what runs it, in `_served.RUNTIMES`.
        factor: how much more than rounding a result may differ, where numbers
            are stored with fewer bits.
        weights: all variables of a SavedModel, by name: what was written of them is
            compared with these, and calls in this process share their memory.

    Returns:
        The largest absolute difference for each result of each signature.

    Raises:
        ValidationError: something differs, or the export cannot be called.
    """
    if weights is not None:
        checkpoint.compare(place, weights)
    try:
        results = call(runtime, place, cases, separate, weights)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"[-2000:]
        if any(case.cotangents for case in cases):
            # What is wrong with the results themselves comes first.
            plain = [case.without_gradients() for case in cases]
            validate(place, plain, separate, runtime, factor, weights)
            raise ValidationError(
                "The gradient of the exported model cannot be computed.",
                got=message,
                write="vjp_order=0, if nobody needs gradients, and please report it",
            ) from error
        processed = any(case.stage == "all" for case in cases)
        raise ValidationError(
            "The exported model cannot be called.",
            got=message,
            write="examples=[...], arguments that the preprocessor can read" if processed else None,
        ) from error
    errors: dict[str, float] = {}
    for case, got in zip(cases, results):
        if case.expect is not None:  # what is right depends on what a preprocessor gave
            case.expected = case.expect(got)
        for name, difference in _compare_either(case, got, factor).items():
            key = f"{case.signature}: {name}"
            errors[key] = max(difference, errors.get(key, 0.0))
    return errors


def call(
    runtime: str,
    place: Path,
    cases: Sequence[Case],
    separate: bool,
    weights: Mapping[str, Any] | None = None,
) -> list[serve.Arrays]:
    """The results of all calls, made here or in a fresh process without jax."""
    calls = [case.call() for case in cases]
    if separate:
        return _in_process(runtime, place, calls)
    if weights is not None:
        return serve.run(str(place), calls, weights)
    return serve.RUNTIMES[runtime](str(place), calls)


def _in_process(runtime: str, place: Path, calls: list[dict[str, Any]]) -> list[serve.Arrays]:
    return [entry["results"] for entry in fresh_process.in_process(runtime, place, calls, "all")]


def _compare_either(
    case: Case, got: Mapping[str, np.ndarray], factor: float = 1.0
) -> dict[str, float]:
    """Compares with LAPACK where jax uses it, or else with the same algorithms as the export's.

    Eigenvectors of either sign are right, and so is any solution of a system
    that is nearly singular.
    """
    try:
        return compare(case, got, factor)
    except ValidationError:
        if case.general is None:
            raise
        general = dataclasses.replace(case, expected=case.general())
        return compare(general, got, factor * _ILL_CONDITIONED)


def compare(case: Case, got: Mapping[str, np.ndarray], factor: float = 1.0) -> dict[str, float]:
    """The largest difference of each result, at most its dtype's `TOLERANCE` times a factor.

    Raises:
        ValidationError: a result is missing, has another shape or dtype, or
            differs by more than its dtype explains.
    """
    where = f"{case.signature} {case.label}".strip()
    all_expected, got = {**case.unchanged, **case.expected}, {**case.unchanged, **got}
    if sorted(got) != sorted(all_expected):
        raise ValidationError(
            "The exported model gives other results than the model.",
            where=where,
            got=f"{sorted(got)} instead of {sorted(all_expected)}",
        )
    # Of gradients that cancel out, only rounding is left; the others say how much that is.
    gradients = [v for name, v in case.expected.items() if name.startswith("gradient:")]
    scale = 0.01 * max(map(_largest, gradients), default=0.0)
    return {
        name: _difference(
            np.asarray(expected),
            np.asarray(got[name]),
            f"{where}: {name}",
            factor,
            scale if name.startswith("gradient:") else 0.0,
            case.slack.get(name, 0.0),
        )
        for name, expected in all_expected.items()
    }


def _difference(
    expected: np.ndarray,
    got: np.ndarray,
    where: str,
    factor: float,
    scale: float = 0.0,
    slack: float = 0.0,
) -> float:
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        raise ValidationError(
            "A result of the exported model has another shape or dtype.",
            where=where,
            got=f"{got.dtype}{list(got.shape)} instead of {expected.dtype}{list(expected.shape)}",
        )
    relative = TOLERANCE.get(expected.dtype.name, 0.0)
    largest = max(_largest(expected), scale) if relative else 0.0
    count, difference = 0, 0.0
    for one, other in zip(_pieces(expected), _pieces(got)):
        if relative:
            wrong, apart = _apart(one, other, factor * relative, largest, slack)
        else:
            wrong = one != other
            apart = one.astype(object) - other if wrong.any() else wrong
        count += int(np.count_nonzero(wrong))
        difference = max(difference, float(np.max(np.abs(apart), initial=0.0)))
    if count:
        raise ValidationError(
            "A result of the exported model differs from the model's.",
            where=where,
            got=f"{count} of {expected.size} elements differ, by {difference:.3g} at most",
            write="validate=False to look at the export all the same, and please report it",
        )
    return difference


def _apart(
    one: np.ndarray, other: np.ndarray, relative: float, largest: float, slack: float
) -> tuple[np.ndarray, np.ndarray]:
    """Which elements differ too much, and how far each is apart."""
    one, other = _wide(one), _wide(other)
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - other)
    apart[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    size = np.where(np.isfinite(one), np.abs(one), 0.0)
    # `not <=` is true of NaN, so a NaN in one of them only is wrong.
    return ~(apart <= relative * (size + 0.1 * largest) + slack), apart


def _wide(values: np.ndarray) -> np.ndarray:
    is_complex = np.issubdtype(values.dtype, np.complexfloating)
    return values.astype(np.complex128 if is_complex else np.float64)


def _pieces(values: np.ndarray) -> Iterator[np.ndarray]:
    """The elements in order, so many at a time that wider copies of them are small."""
    flat = values.reshape(-1)
    return (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))


def _largest(values: Any) -> float:
    """The largest size of a number that has one."""
    largest = 0.0
    for piece in map(_wide, _pieces(np.asarray(values))):
        sizes = np.abs(piece)
        largest = max(largest, float(np.max(sizes, initial=0.0, where=np.isfinite(sizes))))
    return largest


def cases(
    signature: str,
    structs: Mapping[str, jax.ShapeDtypeStruct],
    dimensions: Sequence[str],
    expected: Callable[[dict[str, np.ndarray], dict[str, int]], dict[str, np.ndarray]],
    examples: Sequence[dict[str, np.ndarray]] = (),
) -> Iterator[Case]:
    """Calls of one signature: the examples, or random ones at several sizes."""
    for number, inputs in enumerate(examples):
        yield Case(signature, inputs, expected(inputs, {}), label=f"(example {number})")
    if examples:
        return
    random = np.random.default_rng(0)
    for chosen in sizes(list(structs.values()), dimensions):
        inputs = {name: random_array(struct, chosen, random) for name, struct in structs.items()}
        label = ", ".join(itertools.starmap("{}={}".format, chosen.items()))
        yield Case(signature, inputs, expected(inputs, chosen), label=label and f"({label})")
