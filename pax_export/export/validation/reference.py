"""The model that was exported, beside its export, for tests of exports that lie there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pax_export._errors import InvalidArgumentError, PaxError
from pax_export.export.artifact.random_calls import RandomCall
from pax_export.export.artifact.report import Report, SignatureInfo
from pax_export.export.artifact.structure import collect, rebuild
from pax_export.export.tracing import dtypes
from pax_export.export.tracing.exportable import DEFAULT, Exportable, Method, exportable
from pax_export.export.validation.compare import Case, compare
from pax_export.export.validation.serve import Arrays


class ReferenceModel:
    """The model that was exported, as jax runs it."""

    def __init__(self, model: Any, report: Report, names: Mapping[str, str]):
        chosen = {key: names.get(key, self._name(model, key)) for key in report.signatures}
        self._exportable: Exportable = exportable(model, chosen)
        self._methods: dict[str, Method] = {each.key: each for each in self._exportable.methods}

    @staticmethod
    def _name(model: Any, key: str) -> str:
        has_it = key != DEFAULT and callable(getattr(type(model), key, None))
        return key if has_it else "__call__"

    def differences(
        self, key: str, call: RandomCall, info: SignatureInfo, got: Arrays
    ) -> dict[str, float]:
        """How far the results are from the model's, by name."""
        arguments = {
            name: rebuild(tree, call.inputs.__getitem__) for name, tree in info.arguments.items()
        }
        args = tuple(arguments.pop(name) for name in info.positional)
        values = [leaf.value for leaf in self._exportable.leaves]
        expected: dict[str, Any] = {}
        try:
            output, _ = self._exportable.run(self._methods[key], values, args, arguments)
            collect(info.result, output, expected, "the result")
            arrays = {name: np.asarray(dtypes.store(value)) for name, value in expected.items()}
        except (PaxError, TypeError, ValueError, KeyError) as error:
            raise InvalidArgumentError(
                "The model to compare with cannot be called as the export can.",
                where=key,
                got=f"{type(error).__name__}: {error}",
                write="the factory that made the exported model; --method KEY=NAME names a method",
            ) from error
        values_got = {entry.name: got[entry.name] for entry in info.outputs}
        return compare(Case(key, call.inputs, arrays, label=call.label), values_got)
