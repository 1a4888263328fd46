"""Loaded StableHLO bundles: callables under jit, grad and vmap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pax_export._foundations.errors import (
    InvalidArgumentError,
    NotDifferentiableError,
    StateChangeError,
)
from pax_export._foundations.files import checksums
from pax_export._foundations.types import Array, ArrayLike
from pax_export.export.artifact.calling import Arguments, default_of
from pax_export.export.artifact.report import REPORT_FILE, Report, read_report
from pax_export.export.artifact.structure import rebuild
from pax_export.export.formats.stablehlo import files
from pax_export.export.formats.stablehlo.exported import Exported, runs_on_all
from pax_export.export.formats.stablehlo.files import (
    OUTPUT,
    WEIGHT,
    Names,
    details_of,
    read_function,
)
from pax_export.export.tracing import dtypes


class LoadedBundle:
    """A loaded StableHLO bundle; call it like the exported model.

    It is an immutable pytree of its weights, so `jax.jit`, `jax.grad` and `jax.vmap` take it like a
    module, and threads may share it.

    Attributes:
        report: the report of the export.
        weights: the arrays by name; empty if they are constants of the functions.
        signatures: by key, functions like the model itself.
        exported: by key, the `jax.export.Exported`.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, pax_export as pax
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = pax.export.to_stablehlo(
        ...         pax.Linear(3, 2), folder + "/linear", pax.export.spec("batch, 3"), vjp_order=1
        ...     )
        ...     model = pax.export.load(folder + "/linear")
        >>> model
        LoadedBundle(Linear: serving_default)
        >>> jax.vmap(model)(jnp.ones((4, 5, 3))).shape
        (4, 5, 2)
        >>> gradient = jax.grad(lambda model, x: model(x).sum())(model, jnp.ones((5, 3)))
        >>> gradient.weights["bias"].tolist()
        [5.0, 5.0]
    """

    def __init__(self, functions: Functions, weights: Mapping[str, Any]):
        self._functions = functions
        self.weights: dict[str, Any] = dict(weights)

    @property
    def report(self) -> Report:
        return self._functions.report

    @property
    def exported(self) -> dict[str, Exported]:
        return dict(self._functions.exported)

    @property
    def signatures(self) -> dict[str, BundleSignature]:
        return {key: BundleSignature(self, key) for key in self.report.signatures}

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the default signature, or the only one; see `BundleSignature`."""
        return default_of(self.signatures)(*args, **kwargs)

    def purecall(self, *args: object, **kwargs: object) -> tuple[LoadedBundle, Any]:
        """Calls the default signature; returns the bundle with the new state, and the output."""
        return default_of(self.signatures).purecall(*args, **kwargs)

    def replace_weights(self, weights: Mapping[str, Any]) -> LoadedBundle:
        """Returns a bundle with the same functions and other weights.

        Args:
            weights: new arrays by name; the others do not change.

        Raises:
            InvalidArgumentError: a name is unknown, or an array has another shape or dtype.
        """
        for name, value in weights.items():
            old = self.weights.get(name)
            if old is None:
                raise InvalidArgumentError(
                    "The bundle does not have this weight.",
                    got=name,
                    write=", ".join(self.weights) or "nothing: its weights are constants",
                )
            dtype = getattr(value, "dtype", None)
            if (np.shape(value), dtype) != (old.shape, old.dtype):
                raise InvalidArgumentError(
                    "A weight has another shape or dtype than the exported one.",
                    where=name,
                    got=f"{dtype or type(value).__name__}{list(np.shape(value))}",
                    write=f"{old.dtype}{list(old.shape)}",
                )
        return LoadedBundle(self._functions, {**self.weights, **weights})

    def placed(self, mesh: jax.sharding.Mesh) -> LoadedBundle:
        """Returns the bundle with its weights placed for the functions of a sharded export.

        Args:
            mesh: a mesh with as many devices as it was exported for.
        """
        weights = dict(self.weights)
        for key, exported in self.exported.items():
            shardings = exported.in_shardings_jax(mesh)
            for (kind, name), sharding in zip(self._functions.operands[key], shardings):
                if kind == WEIGHT:
                    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
                    weights[name] = jax.device_put(weights[name], sharding or everywhere)
        return LoadedBundle(self._functions, weights)

    def __repr__(self) -> str:
        return f"LoadedBundle({self.report.model}: {', '.join(self.report.signatures)})"


def _flatten(bundle: LoadedBundle) -> tuple[tuple, Any]:
    return tuple(bundle.weights.values()), (bundle._functions, tuple(bundle.weights))


