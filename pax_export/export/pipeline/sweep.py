"""Evaluates the elementwise operations of a program over the range of inputs.

They are exported as one program in which each has its own inputs and output, so that a
difference from jax is due to that operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pax_export._jaxpr import bind_equation, is_literal
from pax_export.export.artifact.dtypes import is_inexact
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import Exportable, make_exportable
from pax_export.export.tracing.programs import Program, trace_all
from pax_export.export.tracing.source_lines import module_path
from pax_export.export.tracing.tape import Tape, TapeStep
from pax_export.export.tracing.traced import trace
from pax_export.export.validation.serve import Arrays
from pax_export.export.validation.validate import TOLERANCE, far_apart

ELEMENTWISE = frozenset(
    "abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clz "
    "convert_element_type cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt "
    "integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or "
    "population_count pow reduce_precision rem round rsqrt shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square sub tan tanh xor".split()
)
#: The number of values tried for each input of an operation.
COUNT = 8192
#: Limits beyond which an argument has no exact last digit, so neither has the result.
_FAR = 1e5
#: Denormals that some runtimes flush to 0, times the argument where exponentials overflow.
_NOTHING = 128 * float(np.finfo(np.float32).tiny)
_BIT = float(np.finfo(np.float32).eps)

#: Exports a program without a model to a temporary path, and calls it with arrays by name.
Runner = Callable[[Exportable, Program, Arrays], Arrays]


@dataclass(frozen=True)
class SweptOperation:
    """An elementwise operation, and the dtypes of its operands; None for a number in its place."""

    equation: Any
    dtypes: tuple[np.dtype | None, ...]

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @property
    def key(self) -> tuple:
        """A key that is equal for operations that a runtime computes alike."""
        numbers = (str(each.val) for each in self.equation.invars if is_literal(each))
        return self.name, str(self.equation.params), self.dtypes, tuple(numbers)

    def __call__(self, given: Sequence[Any]) -> Any:
        left = iter(given)
        operands = [e.val if is_literal(e) else next(left) for e in self.equation.invars]
        return bind_equation(self.equation, operands)[0]

    @property
    def operands(self) -> list[np.dtype]:
        return [dtype for dtype in self.dtypes if dtype is not None]


def operation(equation: Any) -> SweptOperation | None:
    """The operation of an equation, if it is elementwise on one or two arrays of numbers."""
    if equation.primitive.name not in ELEMENTWISE:
        return None
    dtypes = [None if is_literal(each) else each.aval.dtype for each in equation.invars]
    known = [dtype for dtype in dtypes if dtype is not None]
    if not 1 <= len(known) <= 2 or any(not _is_number(dtype) for dtype in known):
        return None
    return SweptOperation(equation, tuple(dtypes))


def _is_number(dtype: Any) -> bool:
    return (
        isinstance(dtype, np.dtype)
        and (dtype.kind in "iu" or dtype.name in TOLERANCE)
        and (dtype.kind != "c")
    )


def operand_grid(operation: SweptOperation) -> list[np.ndarray]:
    """Returns values for each operand: of every magnitude, and NaN."""
    first, *others = operation.operands
    if not others:
        return [_fill_count(_values_of_dtype(first, 15 if is_inexact(first) else 1))]
    side = int(COUNT**0.5)
    one, other = (_thin_out(_values_of_dtype(dtype, 1), side) for dtype in (first, *others))
    pairs = np.meshgrid(one, other, indexing="ij")
    return [_fill_count(each.ravel()) for each in pairs]


def _values_of_dtype(dtype: np.dtype, by: int) -> np.ndarray:
    """Numbers of a dtype in order, `by` for each power of two; then infinities and NaN."""
    if not is_inexact(dtype):
        ends = np.iinfo(dtype)
        powers = [
            sign * (1 << bit) + off for bit in range(64) for sign in (1, -1) for off in (-1, 0, 1)
        ]
        inside = {0, *(each for each in powers if ends.min <= each <= ends.max), ends.max, ends.min}
        return np.array(sorted(inside), dtype)
    info = jax.numpy.finfo(dtype)
    low, high = np.log2(float(info.tiny)), np.log2(float(info.max))
    sizes = 2.0 ** np.linspace(low, high, int((high - low) * by) + 1)
    sizes = np.minimum(sizes, float(info.max))
    if by > 1:  # and where exponentials end
        sizes = np.sort(np.concatenate([sizes, np.arange(0.5, 128.0, 0.5)]))
    finite = [*-sizes[::-1], 0.0, *sizes]
    return np.array([*finite, np.inf, -np.inf, np.nan]).astype(dtype)


def _thin_out(values: np.ndarray, most: int) -> np.ndarray:
    """Returns some of many elements, including the last ones."""
    if len(values) <= most:
        return values
    places = np.linspace(0, len(values) - 4, most - 3).astype(int)
    return np.concatenate([values[places], values[-3:]])


def _fill_count(values: np.ndarray) -> np.ndarray:
    return np.resize(values, COUNT) if len(values) < COUNT else values[:COUNT]


@dataclass(frozen=True)
class DifferingElements:
    """The differing elements of an operation's result, and their operands."""

    operation: SweptOperation
    given: list[np.ndarray]
    expected: np.ndarray
    got: np.ndarray
    differs: np.ndarray

    def __str__(self) -> str:
        return f"{self.operation.name} {where_differs(self.given, self.differs)}"


