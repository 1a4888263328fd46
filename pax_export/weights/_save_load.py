"""save_weights and load_weights: write and read the arrays of a module."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

import jax
import numpy as np

from pax_export._foundations import tables
from pax_export._foundations.errors import (
    InvalidArgumentTypeError,
    UnsupportedDtypeError,
    WeightNameError,
    WeightsMismatchError,
)
from pax_export._foundations.files.system import as_path
from pax_export._foundations.jax import is_key, is_tracer
from pax_export._foundations.types import Array, PyTree
from pax_export.core import named_leaves
from pax_export.weights._file import WeightsFile, open_weights, write_weights
from pax_export.weights._metadata import RESERVED, Note, describe_array, to_stored

T = TypeVar("T")


def leaves_by_name(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their dotted names, in tree order."""
    pairs = named_leaves(tree)
    leaves = dict(pairs)
    if len(leaves) != len(pairs):
        names = [name for name, _ in pairs]
        raise WeightNameError(
            "Two weights have the same dotted name.",
            where=next(name for name in names if names.count(name) > 1),
            write="dict keys without dots, or with other names",
        )
    for name in leaves.keys() & {"", RESERVED}:
        raise WeightNameError(
            "A weight has an empty or reserved name.",
            got=f"a leaf with the name {name!r}",
            write="a module, or a dict of arrays with other names",
        )
    return leaves


