"""Where runtimes differ from jax: operations swept over numbers of every size and kind.

``python -m tests.export.sweep_differences`` sweeps them with the runtimes that are installed, and
writes what it finds into `pax_export/export/artifact/known_differences.py`, from where reports
take it, and into the table of docs/guide/targets.md.  `test_known_differences.py` sweeps again.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pax_export.export import load, spec, to_onnx, to_tflite
from pax_export.export.artifact import known_differences
from pax_export.export.artifact.known_differences import SIGNS, TINY, KnownDifference
from pax_export.export.pipeline import sweep
from pax_export.export.portable import kept

RUNTIMES: dict[str, Callable] = {"LiteRT": to_tflite, "onnxruntime": to_onnx}
_INFO = np.finfo(np.float32)

UNARY = (
    "abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf "
    "erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign "
    "sin sinh sqrt square tan tanh"
)
BINARY = "add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub"
OF_INTEGERS = {
    1: "abs neg bitwise_not sign population_count clz",
    2: "add sub mul div rem max min bitwise_and bitwise_or",
}
INTEGERS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")


@dataclass(frozen=True)
class Function:
    """What is swept: a function of one or two arrays, element by element."""

    name: str
    function: Callable[..., Any]
    operands: tuple[np.dtype, ...]

    def __call__(self, given: Sequence[Any]) -> Any:
        return self.function(*given)


def beside(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of rows, given each number beside usual ones; one of what it makes."""

    def apply(x: Any) -> Any:
        made = function(jnp.stack([x, *(jnp.full_like(x, each) for each in (1, -2, 0.5))], -1))
        return made.reshape(len(x), -1)[:, :2][:, -1]

    return apply


def pooled(*shape: int) -> Callable[..., Any]:
    window = tuple(2 if size == 2 else 1 for size in shape)

    def apply(rows: Any) -> Any:
        image = rows.reshape(-1, *shape)
        return lax.reduce_window(image, -jnp.inf, lax.max, (1, *window), (1,) * 4, "VALID")

    return apply


def of_rows() -> dict[str, Callable[..., Any]]:
    matrix = np.float32([[1, 2], [3, -4], [0.5, 1], [1.5, -1]])
    image = np.float32([[1, 2], [3, -4]]).reshape(1, 1, 2, 2)
    return {
        "reduce_max": lambda x: x.max(-1),
        "reduce_min": lambda x: x.min(-1),
        "reduce_sum": lambda x: x.sum(-1),
        "reduce_prod": lambda x: x.prod(-1),
        "argmax": lambda x: jnp.argmax(x, -1),
        "argmin": lambda x: jnp.argmin(x, -1),
        "cumsum": lambda x: lax.cumsum(x, 1)[:, ::-1],
        "cummax": lambda x: lax.cummax(x, 1)[:, ::-1],
        "sort": lambda x: jnp.sort(x, -1),
        "dot_general": lambda x: x @ matrix,
        "conv_general_dilated": lambda x: lax.conv_general_dilated(
            x.reshape(-1, 1, 2, 2), image, (1, 1), "VALID"
        ),
        "reduce_window_max": pooled(2, 2, 1),
        "reduce_window_max (NCHW)": pooled(1, 2, 2),
        "softmax": partial(kept.FUNCTIONS["softmax"], axis=-1),
        "log_softmax": partial(kept.FUNCTIONS["log_softmax"], axis=-1),
        "mean": partial(kept.FUNCTIONS["mean"], axes=(1,), keepdims=False),
        "layer_norm": partial(
            kept.FUNCTIONS["layer_norm"], epsilon=1e-5, scaled=False, shifted=False
        ),
    }