def sweep(
    operations: Sequence[SweptOperation],
    values: Sequence[list[np.ndarray]],
    run: Runner,
    factor: float = 1.0,
) -> list[DifferingElements]:
    """Returns the results of runtime and jax for each operation that can be exported."""
    if not operations:
        return []
    try:
        return _sweep_together(operations, values, run, factor)
    except Exception:  # of any runtime
        if len(operations) == 1:
            return []
    half = len(operations) // 2
    return [
        *sweep(operations[:half], values[:half], run, factor),
        *sweep(operations[half:], values[half:], run, factor),
    ]


def _sweep_together(
    operations: Sequence[SweptOperation],
    values: Sequence[list[np.ndarray]],
    run: Runner,
    factor: float,
) -> list[DifferingElements]:
    def function(_: Any, *arrays: Any) -> list[Any]:
        left = iter(arrays)
        return [each([next(left) for _ in each.operands]) for each in operations]

    flat = [each for given in values for each in given]
    model = make_exportable(({}, function), None)
    structs = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in flat)
    (program,) = trace_all(model, structs, None, (), False)
    got = run(model, program, dict(zip((e.name for e in program.inputs.flat), flat)))

    def by_jax(moved: float) -> list[np.ndarray]:
        with np.errstate(over="ignore"):
            near = [_move_values(each, moved) for each in flat]
        return list(map(np.asarray, program.traced.run(near)))

    expected = by_jax(0.0)
    near = [by_jax(moved) for moved in (8 * _BIT, -8 * _BIT)]
    found = []
    for index, (each, given) in enumerate(zip(operations, values)):
        one, other = expected[index], np.asarray(got[program.output_names[index]])
        spread = [side[index] for side in near]
        differs = _differs(given, one, other, spread, factor)
        found.append(DifferingElements(each, given, one, other, differs))
    return found


def _move_values(values: np.ndarray, by: float) -> np.ndarray:
    return (values * (1 + by)).astype(values.dtype) if is_inexact(values.dtype) and by else values


def _differs(
    given: list[np.ndarray],
    expected: np.ndarray,
    got: np.ndarray,
    near: list[np.ndarray],
    factor: float,
) -> np.ndarray:
    """Returns the elements that differ by more than rounding of results and operands."""
    if expected.dtype.name not in TOLERANCE:
        return expected != got
    one, other = expected.astype(np.float64), got.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        spread = np.max([np.abs(each.astype(np.float64) - one) for each in near], axis=0)
        spread = np.where(np.isfinite(spread), spread, 0.0)
        far = np.max([np.abs(each.astype(np.float64)) for each in given], axis=0) > _FAR
        allowed = np.where(far, np.minimum(spread, 1e-6), spread) + _NOTHING
    return far_apart(one, other, factor * TOLERANCE[expected.dtype.name], 0.0, allowed)[0]


def where_differs(given: list[np.ndarray], differs: np.ndarray) -> str:
    """Describes the operands for which elements differ, e.g. ``above 88``, ``at NaN``."""
    return ", ".join(_differing_regions(given, differs))