@dataclass(frozen=True)
class LoadReport:
    """The names that a file and a module have in common, and those that differ.

    Attributes:
        loaded: names of the arrays that were loaded.
        missing: names that the module has and the file lacks.
        unexpected: names that the file has and the module lacks.
        mismatched: name -> what differs, for arrays of another shape or dtype.

    Example:
        >>> from pax_export.weights import LoadReport
        >>> report = LoadReport(("a",), ("b",), (), {"c": "float32[2] in the file, ..."})
        >>> report.complete
        False
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, str]

    @property
    def complete(self) -> bool:
        """True if the file has exactly the arrays of the module."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} loaded"]
        lines += [f"missing from the file: {name}" for name in self.missing]
        lines += [f"unknown to the module: {name}" for name in self.unexpected]
        lines += [f"{name}: {difference}" for name, difference in self.mismatched.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return tables.report(str(self))


def compare_leaves(wanted: Mapping[str, object], there: Mapping[str, object]) -> LoadReport:
    """Compares the leaves of a module with those on disk: name -> shape and dtype."""
    loaded, missing, mismatched = [], [], {}
    for name, own in wanted.items():
        if name not in there:
            missing.append(name)
        elif there[name] == own:
            loaded.append(name)
        else:
            mismatched[name] = f"{there[name]} in the file, {own} in the module"
    unexpected = [name for name in there if name not in wanted]
    return LoadReport(tuple(loaded), tuple(missing), tuple(unexpected), mismatched)


def mismatch_error(what: str, report: LoadReport, where: str, write: str) -> WeightsMismatchError:
    """Returns the error that lists all differences of a report and has it as `report`."""
    _, *lines = str(report).splitlines()
    listed = "\n".join(f"  - {line}" for line in lines)
    error = WeightsMismatchError(f"{what}:\n{listed}", where=where, write=write)
    error.report = report
    return error


def save_weights(module: PyTree, path: str | os.PathLike[str]) -> None:
    """Writes all arrays of a module, parameters and states, to a safetensors file.

    An array is named by its path, such as ``modules.0.weight``. Dtypes that the format lacks are
    stored as others with a note in the metadata, typed PRNG keys as their data.

    The file is written atomically and replaces only a weights file. Its metadata have checksums,
    which `load_weights` compares.

    Args:
        module: a module, or any pytree of arrays, e.g. ``{"model": model,
            "optimizer": optimizer}``. An EmptyNode is not an array.
        path: the file, usually ``*.safetensors``. Missing directories are created.

    Raises:
        WeightsFileError: (an OSError) the file cannot be written, or the path is
            not a file of weights.
        WeightNameError: (a ValueError) two arrays have the same dotted name.
        InvalidArgumentTypeError: a leaf is not an array, or has no value here.
        UnsupportedDtypeError: an array has a dtype that cannot be stored.
        MissingPackageError: safetensors is not installed.

    Example:
        >>> import pax_export as pax, tempfile, os
        >>> net = pax.Sequential(pax.Linear(2, 3))
        >>> path = os.path.join(tempfile.mkdtemp(), "net.safetensors")
        >>> pax.save_weights(net, path)
        >>> import safetensors.numpy
        >>> sorted(safetensors.numpy.load_file(path))
        ['modules.0.bias', 'modules.0.weight']
    """
    arrays: dict[str, np.ndarray] = {}
    notes: dict[str, Note] = {}
    leaves = leaves_by_name(module)
    require_values(leaves, "save_weights")
    for name, leaf in leaves.items():
        try:
            arrays[name], note = to_stored(leaf)
        except TypeError as error:
            raise UnsupportedDtypeError(
                "safetensors does not support the dtype of an array.",
                where=name,
                got=error,
                write="an array of numbers or booleans, or the value as a static attribute",
            ) from error
        if note is not None:
            notes[name] = note
    write_weights(as_path(path), arrays, notes)


def require_values(leaves: Mapping[str, object], where: str) -> None:
    """Raises an InvalidArgumentTypeError about a leaf that has no value on this host."""
    for name, leaf in leaves.items():
        problem = explain_absence(leaf)
        if not isinstance(leaf, (jax.Array, np.ndarray)):
            problem = f"{type(leaf).__name__}: {leaf!r}"[:200]
        elif not problem and isinstance(leaf, jax.Array):
            if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
                problem = "an array that other processes hold parts of"
        if problem:
            raise InvalidArgumentTypeError(
                f"{where}: expected a module of arrays with values on this host.",
                where=name,
                got=problem,
                write="an initialised module, outside of jit, with all arrays gathered; "
                "jnp.asarray(...) of a number",
            )


def explain_absence(leaf: object) -> str | None:
    """Why an array has no value here, if it has none."""
    if is_tracer(leaf):
        return "an array inside a function that jax traces"
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "an array that was deleted, for example donated to a jitted function"
    return None


@overload
def load_weights(
    module: T,
    path: str | os.PathLike[str],
    *,
    strict: Literal[True] = True,
) -> T: ...


@overload
def load_weights(
    module: T, path: str | os.PathLike[str], *, strict: Literal[False]
) -> tuple[T, LoadReport]: ...


def load_weights(module: PyTree, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
    """Returns a module with the arrays of a safetensors file.

    Args:
        module: the module to start from, or ``jax.eval_shape(make_model)``, which allocates no
            weights. New arrays are numpy where the old ones are, or jax arrays with the
            shardings of the old ones.
        path: a safetensors file of any program.
        strict: require exactly the arrays of the module, with their shapes and dtypes.
            Otherwise matching arrays are loaded, the module keeps the others, and a
            report is returned, too.

    Returns:
        The new module; with ``strict=False``, a pair of it and a `LoadReport`.

    Raises:
        WeightsMismatchError: (a ValueError and a KeyError) with strict, arrays are
            missing, unexpected, or have other shapes or dtypes; the message and
            `report` list all of them.
        WeightsFileError: (an OSError) the file is missing, is not a safetensors file,
            or is corrupted.
        MissingPackageError: safetensors is not installed.

    Example:
        >>> import jax, pax_export as pax, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "layer.safetensors")
        >>> layer = pax.Linear(2, 3)
        >>> pax.save_weights(layer, path)
        >>> loaded = pax.load_weights(jax.eval_shape(lambda: pax.Linear(2, 3)), path)
        >>> bool((loaded.weight == layer.weight).all())
        True
        >>> _, report = pax.load_weights(pax.Linear(2, 4), path, strict=False)
        >>> report.mismatched
        {'weight': 'float32[2,3] in the file, float32[2,4] in the module', ...}
    """
    leaves = leaves_by_name(module)
    for name, leaf in leaves.items():
        require_shape(name, leaf, "load_weights needs a module of arrays")
    with open_weights(as_path(path)) as file:
        there = {name: entry.description for name, entry in file.entries.items()}
        wanted = {name: describe_array(leaf) for name, leaf in leaves.items()}
        report = compare_leaves(wanted, there)
        if strict and not report.complete:
            raise mismatch_error(
                "The weights of the file are not those of the module",
                report,
                where=os.fspath(path),
                write=_of_quantized(report)
                or "the module that was saved, or load_weights(module, path, strict=False) "
                "to load matching leaves",
            )
        fitting = set(report.loaded)
        values = [
            _read_leaf(file, name, leaf) if name in fitting else leaf
            for name, leaf in leaves.items()
        ]
    loaded = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(module), values)
    return loaded if strict else (loaded, report)


def _of_quantized(report: LoadReport) -> str:
    """Returns advice if only one of file and module has quantized weights."""
    found = [name for name in report.unexpected if name.endswith(".integers")]
    if found and found[0].removesuffix(".integers") in report.missing:
        return "load_weights(pax.quantize(module, bits=...)[0], path), as the file is"
    lacking = [name for name in report.missing if name.endswith(".integers")]
    if lacking and lacking[0].removesuffix(".integers") in report.unexpected:
        return "pax.quantize(load_weights(net, path), bits=...), with the net as it was before"
    return ""


def require_shape(name: str, leaf: object, what: str) -> None:
    """Refuses, by an InvalidArgumentTypeError, a leaf that says nothing of what is wanted."""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise InvalidArgumentTypeError(
            f"{what}, or of their shapes and dtypes.",
            where=name,
            got=f"{type(leaf).__name__}: {leaf!r}"[:200],
            write="a module, or jax.eval_shape(make_model)",
        )


def _read_leaf(file: WeightsFile, name: str, own: Array | jax.ShapeDtypeStruct) -> Any:
    """The array of a file, of the kind and at the place of the module's own."""
    if isinstance(own, np.ndarray):
        return file.read(name).astype(own.dtype, copy=False)
    refuse_narrowing(name, own)
    sharding = chosen_sharding(own)
    if sharding is None:
        return jax.device_put(file.read(name))
    if len(sharding.device_set) == 1 or file.entries[name].note is not None:
        return jax.device_put(file.read(name), sharding)
    if sharding.is_fully_addressable:
        file.read_for_comparison(name)  # several processes would each read all of it
    # Each device is given its part only; on the host there is one array at a time.
    read_part = functools.partial(file.read_part, name)
    return jax.make_array_from_callback(own.shape, sharding, read_part)


def refuse_narrowing(name: str, own: Array | jax.ShapeDtypeStruct) -> None:
    """Refuses, by an UnsupportedDtypeError, an array of 64 bits that jax would make one of 32."""
    if not is_key(own.dtype) and jax.dtypes.canonicalize_dtype(own.dtype) != own.dtype:
        raise UnsupportedDtypeError(
            "A 64-bit array needs jax_enable_x64.",
            where=name,
            got=own.dtype,
            write='jax.config.update("jax_enable_x64", True)',
        )


def chosen_sharding(own: Array | jax.ShapeDtypeStruct) -> Any:
    """Returns the explicit sharding of an array or struct; None if jax may choose."""
    if is_tracer(own) or (isinstance(own, jax.Array) and not own.committed):
        return None
    sharding = getattr(own, "sharding", None)
    abstract = isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
    return None if abstract else sharding
