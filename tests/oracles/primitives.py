"""jax's own cases for its primitives: what becomes of each in a format.

`python -m tests.oracles.primitives onnx tflite saved_model --most 40` tries so many cases of each
group, spread over all that there are, and goes on where it was stopped; without `--most` all.
It prints how many are right, refused by name, wrong, raw errors and crashes, and what is not right.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.internal_test_util.test_harnesses import all_harnesses
from numpy.random import RandomState

from pax_export import export
from pax_export.errors import PaxError
from tests.closeness import assert_close

FORMATS = ("onnx", "tflite", "saved_model", "torch", "as_torch")
#: Two ways of writing differ in the last places, and a case sums up to some hundred numbers.
TOLERANCES = {"bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-10}
#: A case that takes longer is reported.
PATIENCE = 120


def _open(harness: Any) -> bool:
    """Whether jax's numbers are no measure: of a broken promise, or on CPUs of NaN in order."""
    beyond = "out_of_bounds" in harness.name and "PROMISE_IN_BOUNDS" in harness.name
    return beyond or harness.fullname.startswith("top_k_sort_inf_nan")


GROUPS = defaultdict(list)
for _harness in all_harnesses:
    if _harness.filter("cpu") and not _open(_harness):
        GROUPS[_harness.group_name].append(_harness)


def spread(cases: list[Any], most: int | None) -> list[Any]:
    """Some of them, from all over."""
    if most is None or most >= len(cases):
        return cases
    return [cases[number] for number in sorted({*np.linspace(0, len(cases) - 1, most).astype(int)})]


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


def in_parts(harness: Any) -> tuple[list[np.ndarray], Any]:
    """A case's arguments and function, with two real arrays in the place of each complex one."""
    given = [np.asarray(jnp.asarray(each)) for each in harness.dyn_args_maker(RandomState(0))]
    args = [part for each in given for part in _parts(each)]

    def function(*args: Any) -> Any:
        left = iter(args)
        whole = [
            jax.lax.complex(next(left), next(left)) if np.iscomplexobj(each) else next(left)
            for each in given
        ]
        return jax.tree.map(_parts, harness.dyn_fun(*whole))

    return args, function


def _parts(array: Any) -> tuple[Any, ...]:
    return (array.real, array.imag) if jnp.iscomplexobj(array) else (array,)


def export_and_run(format: str, function: Any, args: list[Any], path: Path) -> Any:
    """What a runtime gives for a function, exported for arrays like these."""
    specs = tuple(export.spec(each.shape, each.dtype) for each in args)
    model = ({}, lambda _, *given: function(*given))
    if format == "as_torch":  # in a fifth of the time of a file
        from pax_export.export.formats.torch.run import from_numpy, to_numpy

        found = export.as_torch(model, specs, validate=False)(*map(from_numpy, args))
        return jax.tree.map(to_numpy, found)
    write = getattr(export, f"to_{format}")
    write(model, path, specs, validate=False, card=False)
    return export.load(path)(*args)


def same(harness: Any, found: Any, expected: Any) -> None:
    """Fails unless two results are equal, but for what a primitive leaves open."""
    name = harness.group_name
    if name in _VECTORS:  # which may have other signs, or phases
        found, expected = (_sizes(each) for each in (found, expected))
    one, other = (list(map(np.asarray, jax.tree.leaves(each))) for each in (found, expected))
    assert len(one) == len(other)
    if name == "svd" and len(one) == 3:  # of rows and columns without a value, any will do
        one, other = map(_with_values, (one, other))
    if name == "approx_top_k" or "isstable_False" in harness.name:  # ties have no order
        count = harness.params.get("num_keys", 1)
        one, other = one[:count], other[:count]
    for mine, theirs in zip(one, other):
        assert mine.dtype == theirs.dtype
        if name == "cholesky":  # the other half holds anything
            mine, theirs = np.tril(mine), np.tril(theirs)
        rtol = TOLERANCES.get(str(theirs.dtype), 1e-4)
        if name == "tan":  # near a pole
            rtol *= 5
        assert_close(mine, theirs, rtol=rtol, atol=rtol / 10, where=name)


