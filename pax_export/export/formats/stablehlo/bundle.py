"""A StableHLO bundle as a callable again: under jit, grad and vmap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pax_export._errors import InvalidArgumentError, StateChangeError
from pax_export._files import checksums
from pax_export.export.artifact.arguments import Arguments, default_of
from pax_export.export.artifact.report import Report
from pax_export.export.artifact.structure import rebuild
from pax_export.export.formats.stablehlo import files
from pax_export.export.formats.stablehlo.caller import caller
from pax_export.export.formats.stablehlo.exported import Exported
from pax_export.export.formats.stablehlo.renew import read_function
from pax_export.export.tracing import dtypes

WEIGHT, INPUT, OUTPUT = "weight", "input", "output"


class LoadedBundle:
    """A StableHLO bundle that has been loaded; call it like the model that was exported.

    It is a pytree of its weights, so it goes through `jax.jit`, `jax.grad` and
    `jax.vmap` like a module.  Whoever changes weights gets a new one.

    Attributes:
        report: what the export is.
        weights: the arrays by name; none if they are constants of the functions.
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the default signature, or the only one; see `BundleSignature`."""
        return default_of(self.signatures)(*args, **kwargs)

    def purecall(self, *args: Any, **kwargs: Any) -> tuple[LoadedBundle, Any]:
        """Calls the default signature; gives the bundle with the state after, and the output."""
        return default_of(self.signatures).purecall(*args, **kwargs)

    def replace_weights(self, weights: Mapping[str, Any]) -> LoadedBundle:
        """The same functions with other weights.

        Args:
            weights: new arrays by name; the others stay.

        Raises:
            InvalidArgumentError: there is no weight of a name, or it has
                another shape or dtype.
        """
        for name, value in weights.items():
            old = self.weights.get(name)
            if old is None:
                raise InvalidArgumentError(
                    "This bundle has no such weight.",
                    got=name,
                    write=", ".join(self.weights) or "nothing: its weights are constants",
                )
            if (np.shape(value), value.dtype) != (old.shape, old.dtype):
                raise InvalidArgumentError(
                    "A weight has another shape or dtype than the exported one.",
                    where=name,
                    got=f"{value.dtype}{list(np.shape(value))}",
                    write=f"{old.dtype}{list(old.shape)}",
                )
        return LoadedBundle(self._functions, {**self.weights, **weights})

    def placed(self, mesh: jax.sharding.Mesh) -> LoadedBundle:
        """The bundle with its weights where the functions of a sharded export want them.

        Args:
            mesh: of as many devices as it was exported for.
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


def _unflatten(aux: Any, leaves: Iterable[Any]) -> LoadedBundle:
    functions, names = aux
    return LoadedBundle(functions, dict(zip(names, leaves)))


jax.tree_util.register_pytree_with_keys(LoadedBundle, _flatten_with_keys, _unflatten, _flatten)


class Functions:
    """What of a bundle is no weight: compared and pickled by its content."""

    def __init__(self, report: Report, exported: Mapping[str, Exported], digest: str):
        self.report = report
        self.exported = dict(exported)
        self.operands = {key: _pairs(report, key, "operands") for key in exported}
        self.results = {key: _pairs(report, key, "results") for key in exported}
        self.arguments = {key: Arguments(key, info) for key, info in report.signatures.items()}
        self._digest = digest
        order = report.details["vjp_order"]
        self.callers = {key: caller(each, order, key) for key, each in exported.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Functions) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __reduce__(self) -> Any:
        order = self.report.details["vjp_order"]
        blobs = {key: bytes(each.serialize(order)) for key, each in self.exported.items()}
        return _unpickled, (self.report, blobs, self._digest)


def _unpickled(report: Report, blobs: Mapping[str, bytes], digest: str) -> Functions:
    read = {key: jax.export.deserialize(bytearray(blob)) for key, blob in blobs.items()}
    return Functions(report, read, digest)


def _pairs(report: Report, key: str, what: str) -> list[tuple[str, str]]:
    return [(kind, name) for kind, name in report.details["functions"][key][what]]


class BundleSignature:
    """One function of a `LoadedBundle`."""

    def __init__(self, bundle: LoadedBundle, key: str):
        self.key = key
        self.info = bundle.report.signatures[key]
        self._bundle = bundle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function on jax and numpy arrays; gives jax arrays.

        Raises:
            InvalidArgumentError: the arguments have another structure, dtype
                or shape than the exported ones.
            StateChangeError: the function changes weights; see `purecall`.
        """
        if self.info.assigns:
            raise StateChangeError(
                "This function gives new weights, which a plain call would lose.",
                where=self.key,
                got=", ".join(self.info.assigns),
                write="bundle, output = bundle.purecall(...)",
            )
        return self.purecall(*args, **kwargs)[1]

    def purecall(self, *args: Any, **kwargs: Any) -> tuple[LoadedBundle, Any]:
        """Calls the function; gives the bundle with the state after, and the output."""
        arguments = self._bundle._functions.arguments[self.key]
        named = arguments.named(args, kwargs)
        given = {name: _operand(arguments, name, value) for name, value in named.items()}
        outputs, new = self.run(given)
        bundle = self._bundle.replace_weights(new) if new else self._bundle
        return bundle, rebuild(self.info.result, outputs.__getitem__)

    def run(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Calls the function on named arrays; gives outputs and new weights by name."""
        functions, weights = self._bundle._functions, self._bundle.weights
        flat = [
            weights[name] if kind == WEIGHT else inputs[name]
            for kind, name in functions.operands[self.key]
        ]
        try:
            found = functions.callers[self.key](*flat)
        except (TypeError, ValueError) as error:
            shapes = {name: np.shape(value) for name, value in inputs.items()}
            functions.arguments[self.key].check_shapes(shapes, error)
            raise
        split: dict[str, dict[str, Any]] = {OUTPUT: {}, WEIGHT: {}}
        for (kind, name), value in zip(functions.results[self.key], found):
            split[kind][name] = value
        return split[OUTPUT], split[WEIGHT]


def _operand(arguments: Arguments, name: str, value: Any) -> Any:
    """A jax array stays where it is; everything else becomes a numpy array."""
    if not isinstance(value, jax.Array):
        return arguments.array(name, value)
    value = dtypes.store(value)
    if value.dtype != arguments.dtype(name):
        raise arguments.wrong_dtype(name, value.dtype)
    return value


def load(directory: Path, report: Report) -> LoadedBundle:
    """Reads a bundle.

    Raises:
        ExportPathError: files are missing or damaged, or no jax like this reads them.
    """
    digest = checksums.check(directory)
    return read(directory, report, digest)


def read(directory: Path, report: Report, digest: str) -> LoadedBundle:
    """Reads a bundle whose files are known to be whole."""
    exported = {key: read_function(directory, report, key) for key in report.signatures}
    structs = {
        each.name: jax.ShapeDtypeStruct(each.shape, dtypes.numpy_dtype(each.dtype))
        for each in report.variables
    }
    apart = report.details["weights"] == "arguments"
    weights = files.read_weights(directory, structs if apart else {})
    return LoadedBundle(Functions(report, exported, digest), weights)
