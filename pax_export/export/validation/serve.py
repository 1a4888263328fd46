"""Runs an export with its runtime and numpy, without jax, in a process of its own.

    python serve.py FILE.py:FUNCTION PATH CASES.npz RESULTS.npz all|each|once IMPORT ...

FUNCTION runs the calls, see `pax_export.export.artifact.formats`; `prepare_process` of FILE.py, if
it is there, gets the path before. A case has a ``signature``, ``inputs`` by name, and optional
``cotangents`` by output. Results are outputs by name, changed variables as ``variable:NAME`` and
gradients as ``gradient:NAME``. Arrays of dtypes that numpy lacks are stored as bytes.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Cases = Sequence[Mapping[str, Any]]
#: The function that runs the calls of an export at a path.
Run = Callable[[str, Any], list[Arrays]]

#: Packages that such a process cannot import, except those its format needs.  A server has no
#: Keras either, which TensorFlow would import unasked, in a third of the time that it takes.
BARRED = ("jax", "jaxlib", "keras", "tf_keras", "pax_export")


def save(file: str | os.PathLike[str], arrays: Sequence[Mapping[str, Arrays | str]]) -> None:
    """Writes a list of groups of arrays, of any dtype, to one npz file."""
    flat: dict[str, Any] = {}

    def place(value: object) -> list[Any]:
        value = np.asarray(value)
        if value.dtype == object:
            return [[text.hex() for text in value.ravel().tolist()], "text", list(value.shape)]
        key = str(len(flat))
        flat[key] = np.frombuffer(value.tobytes(), np.uint8)
        return [key, value.dtype.name, list(value.shape)]

    index = _each_array(arrays, place)
    np.savez(file, index=np.frombuffer(json.dumps(index).encode(), np.uint8), **flat)


def load(file: str | os.PathLike[str]) -> list[dict[str, Any]]:
    dtypes = importlib.import_module("ml_dtypes")  # numpy's dtypes are built in
    with np.load(file) as stored:

        def array(key: str | list[str], dtype: str, shape: list[int]) -> np.ndarray:
            if dtype == "text":
                return np.array(list(map(bytes.fromhex, key)), object).reshape(shape)
            kind = np.dtype(getattr(dtypes, dtype, dtype))
            return np.frombuffer(stored[key].tobytes(), kind).reshape(shape)

        return _each_array(json.loads(stored["index"].tobytes()), lambda entry: array(*entry))


def _each_array(entries: Sequence[Mapping[str, Any]], do: Callable) -> list[dict[str, Any]]:
    """The entries, with something else instead of each array; texts stay."""

    def members(group: str | Mapping[str, Any]) -> str | dict[str, Any]:
        return group if isinstance(group, str) else {name: do(x) for name, x in group.items()}

    return [{key: members(group) for key, group in entry.items()} for entry in entries]


def run_each(run: Run, path: str, cases: Cases) -> list[dict[str, Arrays | str]]:
    """Runs calls, and continues after failures: with ``error`` instead of ``results``."""
    found = run_once(run, path, cases)
    if len(cases) < 2 or "results" in found[0]:
        return found
    return [each for case in cases for each in run_each(run, path, [case])]


def run_once(run: Run, path: str, cases: Cases) -> list[dict[str, Arrays | str]]:
    """Runs calls up to the first failure, which is then the only result, as ``error``."""
    try:
        return [{"results": each} for each in run(path, cases)]
    except Exception as error:  # of any runtime; hides nothing, for the result is its text
        return [{"error": f"{type(error).__name__}: {error}"}]


def main(reference: str, path: str, cases: str, results: str, mode: str, *imports: str) -> None:
    for name in BARRED:
        if name.removesuffix("lib") not in imports:
            sys.modules[name] = None  # type: ignore[assignment]  # importing it fails now
    run = _load_function(reference)
    getattr(sys.modules[run.__module__], "prepare_process", str)(path)
    calls = load(cases)
    if mode == "all":
        save(results, [{"results": each} for each in run(path, calls)])
    else:
        save(results, {"each": run_each, "once": run_once}[mode](run, path, calls))


def _load_function(reference: str) -> Run:
    """The function at ``FILE.py:FUNCTION``; the file is loaded by its path."""
    file, _, name = reference.rpartition(":")
    spec: Any = importlib.util.spec_from_file_location("runtime_of_the_format", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


if __name__ == "__main__":
    main(*sys.argv[1:])
