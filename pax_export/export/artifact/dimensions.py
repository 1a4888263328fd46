"""Shapes and dtypes as text: ``2*n + floordiv(m, 2) - n^2``, parsed without jax or `eval`."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import math
import operator
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Values of symbolic dimensions in tests, distinct within a call.
SIZES: tuple[int, ...] = (1, 2, 5)
#: Values if constraints forbid these.
OTHER_SIZES: tuple[int, ...] = (3, 4, 6, 8, 10, 12, 16, 24, 32, 64, 128, 256, 512, 1024)
_MOST_TRIES = 2000
#: Limit of evaluated expressions, because a third-party report may have any number of them.
_MOST_READ = 1_000_000
_LONGEST, _LARGEST = 1000, 2**63
#: A dimension that is linear up to this value of a variable is taken as linear.
_FAR = 2**20 + 1

Size = int | str

#: A size that TensorFlow does not know, such as one that a postprocessor chose; and all of them.
UNKNOWN, ANY_RANK = "?", "..."
#: Operations on dimensions, and their functions on numbers.
NUMBERS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "neg": operator.sub,  # of 0 and another
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": max,
    "min": min,
}
_OPERATORS: dict[type, str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul"}
_FUNCTIONS = ("floordiv", "mod", "max", "min")
#: `(operation on numbers, left, right)` -> result, for symbolic sizes.
Calculate = Callable[[str, Any, Any], Any]
_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    ">=": operator.ge,
    "<=": operator.le,
}
_RELATION = re.compile("|".join(_RELATIONS))
_NAME = re.compile(r"\b[^\W\d]\w*")
#: The largest power in a dimension.
MOST_POWER = 64


def names(size: Size) -> tuple[str, ...]:
    """The variables of a dimension, in order of appearance.

    Example:
        >>> names("2*n + max(m, 3)"), names(3)
        (('n', 'm'), ())
    """
    found = (node.id for node in ast.walk(_parse_expression(size)) if isinstance(node, ast.Name))
    return tuple(dict.fromkeys(name for name in found if name not in _FUNCTIONS))


def value(size: Size, sizes: Mapping[str, int]) -> int:
    """Evaluates a dimension.

    Example:
        >>> value("2*n + floordiv(m, 2)", {"n": 3, "m": 5})
        8
    """
    found = defined_value(size, sizes)
    if found is None:
        raise ValueError(f"the dimension {size} divides by 0 at {dict(sizes)}")
    return found


def defined_value(size: Size, sizes: Mapping[str, int]) -> int | None:
    """Evaluates a dimension; None where it divides by 0.

    Example:
        >>> defined_value("floordiv(n, m)", {"n": 3, "m": 0})
    """
    try:
        found = evaluate_over(size, sizes, _calculate_number)
    except ZeroDivisionError:
        return None
    except (KeyError, RecursionError) as error:
        raise _parse_error(size) from error
    if abs(found) >= _LARGEST:
        raise ValueError("a dimension is too large")
    return found


def evaluate_over(size: Size, known: Mapping[str, Any], calculate: Calculate) -> Any:
    """Evaluates a dimension over values that are not numbers.

    Example:
        >>> evaluate_over("2*n + 1", {"n": "n"}, lambda *each: each)
        ('add', ('mul', 2, 'n'), 1)
    """
    return _evaluate_node(_parse_expression(size), known, calculate)


def check(size: Size) -> None:
    """Raises a ValueError for what is no dimension."""
    if size not in (UNKNOWN, ANY_RANK):
        evaluate_over(size, dict.fromkeys(names(size), 1), lambda *_: 1)


def solve_for(size: Size, number: int, name: str, known: Mapping[str, int]) -> int | None:
    """Solves a dimension for a variable: 0 without a solution, None if it is not linear.

    Example:
        >>> [solve_for(size, 7, "n", {}) for size in ("2*n + 1", "2*n", "n^2")]
        [3, 0, None]
    """
    slope = _slope(size, name, known)
    if not slope:
        return None
    found, rest = divmod(number - value(size, {**known, name: 0}), slope)
    return 0 if rest else found


def _slope(size: Size, name: str, known: Mapping[str, int]) -> int:
    """The slope of a size in a variable; 0 if it is not linear."""
    values = (defined_value(size, {**known, name: n}) for n in (0, 1, 2, _FAR))
    found = [each for each in values if each is not None]
    if len(found) < 4:
        return 0
    slope = found[1] - found[0]
    is_even = found[2] - found[1] == slope and found[3] - found[2] == (_FAR - 2) * slope
    return slope if is_even else 0


def solve_each(
    sizes: Iterable[tuple[Size, Callable[[], Any]]], calculate: Calculate
) -> dict[str, Any]:
    """The variables of dimensions over values that are not numbers.

    Args:
        sizes: dimensions, each with a function that returns its value.
        calculate: as for `evaluate_over`; ``"div"`` is a quotient without a rest.

    Raises:
        ValueError: a variable is only in dimensions that are not linear in it.

    Example:
        >>> solve_each([("n", lambda: "x"), ("3*m", lambda: "y")], lambda *each: each)["m"]
        ('div', ('sub', 'y', ('mul', 3, 0)), 3)
    """
    known: dict[str, Any] = {}
    left = sorted(sizes, key=lambda each: len(str(each[0])))
    while left:
        rest = []
        for size, get_value in left:
            unknown = [name for name in names(size) if name not in known]
            if not unknown:
                continue
            name, *more = unknown
            # Its slopes, for several values of the others.
            others = [each for each in names(size) if each != name]
            some = (dict.fromkeys(others, n) for n in (1, 2, 7))
            if more or 0 in (slopes := {_slope(size, name, each) for each in some}):
                rest.append((size, get_value))
            else:
                start = evaluate_over(size, {**known, name: 0}, calculate)
                found = get_value() if _is_int(start, 0) else calculate("sub", get_value(), start)
                slope = slopes.pop()
                if slopes:  # it depends on the others
                    slope = calculate(
                        "sub", evaluate_over(size, {**known, name: 1}, calculate), start
                    )
                known[name] = found if _is_int(slope, 1) else calculate("div", found, slope)
        if len(rest) == len(left):
            raise ValueError(f"the sizes {', '.join(str(size) for size, _ in left)} of the inputs")
        left = rest
    return known


def _is_int(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


def shape(sizes: Sequence[Size], chosen: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(value(size, chosen) for size in sizes)


def holds(constraint: str, sizes: Mapping[str, int]) -> bool:
    """Returns whether a constraint such as ``"mod(n, 2) == 0"`` holds, or has unknown sizes."""
    left, relation, right = sides(constraint)
    if not set(names(left) + names(right)) <= set(sizes):
        return True
    one, other = defined_value(left, sizes), defined_value(right, sizes)
    return None not in (one, other) and _RELATIONS[relation](one, other)


def sides(constraint: str) -> tuple[str, str, str]:
    """Returns the left side of a constraint, its relation, and the right side."""
    relations = _RELATION.findall(constraint)
    if len(relations) != 1:
        raise _parse_error(constraint)
    left, right = _RELATION.split(constraint)
    return left, relations[0], right


def constrained_names(constraint: str) -> tuple[str, ...]:
    """Returns the variables of a constraint.

    Example:
        >>> constrained_names("mod(n, 2) == m")
        ('n', 'm')
    """
    return tuple(
        dict.fromkeys(name for side in _RELATION.split(constraint) for name in names(side))
    )


def choose(
    shapes: Iterable[Sequence[Size]],
    constraints: Sequence[str] = (),
    outputs: Sequence[Sequence[Size]] = (),
    inner: Collection[Size] = (),
) -> list[dict[str, int]]:
    """Up to three choices of sizes that satisfy the constraints and leave the outputs elements.

    If possible, they leave no array inside of the program without elements (`inner` are its sizes):
    at others a model may have no result, as the mean of a window larger than the image.

    Example:
        >>> choose([("n", "m")], ["m >= 20"])
        [{'n': 1, 'm': 21}, {'n': 2, 'm': 24}, {'n': 5, 'm': 20}]
    """
    dimensions = list(dict.fromkeys(size for shape in shapes for size in shape))
    variables = tuple(dict.fromkeys(name for size in dimensions for name in names(size)))
    if not variables:
        return [{}]

    def allowed(chosen: Mapping[str, int]) -> bool:
        return all(value(size, chosen) >= (1 if size in chosen else 0) for size in dimensions) and (
            all(holds(constraint, chosen) for constraint in constraints)
        )

    count = len(variables)
    own = [str(size) for each in (*outputs, inner) for size in each]
    tries = min(_MOST_TRIES, _MOST_READ // (1 + len(dimensions) + len(constraints) + len(own)))
    # First sizes that fit each dimension alone, usual ones first; then combinations that fit all.
    candidates = sorted({*SIZES, *OTHER_SIZES, *_mentioned_numbers((*constraints, *own))})
    ordered = [*SIZES, *(size for size in candidates if size not in SIZES)]
    tried = ordered[: max(tries // count, len(SIZES))]
    each = list(_candidates_of_each(variables, tried, dimensions, constraints, own))
    rotated = (
        tuple(sizes[(start + index) % min(3, len(sizes))] for index, sizes in enumerate(each))
        for start in range(3 if all(each) else 0)
    )
    equal = ((size,) * count for size in candidates)
    # All combinations last, for there may be very many.
    every = itertools.chain(rotated, equal, itertools.product(*map(sorted, each)))
    best: dict[tuple[int, ...], dict[str, int]] = {}
    some: dict[tuple[int, ...], dict[str, int]] = {}
    none: dict[tuple[int, ...], dict[str, int]] = {}
    for sizes in itertools.islice(every, tries):
        chosen = dict(zip(variables, sizes))
        if allowed(chosen):
            has_output = not outputs or any(_has_elements(each, chosen) for each in outputs)
            is_best = has_output and _has_elements(inner, chosen)
            (best if is_best else some if has_output else none)[sizes] = chosen
        if len(best) == len(SIZES):
            break
    return list((best or some or none).values())[: len(SIZES)]


def _has_elements(shape: Iterable[Size], chosen: Mapping[str, int]) -> bool:
    """Returns whether all sizes are at least 1, or unknown."""
    known = (size for size in shape if set(names(size)) <= set(chosen))
    return all((defined_value(size, chosen) or 0) > 0 for size in known)


def _candidates_of_each(
    variables: Sequence[str],
    sizes: Sequence[int],
    dimensions: Sequence[Size],
    constraints: Sequence[str],
    outputs: Sequence[str],
) -> Iterator[list[int]]:
    """Candidates for each variable by the constraints on it alone, those with outputs first."""
    own: dict[str, list[Size]] = {name: [] for name in variables}
    rules: dict[str, list[str]] = {name: [] for name in variables}
    for size in dimensions:
        if len(found := names(size)) == 1:
            own[found[0]].append(size)
    for text in constraints:
        found = set(constrained_names(text))
        if len(found) == 1 and found <= set(own):
            rules[found.pop()].append(text)

    def fits(name: str, size: int) -> bool:
        chosen = {name: size}
        enough = all(value(each, chosen) >= (1 if each == name else 0) for each in own[name])
        return enough and all(holds(text, chosen) for text in rules[name])

    for name in variables:
        dependent = [size for size in outputs if names(size) == (name,)]

        def leaves_none(size: int, name: str = name, dependent: Sequence[str] = dependent) -> bool:
            return not _has_elements(dependent, {name: size})

        yield sorted((size for size in sizes if fits(name, size)), key=leaves_none)


def _mentioned_numbers(constraints: Iterable[str]) -> Iterator[int]:
    """Yields the numbers in constraints, and some near them."""
    for text in constraints:
        for digits in re.findall(r"\d{1,9}", text):
            number = int(digits)
            yield from (each for each in (number, number + 1, 2 * number) if each >= 1)


@functools.lru_cache(512)
def _parse_expression(size: Size) -> ast.expr:
    if isinstance(size, int):
        return ast.Constant(size)
    if len(size) > _LONGEST:
        raise _parse_error(size)
    # jax writes a power as ^, and its names may be words of Python, such as `class`.
    text = _NAME.sub(lambda name: f"_{name[0].encode().hex()}", size.strip().replace("^", "**"))
    try:
        parsed = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _parse_error(size) from error
    for node in ast.walk(parsed):
        if isinstance(node, ast.Name):
            node.id = bytes.fromhex(node.id[1:]).decode()
    return parsed


def _calculate_number(operation: str, left: int, right: int) -> int:
    found = NUMBERS[operation](left, right)
    if abs(found) >= _LARGEST:
        raise ValueError("a dimension is too large")
    return found


def _evaluate_node(node: Any, known: Mapping[str, Any], calculate: Calculate) -> Any:
    def inner(node: object) -> Any:
        return _evaluate_node(node, known, calculate)

    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            return known[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return calculate("neg", 0, inner(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as power)):
            if 0 <= power <= MOST_POWER:
                factors = [inner(left)] * power or [1]
                return functools.reduce(functools.partial(calculate, "mul"), factors)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return calculate(_OPERATORS[type(op)], inner(left), inner(right))
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]):
            if name in _FUNCTIONS:
                return calculate(name, inner(left), inner(right))
        case _:
            pass
    raise _parse_error(ast.unparse(node))


def _parse_error(text: Size) -> ValueError:
    return ValueError(f"neither a symbolic dimension nor a constraint: {str(text)[:100]!r}")


#: Strings in tests.
_WORDS = np.array([b"", b"a", b"the quick brown fox", "naïve 0.5 ✓".encode(), b"42"], object)


@dataclass(frozen=True)
class RandomInput:
    """The shape of an input, with text for symbolic sizes, and its dtype outside of jax."""

    shape: tuple[Size, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class RandomCall:
    sizes: dict[str, int]
    inputs: dict[str, np.ndarray]

    @property
    def label(self) -> str:
        """The sizes as text for messages; empty without sizes."""
        text = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return text and f"({text})"


def random_calls(
    inputs: Mapping[str, RandomInput],
    constraints: Sequence[str] = (),
    sizes: Sequence[Mapping[str, int]] | None = None,
    most: int | None = None,
    outputs: Sequence[Sequence[Size]] = (),
) -> Iterator[RandomCall]:
    """Calls at the given sizes or at sizes that `choose` returns.

    Raises:
        ValueError: an input has more than `most` elements.
    """
    if sizes is None:
        sizes = choose([each.shape for each in inputs.values()], constraints, outputs)
    random = np.random.default_rng(0)
    for chosen in sizes:
        counts = (math.prod(shape(each.shape, chosen)) for each in inputs.values())
        if most is not None and (count := sum(counts)) > most:
            raise ValueError(f"{count} elements are too many to try")
        arrays = {
            name: random_array(shape(each.shape, chosen), each.dtype, random)
            for name, each in inputs.items()
        }
        yield RandomCall(dict(chosen), arrays)


def random_array(shape: Sequence[int], dtype: np.dtype, random: np.random.Generator) -> np.ndarray:
    """Normal numbers, small integers, coin tosses, or words."""
    if dtype == STRING:
        return random.choice(_WORDS, shape)
    if dtype == np.bool_:
        return random.random(shape) < 0.5
    if dtype.kind == "c":
        return (random.normal(size=shape) + 1j * random.normal(size=shape)).astype(dtype)
    if is_integer(dtype):
        return random.integers(0, 4, shape).astype(dtype)
    return random.normal(size=shape).astype(dtype)


# --- dtypes by name ---

#: The dtype of text in numpy; jax has none, so it never reaches a model.
STRING = np.dtype(object)

_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


def numpy_dtype(name: str) -> np.dtype:
    """The dtype of a name in a manifest.

    Example:
        >>> numpy_dtype("bfloat16").itemsize, numpy_dtype("string").kind
        (2, 'O')
    """
    # It registers bfloat16 and others with numpy, as jax and TensorFlow do.
    importlib.import_module("ml_dtypes")
    return STRING if name == "string" else np.dtype(name)


def name_of(dtype: Any) -> str:
    """The inverse of `numpy_dtype`; TensorFlow uses the same names."""
    dtype = np.dtype(dtype)
    return "string" if dtype == STRING else dtype.name


def is_inexact(dtype: np.dtype) -> bool:
    """Whether these are real or complex numbers, the small ones among them.

    Example:
        >>> is_inexact(numpy_dtype("bfloat16")), is_inexact(numpy_dtype("int4"))
        (True, False)
    """
    return dtype.kind in "fc" or dtype.name.startswith(("float", "bfloat"))


def is_integer(dtype: np.dtype) -> bool:
    """Whether these are whole numbers, those of four bits among them."""
    return dtype.kind in "iu" or dtype.name.startswith(("int", "uint"))


def narrows(source: object, dtype: np.dtype) -> bool:
    """Whether jax makes this dtype of the given one, as it does with 64-bit numbers."""
    if not isinstance(source, np.dtype):
        return False  # typed keys
    jax: Any = sys.modules.get("jax")
    wide = jax is not None and jax.config.jax_enable_x64
    return (source.name if wide else _NARROW.get(source.name, source.name)) == dtype.name
