"""save_weights: the arrays of a module to a safetensors file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pax_export._errors import InvalidArgumentTypeError, UnsupportedDtypeError
from pax_export._jax import is_tracer
from pax_export.weights import _file
from pax_export.weights._dtypes import Note, stored
from pax_export.weights._names import leaves_by_name


def save_weights(module: Any, path: str | os.PathLike[str]) -> None:
    """Writes all arrays of a module, parameters and states alike, to a safetensors file.

    An array has the dotted name of its place, such as ``modules.0.weight``.  Any
    program with the safetensors library can read the file.  Dtypes that the
    format lacks are stored as others, with a note in the metadata; typed PRNG
    keys as their data.

    The file is complete or not there: it is written under another name in the
    same directory, and then takes the place of a file that ``path`` may already
    name, in one step.  A process that is killed leaves the old file as it was.

    Args:
        module: a module, or any pytree of arrays, e.g. ``{"model": model,
            "optimizer": optimizer}``.  An EmptyNode is no array.
        path: the file, usually ``*.safetensors``.  Missing directories are made.

    Raises:
        WeightsFileError: (an OSError) the file cannot be written.
        WeightNameError: (a ValueError) two arrays have one dotted name.
        InvalidArgumentTypeError: a leaf is no array, or has no value here.
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
    for name, leaf in leaves_by_name(module).items():
        arrays[name], note = _stored(name, leaf)
        if note is not None:
            notes[name] = note
    _file.write(Path(path), arrays, notes)


def _stored(name: str, leaf: Any) -> tuple[np.ndarray, Note | None]:
    _require_value(name, leaf)
    try:
        return stored(leaf)
    except TypeError as error:
        raise UnsupportedDtypeError(
            "safetensors has no place for an array of this dtype.",
            where=name,
            got=error,
            write="an array of numbers or booleans, or the value as a static attribute",
        ) from error


def _require_value(name: str, leaf: Any) -> None:
    if not isinstance(leaf, (jax.Array, np.ndarray)):
        raise InvalidArgumentTypeError(
            "save_weights needs a module of arrays.",
            where=name,
            got=f"{type(leaf).__name__}: {leaf!r}"[:200],
            write="jnp.asarray(...) of a number; an initialised module instead of shapes",
        )
    problem = None
    if is_tracer(leaf):
        problem = "an array inside a function that jax traces"
    elif isinstance(leaf, jax.Array) and leaf.is_deleted():
        problem = "an array that was deleted, for example donated to a jitted function"
    elif isinstance(leaf, jax.Array) and not (
        leaf.is_fully_addressable or leaf.is_fully_replicated
    ):
        problem = "an array of which other processes hold parts"
    if problem:
        raise InvalidArgumentTypeError(
            "save_weights needs arrays whose values are here.",
            where=name,
            got=problem,
            write="save_weights(module, path) outside of jit, with all arrays gathered",
        )