_VECTORS = ("svd", "eigh", "eig", "qr")


def _sizes(results: Any) -> list[Any]:
    """The absolute values of arrays, of which complex ones are pairs."""
    flat = jax.tree.leaves(results, is_leaf=_is_pair)
    return [np.hypot(*each) if _is_pair(each) else np.abs(each) for each in flat]


def _with_values(found: list[np.ndarray]) -> list[np.ndarray]:
    """Singular values, and the vectors that belong to one."""
    (values,) = (each for each in found if each.ndim == min(each.ndim for each in found))
    left, right = (each for each in found if each is not values)
    count = values.shape[-1]
    return [values, left[..., :count], right[..., :count, :]]


def _is_pair(value: Any) -> bool:
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    return pair and not isinstance(value[0], (tuple, list))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code is 1 if a case was wrong, raw or crashed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="+", choices=FORMATS)
    parser.add_argument("--most", type=int, help="of each group, spread over all that there are")
    parser.add_argument("--only", nargs="+", help="groups")
    parser.add_argument("--output", type=Path, help="a file of lines, to go on with")
    options = parser.parse_args(argv)
    output = options.output or Path(tempfile.mkdtemp()) / "primitives.jsonl"
    for format in options.formats:
        while left := _left(format, options, output):
            _run_process(format, left, output)
    return _summarize(options.formats, output)


def _left(format: str, options: argparse.Namespace, output: Path) -> list[Any]:
    """The cases of which nothing is written yet."""
    known = {each["case"] for each in _read(output) if each["format"] == format}
    groups = options.only or sorted(GROUPS)
    chosen = [each for group in groups for each in spread(GROUPS[group], options.most)]
    return [each for each in chosen if each.fullname not in known]


def _read(output: Path) -> list[dict[str, str]]:
    return list(map(json.loads, output.read_text().splitlines())) if output.exists() else []


def _run_process(format: str, cases: list[Any], output: Path) -> None:
    """Tries cases in a process of their own; one that ends or hangs it is written down."""
    before = len(_read(output))
    process = multiprocessing.get_context("spawn").Process(
        target=_try, args=(format, [each.fullname for each in cases], output)
    )
    process.start()
    seen, since = before, time.monotonic()
    while process.is_alive():
        process.join(5)
        if (now := len(_read(output))) != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE + 60 * (seen == before):
            process.kill()
            process.join()
    done = len(_read(output)) - before
    if done < len(cases):
        kind = "hangs" if process.exitcode == -9 else "crash"
        _write(output, format, cases[done].fullname, kind, f"exit code {process.exitcode}")


def _try(format: str, names: list[str], output: Path) -> None:
    jax.config.update("jax_enable_x64", False)
    by_name = {each.fullname: each for cases in GROUPS.values() for each in cases}
    for number, name in enumerate(names):
        place = Path(tempfile.mkdtemp())
        try:
            refused = outcome(format, by_name[name], place / f"case.{format}")
            kind, text = ("refused", refused) if refused else ("right", "")
        except AssertionError as error:
            kind, text = "wrong", str(error)
        except Exception as error:
            kind, text = "raw", f"{type(error).__name__}: {error}"
        shutil.rmtree(place)
        _write(output, format, name, kind, text)
        if number % 100 == 99:
            jax.clear_caches()


def _write(output: Path, format: str, name: str, kind: str, text: str) -> None:
    entry = {"format": format, "case": name, "outcome": kind, "text": text[:600]}
    with output.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def _summarize(formats: Sequence[str], output: Path) -> int:
    failed = 0
    for format in formats:
        found = [each for each in _read(output) if each["format"] == format]
        counts = Counter(each["outcome"] for each in found)
        print(f"{format}: {', '.join(f'{count} {kind}' for kind, count in counts.items())}")
        for each in found:
            if each["outcome"] not in ("right", "refused"):
                failed += 1
                print(f"  {each['outcome']}: {each['case']}: {each['text']}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
