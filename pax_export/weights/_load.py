"""load_weights: the arrays of a safetensors file into a module."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import jax
import numpy as np

from pax_export._errors import InvalidArgumentTypeError, UnsupportedDtypeError
from pax_export._jax import is_tracer
from pax_export.weights._dtypes import describe, is_key
from pax_export.weights._file import WeightsFile, opened
from pax_export.weights._names import leaves_by_name
from pax_export.weights._report import LoadReport, compare, mismatch

T = TypeVar("T")


@overload
def load_weights(module: T, path: str | os.PathLike[str], *, strict: Literal[True] = True) -> T: ...


@overload
def load_weights(
    module: T, path: str | os.PathLike[str], *, strict: Literal[False]
) -> tuple[T, LoadReport]: ...


def load_weights(module: Any, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
    """Makes a module with the arrays of a safetensors file.

    Args:
        module: the module to start from; it stays as it is.  Each array of the
            new one is of the kind of the old: numpy for numpy, and a jax array
            where the old one was placed, shards included.  It may be a module
            that was never initialised, ``jax.eval_shape(make_model)``; this
            draws no weights and takes no memory for them.
        path: a file that `save_weights` or another program wrote.
        strict: whether the file must have exactly the arrays of the module, with
            their shapes and dtypes.  If not, what fits is loaded, the module
            keeps its own arrays elsewhere, and a report is returned as well.

    Returns:
        The new module; with ``strict=False``, a pair of it and a `LoadReport`.

    Raises:
        WeightsMismatchError: (a ValueError and a KeyError) with strict, any
            array is missing, unexpected, or of another shape or dtype.  The
            message lists all of them; `report` holds them.
        WeightsFileError: (an OSError) no such file, or not a safetensors file,
            or not all of one.
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
        _require_shape(name, leaf)
    with opened(Path(path)) as file:
        there = {name: entry.description for name, entry in file.entries.items()}
        report = compare({name: describe(leaf) for name, leaf in leaves.items()}, there)
        if strict and not report.complete:
            raise mismatch(
                "The weights of the file are not those of the module",
                report,
                where=os.fspath(path),
                write="the module that was saved, or load_weights(module, path, strict=False) "
                "to load what fits",
            )
        fitting = set(report.loaded)
        values = [
            _read(file, name, leaf) if name in fitting else leaf for name, leaf in leaves.items()
        ]
    loaded = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(module), values)
    return loaded if strict else (loaded, report)


def _require_shape(name: str, leaf: Any) -> None:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise InvalidArgumentTypeError(
            "load_weights needs a module of arrays, or of their shapes and dtypes.",
            where=name,
            got=f"{type(leaf).__name__}: {leaf!r}"[:200],
            write="a module, or jax.eval_shape(make_model)",
        )


def _read(file: WeightsFile, name: str, own: Any) -> Any:
    """The array of a file, of the kind and at the place of the module's own."""
    if isinstance(own, np.ndarray):
        return file.read(name).astype(own.dtype, copy=False)
    refuse_narrowing(name, own)
    sharding = chosen_sharding(own)
    if sharding is None:
        return jax.device_put(file.read(name))
    if len(sharding.device_set) == 1 or file.entries[name].note is not None:
        return jax.device_put(file.read(name), sharding)
    # Each device is given its part only; the whole is never in memory at once.
    read_part = functools.partial(file.read_part, name)
    return jax.make_array_from_callback(own.shape, sharding, read_part)


def refuse_narrowing(name: str, own: Any) -> None:
    """Refuses an array of 64 bits that jax would make one of 32.

    Raises:
        UnsupportedDtypeError: naming it.
    """
    if not is_key(own.dtype) and jax.dtypes.canonicalize_dtype(own.dtype) != own.dtype:
        raise UnsupportedDtypeError(
            "jax would narrow an array of this dtype.",
            where=name,
            got=own.dtype,
            write='jax.config.update("jax_enable_x64", True)',
        )


def chosen_sharding(own: Any) -> Any:
    """Where an array was put on purpose; None if jax may choose.

    Args:
        own: an array, or a `jax.ShapeDtypeStruct`, which may name a sharding.
    """
    if is_tracer(own) or (isinstance(own, jax.Array) and not own.committed):
        return None
    sharding = getattr(own, "sharding", None)
    abstract = isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)
    return None if abstract else sharding
