"""save_as: the weights of a module, as the framework that they came from keeps them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pax_export._errors import AdoptionError, InvalidArgumentError, InvalidArgumentTypeError
from pax_export.weights import _file
from pax_export.weights._dtypes import stored
from pax_export.weights._leaves import leaves_by_name
from pax_export.weights._save_load import absence
from pax_export.weights.adoption._adopt import plan_of
from pax_export.weights.adoption._groups import WRITTEN_AS
from pax_export.weights.adoption._moves import Piece, assembled, backward, forward, region
from pax_export.weights.adoption._npz_file import write_npz
from pax_export.weights.adoption._options import options_of
from pax_export.weights.adoption._readings import Recipe
from pax_export.weights.adoption._report import AdoptionReport
from pax_export.weights.adoption._torch_file import write_torch
from pax_export.weights.adoption._weight_norm import Resolved, versions
from pax_export.weights.sources import Source, open_source

Write = Callable[[Path, dict[str, np.ndarray], Mapping[str, Any]], None]


def save_as(
    net: Any,
    path: str | os.PathLike[str],
    like: Any,
    *,
    report: AdoptionReport | None = None,
    rename: Mapping[str, str] | None = None,
    ignore: Any = None,
    keep: Any = None,
    origin: str | None = None,
    fused: str | None = None,
    axes: Mapping[str, Any] | None = None,
) -> None:
    """Writes the weights of a module with the names and layouts of another framework's file.

    What `adopt` took from where is gone back: each array of ``like`` is written again, with the
    numbers that the module has now.  An array whose leaves are as adopted has the same bytes as
    before; arrays that `adopt` did not want are copied.

    Args:
        net: the module.
        path: the file: ``.safetensors``, ``.npz``, or ``.pt`` or ``.pth`` for torch.
        like: the source that the weights came from, or one with the same names and shapes.
        report: what `adopt` gave, where that needed a reference, or to look no further.
        rename: as for `adopt`; so are the other arguments.
        ignore: arrays that were not wanted; they are copied.
        keep: leaves of the module that the file has no place for.
        origin: whose conventions the arrays follow.
        fused: the order in an array of queries, keys and values.
        axes: a path of the module -> for each of its axes the one of the array.

    Raises:
        AmbiguousWeightsError: it is not decided which array a leaf becomes.
        AdoptionError: the module has other leaves than the source has arrays for.
        WeightsFileError: the file cannot be written; what was there is as it was.
        InvalidArgumentError: the ending of the path is none of those that are written.

    Example:
        >>> import numpy as np, os, pax_export as pax, tempfile
        >>> file = {"fc.weight": np.ones((3, 2), np.float32), "fc.bias": np.ones(3, np.float32)}
        >>> net, report = pax.weights.adopt(pax.Linear(2, 3), file)
        >>> path = os.path.join(tempfile.mkdtemp(), "net.safetensors")
        >>> pax.weights.save_as(net.replace(bias=2 * net.bias), path, like=file)
        >>> from safetensors.numpy import load_file
        >>> load_file(path)["fc.bias"].tolist(), load_file(path)["fc.weight"].shape
        ([2.0, 2.0, 2.0], (3, 2))
    """
    write = _writer(path)
    if not (report is None or isinstance(report, AdoptionReport)):
        raise InvalidArgumentTypeError(
            "This is no report of adopt.",
            where="save_as: report",
            got=repr(report),
            write="net, report = pax.weights.adopt(net, source)",
        )
    options = options_of(rename, ignore, keep, axes, origin, fused, "save_as")
    leaves = leaves_by_name(net)
    for name, leaf in leaves.items():
        if not isinstance(leaf, (jax.Array, np.ndarray)) or absence(leaf):
            raise InvalidArgumentError(
                "save_as needs a module of arrays that have values.",
                where=name,
                got=absence(leaf) or type(leaf).__name__,
                write="a module that was initialised, outside of jit",
            )
    with open_source(like) as source:
        if report is not None and report._choice is not None:
            choice = report._choice
            version = _version_of(choice.recipe, source)
        else:
            choice, version = plan_of(net, like, source, options, "save_as")
        _require_same(choice.recipe, leaves, version)
        arrays = _written(choice.recipe, leaves, source, version)
        write(Path(path), arrays, {**source.metadata, WRITTEN_AS: choice.origin})


def _version_of(recipe: Recipe, source: Source) -> Source:
    """The version of a source whose arrays a recipe names."""
    used = {piece.source for pieces in recipe.values() for piece in pieces}
    return next((each for each in versions(source) if used <= set(each.entries)), source)


def _require_same(recipe: Recipe, leaves: Mapping[str, Any], source: Source) -> None:
    """The report may be one of another module, or of another source."""
    for leaf, pieces in recipe.items():
        for piece in pieces:
            entry = source.entries.get(piece.source)
            if leaf not in leaves or entry is None or entry.shape != piece.shape:
                raise AdoptionError(
                    "The report is not one of this module and this source.",
                    where=leaf if leaf not in leaves else piece.source,
                    write="the report of adopt(net, like), or save_as without one",
                )


def _writer(path: str | os.PathLike[str]) -> Write:
    ending = Path(path).suffix.lower()
    if ending not in _WRITERS:
        raise InvalidArgumentError(
            "Weights are not written in this format.",
            where="save_as",
            got=repr(os.fspath(path))[:200],
            write="a path that ends with .safetensors, .npz, .pt or .pth",
        )
    return _WRITERS[ending]


def _safetensors(path: Path, arrays: dict[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
    kept = {
        name: metadata[name]
        for name in ("format", WRITTEN_AS)
        if isinstance(metadata.get(name), str)
    }
    values, notes = {}, {}
    for name, array in arrays.items():
        values[name], note = stored(array)
        if note is not None:
            notes[name] = note
    _file.write(path, values, notes, extra=kept)


_WRITERS: dict[str, Write] = {
    ".safetensors": _safetensors, ".npz": write_npz, ".pt": write_torch, ".pth": write_torch,
}  # fmt: skip


def _written(
    recipe: Recipe, leaves: Mapping[str, Any], file: Source, source: Source
) -> dict[str, np.ndarray]:
    """Every array of a file with the numbers of the module; `source` is a version of the file."""
    new: dict[str, np.ndarray] = {}
    kept: dict[str, np.ndarray] = {}

    def read(name: str) -> np.ndarray:
        if name not in kept:
            kept[name] = source.entries[name].read()
        return kept[name]

    for path, pieces in recipe.items():
        value = np.asarray(leaves[path])
        before = _as_adopted(value, pieces, read)
        if before.shape == value.shape and before.tobytes() == value.tobytes():
            continue  # the bytes of the source are those of this leaf, whatever was rounded
        _undone(value, pieces, read, new)
    _follow(source.tied, new)
    if isinstance(source, Resolved):
        for name in new.keys() & source.norms.keys():
            norm = source.norms[name]
            old = [file.entries[each].read() for each in norm.arrays]
            new |= dict(zip(norm.arrays, norm.apart(new.pop(name), *old)))
    return {
        name: np.ascontiguousarray(new[name]).reshape(entry.shape) if name in new else entry.read()
        for name, entry in file.entries.items()
    }


def _follow(tied: Mapping[str, str], new: dict[str, np.ndarray]) -> None:
    """What is one array under several names stays one."""
    for name, first in tied.items():
        changed = new.get(first, new.get(name))
        if changed is not None:
            new[name] = new[first] = changed


def _as_adopted(
    value: np.ndarray, pieces: tuple[Piece, ...], read: Callable[[str], np.ndarray]
) -> np.ndarray:
    return np.ascontiguousarray(assembled(value.shape, value.dtype, pieces, read))


def _undone(
    value: np.ndarray,
    pieces: tuple[Piece, ...],
    read: Callable[[str], np.ndarray],
    new: dict[str, np.ndarray],
) -> None:
    """Puts a leaf back; of a sum, the second term stays and the first takes the change."""
    wide = np.array(value, np.float64 if value.dtype.kind in "fV" else None, order="C")
    # In float64 a difference is rounded once, when it is written.
    for piece in pieces:
        if piece.adds:
            part = region(wide, piece)
            part -= np.asarray(forward(read(piece.source), piece), wide.dtype).reshape(part.shape)
    for piece in pieces:
        if not piece.adds:
            if piece.source not in new:
                new[piece.source] = np.array(read(piece.source))
            into = np.array(new[piece.source], order="C")
            backward(wide.astype(_room(into.dtype, wide.dtype)), piece, into)
            new[piece.source] = into


def _room(dtype: np.dtype, wide: np.dtype) -> np.dtype:
    return wide if dtype.kind in "fV" else dtype