def functions() -> list[Function]:
    """All of them; the rows of a table have their names."""
    single = np.dtype(np.float32)
    made = [Function(name, getattr(lax, name), (single,)) for name in UNARY.split()]
    made += [Function(name, getattr(lax, name), (single, single)) for name in BINARY.split()]
    one: dict[str, Callable[..., Any]] = {
        "integer_pow": lambda x: lax.integer_pow(x, 3),
        "clip": jax.nn.relu,
        "clamp": lambda x: lax.clamp(jnp.float32(-2), x, jnp.float32(5e9)),
        "silu": jax.nn.silu,
        "hard_sigmoid": jax.nn.hard_sigmoid,
        "hard_swish": jax.nn.hard_swish,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "select_n": lambda x: jnp.where(x > -1, x, 3 * x),
    }
    one |= {name: beside(function) for name, function in of_rows().items()}
    for name in (*INTEGERS, "bool", "float16", "bfloat16"):
        one[f"convert_element_type to {name}"] = lambda x, name=name: x.astype(name)
    made += [Function(name, function, (single,)) for name, function in one.items()]
    for dtype in map(np.dtype, INTEGERS):
        for count, names in OF_INTEGERS.items():
            made += [
                Function(f"{name} of {dtype}", getattr(lax, name), (dtype,) * count)
                for name in names.split()
                if not (dtype.kind == "u" and name in ("neg", "abs"))
            ]
    return made


def values(function: Function) -> list[np.ndarray]:
    """The numbers of a sweep, with zeros of both signs and numbers too small to be normal."""
    if function.operands[0].kind in "iu":
        return sweep.operand_grid(function)
    below = np.float32([1e-45, 1e-42, 1e-39, 1.1e-38])
    small = np.float32([*-below, -0.0, 0.0, *below])
    if len(function.operands) == 1:
        (grid,) = sweep.operand_grid(function)
        # Beyond some hundred windows jax on a CPU passes over NaN itself.
        grid = grid[-64:] if function.name.startswith("reduce_window") else grid
        return [np.concatenate([grid, small])]
    ends = [-np.inf, np.inf, np.nan, _INFO.max, -_INFO.max, _INFO.tiny, -_INFO.tiny]
    usual = [s * x for s in (1, -1) for x in (1e-30, 1e-10, 0.5, 1, 2, 2.5, 3, 1e3, 1e10, 1e30)]
    pairs = np.meshgrid(*[np.float32([*ends, *usual, *small])] * 2)
    return [each.ravel() for each in pairs]


def measured(runtime: str, exact: bool = False, fine: bool = False) -> list[KnownDifference]:
    """What a sweep of a runtime finds; ``fine`` looks again where each difference begins."""
    run = _runner(runtime, exact)
    todo = functions()
    found = sweep.sweep(todo, [values(each) for each in todo], run, 1.0)
    if missing := {each.name for each in todo} - {each.operation.name for each in found}:
        print(f"{runtime} does not export {', '.join(sorted(missing))}")
    begins = {id(each): _around(each) for each in found} if fine else {}
    again = [each for each in found if begins.get(id(each)) is not None]
    near = sweep.sweep([e.operation for e in again], [[begins[id(e)]] for e in again], run, 1.0)
    finer = {each.operation.name: each for each in near}
    return [row for each in found for row in _rows(runtime, each, finer.get(each.operation.name))]


def _runner(runtime: str, exact: bool) -> sweep.Runner:
    def run(model: Any, program: Any, arrays: Any) -> Any:
        def function(_: Any, *given: Any) -> Any:
            return program.traced.function(list(given))

        specs = tuple(spec(each.shape, each.dtype) for each in arrays.values())
        options = {"validate": False, "card": False, "exact": exact}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "swept")
            RUNTIMES[runtime](({}, function), path, specs, **options)
            found = load(path)(*arrays.values())
        return dict(zip(program.output_names, found))

    return run


def _around(found: sweep.DifferingElements) -> np.ndarray | None:
    """Numbers between the last that agrees and the first that differs, for each sign."""
    (given, *others), made = found.given, []
    if others or given.dtype.kind != "f":
        return None
    differs = found.differs & (np.abs(given) >= _INFO.tiny) & np.isfinite(given)
    for sign in (1, -1):
        bad = sign * given[differs & (sign * given > 0)]
        good = sign * given[~found.differs & (sign * given > 0)]
        if bad.size and (good < bad.min()).any():
            made.append(sign * np.linspace(good[good < bad.min()].max(), bad.min(), 4096))
    return np.concatenate(made).astype(given.dtype) if made else None


