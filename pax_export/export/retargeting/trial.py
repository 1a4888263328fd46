"""Runs a mended SavedModel beside the one that it was made from.

Nobody tells what its symbolic sizes may be, and the installed TensorFlow often
cannot run the old one: so sizes are tried, and where there is nothing to
compare with, it is at least run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._errors import ValidationError
from pax_export._optional import require
from pax_export.export.artifact.dimensions import RandomInput, random_calls
from pax_export.export.artifact.formats import SAVED_MODEL
from pax_export.export.formats.saved_model.run import FAILED
from pax_export.export.validation.validate import Case, call, compare

#: Sizes of all dimensions that a signature leaves open; the later ones are for
#: signatures that do not take both of the first.
_SIZES, _OTHER_SIZES = (2, 5), (1, 4, 8, 16, 32, 128)
#: Calls that fail stop no others, and nobody told what the model holds.
ANY = dataclasses.replace(
    SAVED_MODEL, run="pax_export.export.formats.saved_model.run:run_any", has_variables=False
)
_INITIALIZER = "__saved_model_init_op"
_OPEN = "open"


class Trial:
    """What came of running the signatures, `old` beside `new`."""

    def __init__(self, model: Any, separate: bool):
        self._signatures = _signatures(model)
        self._separate = separate
        self.compared: dict[str, str] = {}
        self.largest_error: dict[str, float] = {}

    def run(self, old: Path, new: Path) -> None:
        """Makes the calls."""
        tried = self._both(old, new, list(self._signatures), _SIZES)
        stopped = {each[0].signature for each in tried if FAILED in each[2]}
        tried += self._both(old, new, stopped, _OTHER_SIZES) if stopped else []
        for key, inputs in self._signatures.items():
            if inputs is None:
                self.compared[key] = "not run: no random input can be made for it"
            else:
                self._judge(key, [each for each in tried if each[0].signature == key])

    def _both(
        self, old: Path, new: Path, keys: Iterable[str], sizes: Sequence[int]
    ) -> list[tuple[Case, Any, Any]]:
        """Calls of these signatures, with the results of either model."""
        cases = [case for key in sorted(keys) for case in _cases(key, self._signatures[key], sizes)]
        results = (call(ANY, place, cases, self._separate) for place in (old, new))
        return list(zip(cases, *results))

    def _judge(self, key: str, tried: list[tuple[Case, Any, Any]]) -> None:
        ran = [each for each in tried if FAILED not in each[2]][: len(_SIZES)]
        lost = [each for each in tried if FAILED in each[2] and FAILED not in each[1]]
        if lost or not ran:
            failed = (lost or tried)[0][2][FAILED]
            raise ValidationError(
                "The mended model cannot be called.",
                where=f"{key} {(lost or tried)[0][0].label}",
                got=failed.tobytes().decode(errors="replace")[-1500:],
            )
        comparable = [each for each in ran if FAILED not in each[1]]
        for case, before, after in comparable:
            case.expected = dict(before)
            for name, difference in compare(case, after).items():
                name = f"{key}: {name}"
                self.largest_error[name] = max(difference, self.largest_error.get(name, 0.0))
        self.compared[key] = (
            "compared with the old one"
            if comparable
            else "run; the installed TensorFlow cannot run the old one"
        )


def _signatures(model: Any) -> dict[str, dict[str, RandomInput] | None]:
    """The inputs of each signature; None where one is no array."""
    tf = require("tensorflow", "tensorflow", "retarget")
    return {
        key: _inputs(tf, signature.inputs)
        for graph in model.meta_graphs
        for key, signature in sorted(graph.signature_def.items())
        if key != _INITIALIZER
    }


def _inputs(tf: Any, inputs: Mapping[str, Any]) -> dict[str, RandomInput] | None:
    found = {}
    for name, info in inputs.items():
        try:
            dtype = np.dtype(tf.as_dtype(info.dtype).as_numpy_dtype)
        except TypeError:
            return None
        if info.tensor_shape.unknown_rank or dtype == np.dtype(object):
            return None
        sizes = (dimension.size for dimension in info.tensor_shape.dim)
        found[name] = RandomInput(tuple(_OPEN if size < 0 else size for size in sizes), dtype)
    return found


def _cases(key: str, inputs: Mapping[str, RandomInput] | None, tried: Sequence[int]) -> list[Case]:
    if inputs is None:
        return []
    is_open = any(_OPEN in each.shape for each in inputs.values())
    sizes = [{_OPEN: size} for size in (tried if is_open else tried[:1])]
    return [
        Case(
            key,
            each.inputs,
            {},
            label=f"({each.sizes[_OPEN]} for every open size)" if is_open else "",
        )
        for each in random_calls(inputs, sizes=sizes)
    ]
