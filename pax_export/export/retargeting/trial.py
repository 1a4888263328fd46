"""Runs a mended SavedModel beside the one that it was made from.

Nobody tells what its symbolic sizes may be, and the installed TensorFlow often
cannot run the old one: so sizes are tried, and where there is nothing to
compare with, it is at least run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pax_export._errors import ValidationError
from pax_export._optional import require
from pax_export.export.validation import serve, validate

#: Sizes of all dimensions that a signature leaves open; the later ones are for
#: signatures that do not take both of the first.
_SIZES, _OTHER_SIZES = (2, 5), (1, 4, 8, 16, 32, 128)
_INITIALIZER = "__saved_model_init_op"


class Trial:
    """What came of running the signatures, `old` beside `new`."""

    def __init__(self, model: Any, separate: bool):
        self._signatures = _signatures(model)
        self._separate = separate
        self.compared: dict[str, str] = {}
        self.largest_error: dict[str, float] = {}

    def run(self, old: Path, new: Path) -> None:
        """Makes the calls.

        Raises:
            ValidationError: a signature cannot be called, or gives other results.
        """
        tried = self._both(old, new, list(self._signatures), _SIZES)
        stopped = {each[0].signature for each in tried if serve.FAILED in each[2]}
        tried += self._both(old, new, stopped, _OTHER_SIZES) if stopped else []
        for key, inputs in self._signatures.items():
            if inputs is None:
                self.compared[key] = "not run: no random input can be made for it"
            else:
                self._judge(key, [each for each in tried if each[0].signature == key])

    def _both(
        self, old: Path, new: Path, keys: Iterable[str], sizes: Sequence[int]
    ) -> list[tuple[validate.Case, Any, Any]]:
        """Calls of these signatures, with the results of either model."""
        cases = [case for key in sorted(keys) for case in _cases(key, self._signatures[key], sizes)]
        results = (
            validate.call("any_saved_model", place, cases, self._separate) for place in (old, new)
        )
        return list(zip(cases, *results))

    def _judge(self, key: str, tried: list[tuple[validate.Case, Any, Any]]) -> None:
        ran = [each for each in tried if serve.FAILED not in each[2]][: len(_SIZES)]
        lost = [each for each in tried if serve.FAILED in each[2] and serve.FAILED not in each[1]]
        if lost or not ran:
            failed = (lost or tried)[0][2][serve.FAILED]
            raise ValidationError(
                "The mended model cannot be called.",
                where=f"{key} {(lost or tried)[0][0].label}",
                got=failed.tobytes().decode(errors="replace")[-1500:],
            )
        comparable = [each for each in ran if serve.FAILED not in each[1]]
        for case, before, after in comparable:
            case.expected = dict(before)
            for name, difference in validate.compare(case, after).items():
                name = f"{key}: {name}"
                self.largest_error[name] = max(difference, self.largest_error.get(name, 0.0))
        self.compared[key] = (
            "compared with the old one"
            if comparable
            else "run; the installed TensorFlow cannot run the old one"
        )


def _signatures(model: Any) -> dict[str, dict[str, tuple[Any, list[int]]] | None]:
    """The inputs of each signature, as dtype and sizes; None where one is no array."""
    tf = require("tensorflow", "tensorflow", "retarget")
    return {
        key: _inputs(tf, signature.inputs)
        for graph in model.meta_graphs
        for key, signature in sorted(graph.signature_def.items())
        if key != _INITIALIZER
    }


def _inputs(tf: Any, inputs: Mapping[str, Any]) -> dict[str, tuple[Any, list[int]]] | None:
    found = {}
    for name, info in inputs.items():
        try:
            dtype = np.dtype(tf.as_dtype(info.dtype).as_numpy_dtype)
        except TypeError:
            return None
        if info.tensor_shape.unknown_rank or dtype == np.dtype(object):
            return None
        found[name] = dtype, [dimension.size for dimension in info.tensor_shape.dim]
    return found


def _cases(
    key: str, inputs: Mapping[str, tuple[Any, list[int]]] | None, tried: Sequence[int]
) -> list[validate.Case]:
    if inputs is None:
        return []
    is_open = any(size < 0 for _, shape in inputs.values() for size in shape)
    random = np.random.default_rng(0)
    cases = []
    for chosen in tried if is_open else tried[:1]:
        arrays = {}
        for name, (dtype, shape) in inputs.items():
            sizes = tuple(chosen if size < 0 else size for size in shape)
            struct = jax.ShapeDtypeStruct(sizes, dtype)
            arrays[name] = validate.random_array(struct, {}, random)
        label = f"({chosen} for every open size)" if is_open else ""
        cases.append(validate.Case(key, arrays, {}, label=label))
    return cases