def _rows(
    runtime: str, found: sweep.DifferingElements, finer: sweep.DifferingElements | None
) -> Iterator[KnownDifference]:
    """The rows of an operation: what differs as such, in signs of zero, for the tiniest."""
    given, differs = found.given, found.differs
    floating = given[0].dtype.kind == "f"
    zero = np.any([each == 0 for each in given], axis=0) & floating
    tiny = np.any([(each != 0) & (np.abs(each) < _INFO.tiny) for each in given], axis=0) & floating
    kinds = {TINY: differs & tiny, SIGNS: (differs & zero | _other_sign(found)) & ~tiny}
    rest = differs & ~tiny & ~zero
    if rest.any():
        fine = [finer] * (finer is not None)
        places = [
            np.concatenate([x, *(each.given[at] for each in fine)]) for at, x in enumerate(given)
        ]
        where = sweep.where_differs(
            places, np.concatenate([rest, *(each.differs for each in fine)])
        )
        yield KnownDifference(runtime, found.operation.name, where, _example(found, rest))
    for where, wrong in kinds.items():
        if wrong.any():
            yield KnownDifference(runtime, found.operation.name, where, _example(found, wrong))


def _other_sign(found: sweep.DifferingElements) -> np.ndarray:
    one, other = found.expected, found.got
    if one.dtype.name != "float32":
        return np.zeros(one.shape, bool)
    return (one == 0) & (other == 0) & (np.signbit(one) != np.signbit(other))


def _example(found: sweep.DifferingElements, wrong: np.ndarray) -> str:
    """``exp(88.5) = inf, in jax 2.72e+38``: one of the usual size, if any is."""
    places = np.flatnonzero(wrong)
    size = np.abs(found.given[0][places].astype(np.float64))
    finite = places[np.isfinite(size)]
    place = (
        finite[np.argsort(size[np.isfinite(size)])[len(finite) // 2]] if len(finite) else places[0]
    )
    operands = ", ".join(f"{each[place]:.3g}" for each in found.given)
    got, expected = (f"{each[place]:.3g}" for each in (found.got, found.expected))
    if got == expected:
        got, expected = (f"{each[place]:.7g}" for each in (found.got, found.expected))
    return f"{found.operation.name.split(' ')[0]}({operands}) = {got}, in jax {expected}"


def all_measured(runtime: str, fine: bool = False) -> list[KnownDifference]:
    """The rows of a runtime, with those that an exact export has not marked."""
    exact = {(each.operation, each.where) for each in measured(runtime, True, fine)}
    return [
        dataclasses.replace(each, exact=(each.operation, each.where) in exact)
        for each in measured(runtime, False, fine)
    ]


def write(differences: Sequence[KnownDifference]) -> None:
    """Writes rows where they are kept, and the guide's table of them."""
    _replace(
        Path(known_differences.__file__),
        '_ROWS = """\\\n',
        '"""\n',
        (each.line for each in differences),
    )
    _replace(GUIDE, HEADING, "\n", table(differences))


#: The page with the table, and how that begins.
GUIDE = Path(__file__).parents[2] / "docs/guide/targets.md"
HEADING = "| runtime | operation | where | for example |\n|---|---|---|---|\n"


def _replace(path: Path, before: str, behind: str, rows: Iterable[str]) -> None:
    """Writes other lines between those before and the first line that is `behind`."""
    head, found, rest = path.read_text().partition(before)
    if not found:
        raise ValueError(f"{path} has no {before!r}")
    lines = rest.splitlines(keepends=True)
    made = "".join(f"{row}\n" for row in rows)
    path.write_text(f"{head}{before}{made}{''.join(lines[lines.index(behind) :])}")


def table(differences: Sequence[KnownDifference]) -> list[str]:
    """Rows of markdown; what many operations have in common is one for each runtime."""
    made = []
    for runtime in RUNTIMES:
        mine = [each for each in differences if each.runtime == runtime]
        for each in mine:
            if each.where not in (SIGNS, TINY):
                guarded = "" if each.exact else ", unless `exact=True`"
                made.append(
                    f"| {runtime} | {each.operation} | {each.where}{guarded} | `{each.example}` |"
                )
        for kind in (SIGNS, TINY):
            those = [each for each in mine if each.where == kind]
            names = ", ".join(each.operation for each in those)
            made.append(f"| {runtime} | {names} | {kind} | `{those[0].example}` |")
    return made


if __name__ == "__main__":
    write([row for runtime in RUNTIMES for row in all_measured(runtime, fine=True)])