def _flatten_with_keys(bundle: LoadedBundle) -> tuple[list[tuple[Any, Any]], Any]:
    keys = [(jax.tree_util.DictKey(name), value) for name, value in bundle.weights.items()]
    return keys, _flatten(bundle)[1]


def _unflatten(aux: tuple[Functions, tuple[str, ...]], leaves: Iterable[Any]) -> LoadedBundle:
    functions, names = aux
    return LoadedBundle(functions, dict(zip(names, leaves)))


jax.tree_util.register_pytree_with_keys(LoadedBundle, _flatten_with_keys, _unflatten, _flatten)


class Functions:
    """The parts of a bundle other than weights, compared and pickled by content."""

    def __init__(self, report: Report, exported: Mapping[str, Exported], digest: str):
        self.report = report
        self.exported = dict(exported)
        details = details_of(report)
        self.operands: dict[str, Names] = {k: details.functions[k].operands for k in exported}
        self.results: dict[str, Names] = {k: details.functions[k].results for k in exported}
        self.arguments = {key: Arguments(key, info) for key, info in report.signatures.items()}
        self._digest = digest
        order = details.vjp_order
        # Tracing a call of an Exported takes several times as long as the call itself.
        self.callers: dict[str, Flat] = {
            key: jax.jit(_make_differentiable(each, order, order, key))
            for key, each in exported.items()
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Functions) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __reduce__(self) -> Any:
        order = self.report.details["vjp_order"]
        blobs = {key: bytes(each.serialize(order)) for key, each in self.exported.items()}
        return _restore_functions, (self.report, blobs, self._digest)


def _restore_functions(report: Report, blobs: Mapping[str, bytes], digest: str) -> Functions:
    read = {key: jax.export.deserialize(bytearray(blob)) for key, blob in blobs.items()}
    return Functions(report, read, digest)


class BundleSignature:
    """One function of a `LoadedBundle`."""

    def __init__(self, bundle: LoadedBundle, key: str):
        self.key = key
        self.info = bundle.report.signatures[key]
        self._bundle = bundle

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the function on jax and numpy arrays; returns jax arrays.

        Raises:
            InvalidArgumentError: the structure, a dtype or a shape of the arguments differs.
            StateChangeError: the function changes weights; see `purecall`.
        """
        if self.info.assigns:
            raise StateChangeError(
                "The function returns new weights, which a plain call would drop.",
                where=self.key,
                got=", ".join(self.info.assigns),
                write="bundle, output = bundle.purecall(...)",
            )
        return self.purecall(*args, **kwargs)[1]

    def purecall(self, *args: object, **kwargs: object) -> tuple[LoadedBundle, Any]:
        """Calls the function; returns the bundle with the new state, and the output."""
        arguments = self._bundle._functions.arguments[self.key]
        named = arguments.named(args, kwargs)
        operands = {name: _to_operand(arguments, name, value) for name, value in named.items()}
        outputs, new = self.run(operands)
        bundle = self._bundle.replace_weights(new) if new else self._bundle
        return bundle, rebuild(self.info.result, outputs.__getitem__)

    def run(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Calls the function on named arrays; returns outputs and new weights by name."""
        functions, weights = self._bundle._functions, self._bundle.weights
        flat = [
            weights[name] if kind == WEIGHT else inputs[name]
            for kind, name in functions.operands[self.key]
        ]
        try:
            found = functions.callers[self.key](*flat)
        except (TypeError, ValueError) as error:
            shapes = {name: np.shape(value) for name, value in inputs.items()}
            empty = functions.arguments[self.key].empty_outputs(shapes)
            if empty is not None:
                return {name: jax.numpy.asarray(value) for name, value in empty.items()}, {}
            arguments = functions.arguments[self.key]
            arguments.check_shapes(shapes, error)
            exported = functions.exported[self.key]
            if not runs_on_all(exported.disabled_safety_checks):
                here = jax.export.default_export_platform()
                arguments.check_platform(here, exported.platforms, error)
            raise
        split: dict[str, dict[str, Any]] = {OUTPUT: {}, WEIGHT: {}}
        for (kind, name), value in zip(functions.results[self.key], found):
            split[kind][name] = value
        return split[OUTPUT], split[WEIGHT]


def _to_operand(arguments: Arguments, name: str, value: ArrayLike) -> Array:
    """Converts an operand to a numpy array, unless it is a jax array."""
    if not isinstance(value, jax.Array):
        return arguments.array(name, value)
    stored: Any = dtypes.store(value)
    if stored.dtype != arguments.dtype(name):
        raise arguments.wrong_dtype(name, stored.dtype)
    return stored


