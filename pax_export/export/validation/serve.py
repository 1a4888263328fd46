"""Runs an export as a server does: with its runtime and numpy, without jax.

This file is a program of its own, for a fresh process that can import neither
jax nor this package:

    python serve.py FILE.py:FUNCTION PATH CASES.npz RESULTS.npz all|each IMPORT ...

The function makes the calls, see `pax_export.export.artifact.formats`.  A case is one
call of one signature: ``signature``, ``inputs`` (arrays by name), and perhaps
``cotangents`` (arrays by the name of an output), for which gradients are wanted.
Its result are the outputs by name; the variables that it changed, as
``variable:NAME``; and gradients, as ``gradient:NAME`` of an input or a trainable
variable.  Arrays stand in files as they are; those of dtypes that numpy does not
know, as their bytes.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Cases = Sequence[Mapping[str, Any]]
#: What makes the calls of an export at a path.
Run = Callable[[str, Cases], list[Arrays]]

#: What such a process cannot import, but for what its format needs of it.
BARRED = ("jax", "jaxlib", "pax_export")


def save(file: Any, arrays: Sequence[Mapping[str, Arrays | str]]) -> None:
    """Writes a list of groups of arrays, of any dtype, to one npz file."""
    index, flat = [], {}
    for groups in arrays:
        entry: dict[str, Any] = {}
        for group, members in groups.items():
            if isinstance(members, str):
                entry[group] = members
                continue
            entry[group] = {}
            for name, value in members.items():
                key = str(len(flat))
                value = np.asarray(value)
                if value.dtype == object:  # text
                    texts = [text.hex() for text in value.ravel().tolist()]
                    entry[group][name] = [texts, "text", list(value.shape)]
                    continue
                flat[key] = np.frombuffer(value.tobytes(), np.uint8)
                entry[group][name] = [key, value.dtype.name, list(value.shape)]
        index.append(entry)
    np.savez(file, index=np.frombuffer(json.dumps(index).encode(), np.uint8), **flat)


def load(file: Any) -> list[dict[str, Any]]:
    """Reads what `save` wrote."""
    dtypes = importlib.import_module("ml_dtypes")  # numpy's names are its own
    with np.load(file) as stored:

        def array(key: Any, dtype: str, shape: list[int]) -> np.ndarray:
            if dtype == "text":
                return np.array(list(map(bytes.fromhex, key)), object).reshape(shape)
            kind = np.dtype(getattr(dtypes, dtype, dtype))
            return np.frombuffer(stored[key].tobytes(), kind).reshape(shape)

        return [
            {
                group: members
                if isinstance(members, str)
                else {name: array(*place) for name, place in members.items()}
                for group, members in entry.items()
            }
            for entry in json.loads(stored["index"].tobytes())
        ]


def run_each(run: Run, path: str, cases: Cases) -> list[dict[str, Arrays | str]]:
    """Makes calls, and goes on where one fails: with ``error`` in the place of ``results``."""
    try:
        return [{"results": each} for each in run(path, cases)]
    except Exception as error:  # of any runtime, for any reason
        if len(cases) == 1:
            return [{"error": f"{type(error).__name__}: {error}"}]
    return [each for case in cases for each in run_each(run, path, [case])]


def main(place: str, path: str, cases: str, results: str, mode: str, *imports: str) -> None:
    """Makes the calls in one file, and writes their results to another."""
    for name in BARRED:
        if name.removesuffix("lib") not in imports:
            sys.modules[name] = None  # type: ignore[assignment]  # importing it fails now
    run = _function(place)
    calls = load(cases)
    if mode == "each":
        save(results, run_each(run, path, calls))
    else:
        save(results, [{"results": each} for each in run(path, calls)])


def _function(place: str) -> Run:
    """The function at ``FILE.py:FUNCTION``; the file is loaded by its path."""
    file, _, name = place.rpartition(":")
    spec: Any = importlib.util.spec_from_file_location("runtime_of_the_format", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


if __name__ == "__main__":
    main(*sys.argv[1:])
