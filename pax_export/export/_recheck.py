"""Tests an export that lies there: does it still run, and as its report says?

The calls are made in a fresh process without jax, at several sizes.  What
comes out must have the names, shapes and dtypes of the report, and be finite;
given the model, it must be what the model computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export as jax_export

from pax_export._errors import InvalidArgumentError, PaxError, ValidationError
from pax_export.export import _dtypes, _manifest, _served, _validate
from pax_export.export._exportable import DEFAULT, Exportable, Method, exportable
from pax_export.export._manifest import ArrayInfo, Report, SignatureInfo
from pax_export.export._structure import collect, rebuild

#: Sizes of all symbolic dimensions to try where the usual ones are refused.
_LARGER = (4, 8, 16, 20, 32, 64, 128, 256, 512)
#: How a runtime refuses a size that the constraints of an export forbid.
_REFUSED = re.compile("polymorphic shapes|dimension variable")


@dataclass(frozen=True)
class Check:
    """One call of one signature."""

    signature: str
    sizes: dict[str, int]
    problem: str = ""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    largest_error: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        text = f"{self.signature} ({sizes})" if sizes else self.signature
        if self.problem:
            return f"{text}: FAILED: {' '.join(self.problem.split())}"
        parts = []
        for name, shape in self.shapes.items():
            error = self.largest_error.get(name)
            parts.append(
                f"{name} {list(shape)}" + ("" if error is None else f" off by {error:.1e}")
            )
        return f"{text}: ok, {', '.join(parts)}"


def recheck(
    path: Path,
    model: Any = None,
    methods: Mapping[str, str] | None = None,
    finite: bool = True,
) -> list[Check]:
    """Tests every signature of an export at several sizes.

    Args:
        path: of the export.
        model: what it was made of, to compare with; None compares with nothing.
        methods: the name of the method of each signature, where it is not that
            of the signature (or ``__call__`` for the default one).
        finite: whether NaN and infinity are failures.

    Raises:
        ExportPathError: there is no export, or its report cannot be read.
        InvalidArgumentError: the model is not the one that was exported.
        ValidationError: the export cannot be loaded at all.
    """
    report = _manifest.read(path)
    if report.target not in _served.RUNTIMES:
        raise InvalidArgumentError(
            "Exports for this target cannot be tested again.", where=str(path), got=report.target
        )
    compared = _Model(model, report, methods or {}) if model is not None else None
    usual = {key: list(_calls(key, info, _usual)) for key, info in report.signatures.items()}
    checks = _make(report, path, usual, compared, finite)
    # Sizes that constraints forbid are no failures, if there are others.
    refused = {key for key in usual if not any(each.signature == key for each in checks)}
    if refused:
        larger = {key: list(_calls(key, report.signatures[key], _larger)) for key in refused}
        checks += _make(report, path, larger, compared, finite)
        taken = {check.signature for check in checks}
        checks += [Check(key, {}, "no size was found that it takes") for key in refused - taken]
    return checks


@dataclass(frozen=True)
class _Call:
    signature: str
    sizes: dict[str, int]
    inputs: dict[str, np.ndarray]
    outputs: dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape


def _usual(dimensions: Sequence[str]) -> list[dict[str, int]]:
    steps = len(_validate.SIZES)
    sizes = [
        {name: _validate.SIZES[(start + i) % steps] for i, name in enumerate(dimensions)}
        for start in range(steps)
    ]
    return sizes if dimensions else [{}]


def _larger(dimensions: Sequence[str]) -> list[dict[str, int]]:
    return [dict.fromkeys(dimensions, size) for size in _LARGER] if dimensions else []


def _calls(
    key: str, info: SignatureInfo, sizes: Callable[[Sequence[str]], list[dict[str, int]]]
) -> Iterator[_Call]:
    structs = _structs(info.inputs + info.outputs)
    dimensions = sorted({name for struct in structs for name in _names(struct)})
    for chosen in sizes(dimensions):
        yield _call(key, info, structs, chosen)


def _structs(entries: Sequence[ArrayInfo]) -> list[jax.ShapeDtypeStruct]:
    scope = jax_export.SymbolicScope()
    try:
        return [
            jax.ShapeDtypeStruct(
                jax_export.symbolic_shape(", ".join(map(str, entry.shape)), scope=scope),
                _dtypes.numpy_dtype(entry.dtype),
            )
            for entry in entries
        ]
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            "This signature takes or gives what no random array can stand for.",
            got=", ".join(map(str, entries)),
        ) from error


def _names(struct: jax.ShapeDtypeStruct) -> Iterator[str]:
    for size in struct.shape:
        if not isinstance(size, int):
            yield from _dtypes.dimension_names(size)


def _call(
    key: str, info: SignatureInfo, structs: Sequence[jax.ShapeDtypeStruct], sizes: dict[str, int]
) -> _Call:
    random = np.random.default_rng(0)
    count = len(info.inputs)
    inputs = {
        entry.name: _validate.random_array(struct, sizes, random)
        for entry, struct in zip(info.inputs, structs)
    }
    outputs = {
        entry.name: (entry.dtype, _validate.shape_of(struct, sizes))
        for entry, struct in zip(info.outputs, structs[count:])
    }
    return _Call(key, sizes, inputs, outputs)


def _make(
    report: Report,
    path: Path,
    calls_of: Mapping[str, Sequence[_Call]],
    compared: _Model | None,
    finite: bool,
) -> list[Check]:
    """Makes all calls in one process; those with forbidden sizes are left out."""
    calls = [call for each in calls_of.values() for call in each]
    given = [{"signature": call.signature, "inputs": call.inputs} for call in calls]
    try:
        answers = _validate.in_process(report.target, path.absolute(), given, "each")
    except RuntimeError as error:
        raise ValidationError(
            "The export cannot be run.", where=str(path), got=str(error)[-500:]
        ) from error
    return [
        _check(call, answer, report.signatures[call.signature], compared, finite)
        for call, answer in zip(calls, answers)
        if not _REFUSED.search(answer.get("error", ""))
    ]


def _check(
    call: _Call,
    answer: Mapping[str, Any],
    info: SignatureInfo,
    compared: _Model | None,
    finite: bool,
) -> Check:
    got = answer.get("results", {})
    problem = answer.get("error") or _wrong(call, got, info.assigns, finite)
    errors: dict[str, float] = {}
    if not problem and compared is not None:
        try:
            errors = compared.differences(call, info, got)
        except ValidationError as error:
            problem = f"{error.what} {error.where}: {error.got}"
    shapes = {name: got[name].shape for name in call.outputs if name in got}
    return Check(call.signature, call.sizes, problem, shapes, errors)


def _wrong(call: _Call, got: _served.Arrays, assigns: Sequence[str], finite: bool) -> str:
    """What is not as the report says, or nothing."""
    values = {name: value for name, value in got.items() if not name.startswith("variable:")}
    changed = {name.removeprefix("variable:") for name in got} - set(values)
    if sorted(values) != sorted(call.outputs):
        return f"it gives {sorted(values)} instead of {sorted(call.outputs)}"
    if changed - set(assigns):
        return f"it changes {sorted(changed - set(assigns))}"
    for name, (dtype, shape) in call.outputs.items():
        value = values[name]
        if (value.dtype.name, value.shape) != (dtype, shape):
            return (
                f"{name} is {value.dtype.name}{list(value.shape)} instead of {dtype}{list(shape)}"
            )
        if finite and jax.numpy.issubdtype(value.dtype, np.inexact):
            count = int((~np.isfinite(value.astype(np.complex128))).sum())
            if count:
                return f"{name} has {count} of {value.size} elements that are not finite"
    return ""


class _Model:
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
        self, call: _Call, info: SignatureInfo, got: _served.Arrays
    ) -> dict[str, float]:
        """How far the results are from the model's, by name.

        Raises:
            ValidationError: further than their dtypes explain.
        """
        arguments = {
            name: rebuild(tree, call.inputs.__getitem__) for name, tree in info.arguments.items()
        }
        args = tuple(arguments.pop(name) for name in info.positional)
        values = [leaf.value for leaf in self._exportable.leaves]
        expected: dict[str, Any] = {}
        try:
            output, _ = self._exportable.run(self._methods[call.signature], values, args, arguments)
            collect(info.result, output, expected, "the result")
            arrays = {name: np.asarray(_dtypes.store(value)) for name, value in expected.items()}
        except (PaxError, TypeError, ValueError, KeyError) as error:
            raise InvalidArgumentError(
                "The model to compare with cannot be called as the export can.",
                where=call.signature,
                got=f"{type(error).__name__}: {error}",
                write="the factory that made the exported model; --method KEY=NAME names a method",
            ) from error
        values_got = {name: got[name] for name in call.outputs}
        label = ", ".join(f"{name}={size}" for name, size in call.sizes.items())
        case = _validate.Case(call.signature, call.inputs, arrays, label=label and f"({label})")
        return _validate.compare(case, values_got)