def load(directory: Path, report: Report) -> LoadedBundle:
    """Reads a bundle, if its files are whole and this jax reads them."""
    checked = checksums.check(directory)
    checked.path(REPORT_FILE)
    details = details_of(report)
    exported = {key: read_function(checked, report, details, key) for key in report.signatures}
    structs = {
        each.name: jax.ShapeDtypeStruct(each.shape, dtypes.numpy_dtype(each.dtype))
        for each in report.variables
    }
    apart = details.weights == "arguments"
    weights = files.read_weights(checked, structs if apart else {})
    return LoadedBundle(Functions(report, exported, checked.digest), weights)


Arrays = dict[str, np.ndarray]


def run(directory: str, cases: Sequence[Mapping[str, Any]]) -> list[Arrays]:
    model = load(Path(directory), read_report(directory))
    return [_call_case(model, case) for case in cases]


def _call_case(model: LoadedBundle, case: Mapping[str, Any]) -> Arrays:
    inputs, cotangents = case["inputs"], case.get("cotangents") or {}
    outputs, new = model.signatures[case["signature"]].run(inputs)
    results = {name: np.asarray(value) for name, value in outputs.items()}
    for name, value in new.items():
        if not np.array_equal(value, model.weights[name]):
            results[f"variable:{name}"] = np.asarray(value)
    if cotangents:

        def run(weights: Arrays, arrays: Arrays) -> list[Any]:
            bundle = model.replace_weights(weights)
            outputs, _ = bundle.signatures[case["signature"]].run({**inputs, **arrays})
            return [outputs[name] for name in cotangents]

        arrays = dict(model.weights), dict(inputs)
        floating = [
            {k: v for k, v in each.items() if jax.numpy.issubdtype(v.dtype, jax.numpy.inexact)}
            for each in arrays
        ]
        gradients = jax.vjp(run, *floating)[1](list(map(jax.numpy.asarray, cotangents.values())))
        for name, value in {**gradients[0], **gradients[1]}.items():
            results[f"gradient:{name}"] = np.asarray(value)
    return results


_FLOAT0 = jax.dtypes.float0

Flat = Callable[..., tuple[Any, ...]]


def _make_differentiable(exported: Exported, left: int, order: int, name: str) -> Flat:
    """Returns a function from flat operands to flat results.

    It supports `jit`, `vmap` (a batched call is a loop, as in `jax.lax.map`) and, `left` times,
    `grad`. Errors use its name. jax's own deserialized functions support no `vmap`, and their
    errors do not explain missing derivatives.
    """
    run = jax.custom_batching.sequential_vmap(_flat_call(exported))

    @jax.custom_vjp
    def call(*operands: Array) -> tuple[Any, ...]:
        return run(*operands)

    def forward(*operands: Array) -> tuple[tuple, tuple]:
        return call(*operands), operands

    def backward(operands: tuple, cotangents: tuple) -> tuple[Any, ...]:
        if not left:
            some = {0: "no gradient", 1: "first-order gradients only"}
            raise NotDifferentiableError(
                "This function was exported with "
                f"{some.get(order, f'gradients up to order {order} only')}.",
                where=name,
                got=f"vjp_order={order}",
                write=f"to_stablehlo(..., vjp_order={order + 1})",
            )
        gradient = exported.vjp()
        # Without any gradient, float0 arrays are returned instead; a
        # loop over a batch does not take these, but it takes booleans.
        filled = [np.zeros(c.shape, bool) if c.dtype == _FLOAT0 else c for c in cotangents]
        results = iter(_make_differentiable(gradient, left - 1, order, name)(*operands, *filled))
        kinds = (aval.dtype for aval in gradient.out_avals)
        return tuple(None if dtype == _FLOAT0 else next(results) for dtype in kinds)

    call.defvjp(forward, backward)
    return call


def _flat_call(exported: Exported) -> Flat:
    """Returns the function of flat operands and results; see `backward` for float0 results."""

    def call(*arrays: Array) -> tuple[Any, ...]:
        operands = [
            np.zeros(value.shape, _FLOAT0) if aval.dtype == _FLOAT0 else value
            for aval, value in zip(exported.in_avals, arrays)
        ]
        args, kwargs = jax.tree_util.tree_unflatten(exported.in_tree, operands)
        results = jax.tree_util.tree_leaves(exported.call(*args, **kwargs))
        return tuple(result for result in results if result.dtype != _FLOAT0)

    return call