def _differing_regions(given: list[np.ndarray], differs: np.ndarray) -> Iterator[str]:
    wide = [each.astype(np.float64) for each in given]
    finite = np.all([np.isfinite(each) for each in wide], axis=0)
    if len(given) == 1:
        values = wide[0]
        above, below = (values[differs & finite & (sign * values > 0)] for sign in (1, -1))
        least, most = np.min(above, initial=np.inf), np.max(below, initial=-np.inf)
        if above.size and below.size and abs(least + most) <= 0.1 * least:
            yield f"beyond ±{least:.3g}"
        elif above.size or below.size:
            yield from (f"above {least:.3g}",) * bool(above.size)
            yield from (f"below {most:.3g}",) * bool(below.size)
        if np.any(differs & (values == 0)):
            yield "at 0"
    elif np.any(differs & finite):
        place = np.flatnonzero(differs & finite)[0]
        yield "at " + " and ".join(f"{each[place]:.2g}" for each in wide)
    for test, text in ((np.isnan, "at NaN"), (np.isposinf, "at inf"), (np.isneginf, "at -inf")):
        if np.any(differs & np.any([test(each) for each in wide], axis=0)):
            yield text


@dataclass(frozen=True)
class Cause:
    """The first operation of a call that a runtime computes differently."""

    text: str  # "sin above 2e+06"
    path: str  # of the calling module
    usual: bool  # whether it differs for usual numbers, too

    @property
    def operation(self) -> str:
        return self.text.partition(" ")[0]

    def __str__(self) -> str:
        return f"{self.text} in {self.path}" if self.path else self.text


#: The number of elements of an operand that are looked at.
_SOME = 512
#: From where to where numbers are usual.
_USUAL = (1e-30, 1e5, 1e30)


def find_causes(
    model: Exportable,
    program: Program,
    wrong: Sequence[tuple[Arrays, str]],
    run: Runner,
    factor: float,
) -> list[Cause | None]:
    """The elementwise operation behind each wrong call, or None; all calls have equal sizes."""
    leaves = [leaf.value for leaf in model.leaves]
    names = [entry.name for entry in program.inputs.flat]
    calls = list({id(inputs): inputs for inputs, _ in wrong}.values())
    operands = [[*leaves, *(call[name] for name in names)] for call in calls]
    structs = [dtypes.struct_of(value) for value in operands[0]]
    traced = trace(program.traced.function, structs, outlined=False)
    tape = Tape(traced.program, range(len(program.output_names)))
    steps = [(step, each) for step in tape.steps if (each := operation(step.equation))]
    distinct = list({each.key: each for _, each in steps}.values())
    swept = sweep(distinct, [operand_grid(each) for each in distinct], run, factor)
    texts = {found.operation.key: str(found) for found in swept if found.differs.any()}
    suspects = [(step, each) for step, each in steps if each.key in texts]
    read = jax.jit(lambda values: tape.read([step for step, _ in suspects], values))
    given = [_sample_operands(s, g) for v in operands for (s, _), g in zip(suspects, read(v))]
    found = sweep([each for _, each in suspects] * len(calls), given, run, factor)
    if len(found) < len(given):
        return [None] * len(wrong)
    blamed: list[Cause | None] = []
    for inputs, output in wrong:
        start = len(suspects) * next(at for at, call in enumerate(calls) if call is inputs)
        needed = tape.needed_by(program.output_names.index(output))
        these = zip(suspects, found[start:])
        first = next((p for p in these if p[0][0] in needed and p[1].differs.any()), None)
        if first is None:
            blamed.append(None)
        else:
            ((step, each), one) = first
            path = module_path((*step.callers, step.equation))
            blamed.append(Cause(texts[each.key], path, _at_usual_numbers(one)))
    return blamed


def _sample_operands(step: TapeStep, given: Sequence[Any]) -> list[np.ndarray]:
    """Samples elements of a step's operands, at equal positions; includes the largest."""
    named = zip(step.equation.invars, given)
    arrays = [np.asarray(value) for atom, value in named if not is_literal(atom)]
    flat = [each.ravel() for each in np.broadcast_arrays(*arrays)]
    order = np.argsort(flat[0], kind="stable")
    chosen = order[np.linspace(0, len(order) - 1, min(_SOME, len(order))).astype(int)]
    return [each[chosen] for each in flat]


def _at_usual_numbers(found: DifferingElements) -> bool:
    tiny, far, large = _USUAL

    def usual(values: np.ndarray, most: float) -> np.ndarray:
        size = np.abs(values.astype(np.float64))
        return (size == 0) | ((size >= tiny) & (size <= most))

    inside = [usual(each, far) | (each.dtype.kind in "iu") for each in found.given]
    result = found.expected
    made = usual(result, large) | (result.dtype.kind in "iub")
    return bool(np.any(found.differs & np.all(inside, axis=0) & made))
