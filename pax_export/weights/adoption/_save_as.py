"""save_as: writes a module in the layout of its original framework."""

from __future__ import annotations

import itertools
import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pax_export._foundations.errors import (
    AdoptionError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
    UnsupportedDtypeError,
)
from pax_export._foundations.files import own_files
from pax_export._foundations.files.own_files import Belongs
from pax_export._foundations.types import Array, PyTree
from pax_export.core import is_at
from pax_export.weights._file import whole_file, write_weights
from pax_export.weights._metadata import Note, is_inexact, to_stored
from pax_export.weights._save_load import leaves_by_name, require_values
from pax_export.weights.adoption._adopt import plan_of
from pax_export.weights.adoption._fill import assemble_leaf
from pax_export.weights.adoption._groups import WRITTEN_AS
from pax_export.weights.adoption._name_parsing import COUNT, parse_array_name
from pax_export.weights.adoption._new_layers import choose_arrays
from pax_export.weights.adoption._options import Options, named_by, options_of
from pax_export.weights.adoption._parametrized import Resolved, file_names, source_versions
from pax_export.weights.adoption._pieces import (
    Piece,
    Recipe,
    apply_piece,
    leaf_region,
    shape_of,
    undo_piece,
)
from pax_export.weights.adoption._plan import is_bookkeeping
from pax_export.weights.adoption._report import AdoptionReport
from pax_export.weights.sources import TORCH_STORAGES, Source, open_source


def save_as(
    net: PyTree,
    path: str | os.PathLike[str],
    like: object,
    *,
    report: AdoptionReport | None = None,
    rename: Mapping[str, str] | None = None,
    ignore: str | Iterable[str] | None = None,
    keep: str | Iterable[str] | None = None,
    origin: str | None = None,
    fused: str | None = None,
    axes: Mapping[str, Sequence[int]] | None = None,
    flatten: str | Mapping[str, int] | None = None,
) -> None:
    """Writes the weights of a module with the names and layouts of another framework's file.

    The inverse of `adopt`: each array of ``like`` is written with the current values. Unchanged
    arrays have the same bytes as before; ignored arrays are copied. Random keys are not written.

    A leaf without an array in the source, or with another shape, is written in the framework's
    layout: in place of the array that ``rename`` names, beside the rest of its layer, or under
    its own path.

    Args:
        net: the module.
        path: the file: ``.safetensors``, ``.npz``, or ``.pt`` or ``.pth`` for torch.
        like: the source that the weights came from, or one with the same names and shapes.
        report: the report of `adopt`, if that needed a reference, or to skip the matching.
        rename: as for `adopt`; for leaves without an array, the name to write, which may be
            one of the source.
        ignore: arrays that were left out; they are copied unless replaced.
        keep: leaves of the module without arrays in the source.
        origin: the framework whose conventions the arrays follow.
        fused: the order of fused queries, keys and values.
        axes: a path of the module -> the axis of the array for each of its axes.
        flatten: layers behind a flatten, as for `adopt`.

    Raises:
        AmbiguousWeightsError: the array of a leaf is ambiguous.
        AdoptionError: the source has no array for a leaf that is not in ``keep`` or in the
            report, or arrays for leaves that the module lacks; new leaves and
            ignored arrays are both present, and their relation is ambiguous; or the dtype of an
            array cannot represent the values of its leaf.
        WeightsFileError: the file cannot be written; an existing one is unchanged.
        InvalidArgumentError: the suffix of the path is unsupported.

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
    write = choose_writer(path)
    if not (report is None or isinstance(report, AdoptionReport)):
        raise InvalidArgumentTypeError(
            "Expected a report of adopt.",
            where="save_as: report",
            got=repr(report),
            write="net, report = pax.weights.adopt(net, source)",
        )
    options = options_of("save_as", rename=rename, ignore=ignore, keep=keep, axes=axes,
                         origin=origin, fused=fused, flatten=flatten)  # fmt: skip
    leaves = leaves_by_name(net)
    require_values(leaves, "save_as")
    with open_source(like) as source:
        if report is not None and report._choice is not None:
            used = {p.source for pieces in report._choice.recipe.values() for p in pieces}
            versions = (each for each in source_versions(source) if used <= set(each.entries))
            version = next(versions, source)
        else:
            plain = _without_new(options, leaves, source)
            report, version = plan_of(net, like, source, plain)
        _require_same(report, leaves, version)
        arrays = _file_arrays(net, report, options.rename, leaves, source, version)
        write(arrays, {**source.metadata, WRITTEN_AS: report.origin})


def _without_new(options: Options, leaves: Mapping[str, Any], source: Source) -> Options:
    """Returns the options without entries of ``rename`` for leaves that are kept."""
    fixed = options.match("keep", options.keep, leaves)
    new = {
        name: target for name, target in options.rename.items()
        if (below := [leaf for leaf in leaves if is_at(leaf, target)]) and fixed.issuperset(below)
    }  # fmt: skip
    gone = [name for name in new if named_by(name, source.entries)]
    rename = {name: target for name, target in options.rename.items() if name not in new}
    return replace(options, rename=rename, ignore=(*options.ignore, *gone))


def _require_same(report: AdoptionReport, leaves: Mapping[str, Any], source: Source) -> None:
    """The report may be one of another module, or of another source."""
    recipe = report._choice.recipe
    known = {*report.ignored, *report.constants, *report.tied}
    for leaf, pieces in recipe.items():
        known |= {piece.source for piece in pieces}
        for piece in pieces:
            entry = source.entries.get(piece.source)
            if leaf not in leaves or entry is None or entry.shape != piece.shape:
                raise _another_report(leaf if leaf not in leaves else piece.source)
    for name in source.entries:
        if name not in known:
            raise _another_report(name)


def _another_report(where: str) -> AdoptionError:
    return AdoptionError(
        "The report does not match the module and the source.",
        where=where,
        write="the report of adopt(net, like, ...) with the current module, with keep= and ignore= "
        "for parts without counterpart; or save_as without a report",
    )


def _file_arrays(
    net: PyTree, report: AdoptionReport, rename: Mapping[str, str], leaves: Mapping[str, Any],
    file: Source, source: Source,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Every array of a file with the numbers of the module; `source` is a version of the file."""
    whole: Recipe = report._choice.recipe
    recipe = {
        path: pieces for path, pieces in whole.items() if _has_its_shape(pieces, leaves[path])
    }
    counters = [name for name in report.ignored if parse_array_name(name).role == COUNT]
    passed = {*counters, *filter(is_bookkeeping, report.ignored)}
    left = [name for name in report.ignored if name not in passed]
    left += [p.source for path, pieces in whole.items() if path not in recipe for p in pieces]
    added, replaced = choose_arrays(net, leaves, recipe, report.origin, source, left, rename)
    new = _changed_arrays(recipe, leaves, source)
    _update_tied(report.tied, new)
    tied = {name: first for name, first in report.tied.items() if first in replaced}
    _update_tied(tied, added)
    gone = {each for name in (*replaced, *tied) for each in file_names(source, name)}
    if isinstance(source, Resolved):
        for name in new.keys() & source.computed.keys():
            one = source.computed[name]
            old = [file.entries[each].read() for each in one.arrays]
            new |= dict(zip(one.arrays, one.apart(new.pop(name), old)))
    home = {
        name: np.ascontiguousarray(new[name]).reshape(entry.shape) if name in new else entry.read()
        for name, entry in file.entries.items()
        if name not in gone
    }
    return {**home, **added}


def _has_its_shape(pieces: tuple[Piece, ...], leaf: Array) -> bool:
    """Whether a leaf still has the shape that these pieces fill."""
    count = 0
    for piece in pieces:
        room = piece.room or tuple(leaf.shape)
        if math.prod(room) != leaf.size:
            return False
        put = room if piece.put is None else shape_of(room, piece.put)
        if put != piece.after:
            return False
        count += 0 if piece.adds else math.prod(put)
    return count == leaf.size


def _changed_arrays(
    recipe: Recipe, leaves: Mapping[str, Any], source: Source
) -> dict[str, np.ndarray]:
    """Returns the arrays whose leaves have changed since they were adopted."""
    new: dict[str, np.ndarray] = {}

    def read(name: str) -> np.ndarray:
        return source.entries[name].read()

    changed = []
    for path, pieces in recipe.items():
        value = np.asarray(leaves[path])
        before = assemble_leaf(path, value.shape, value.dtype, pieces, read)
        if before.tobytes() != value.tobytes():  # else they are its bytes, regardless of rounding
            _undo_leaf(value, pieces, read, new)
            changed.append(path)
    for path in changed:
        _require_back(
            path, leaves[path], recipe[path], lambda name: new[name] if name in new else read(name)
        )
    return new


def _update_tied(tied: Mapping[str, str], new: dict[str, np.ndarray]) -> None:
    for name, first in tied.items():
        changed = new.get(first, new.get(name))
        if changed is not None:
            new[name] = new[first] = changed


def _undo_leaf(
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
            part = leaf_region(wide, piece)
            part -= np.asarray(apply_piece(read(piece.source), piece), wide.dtype).reshape(
                part.shape
            )
    for piece in pieces:
        if not piece.adds:
            if piece.source not in new:
                new[piece.source] = np.array(read(piece.source), order="C")
            into = new[piece.source]
            with np.errstate(over="ignore"):  # refused by `_require_back`
                floating = into.dtype.kind in "fV"
                undo_piece(wide if floating else wide.astype(into.dtype), piece, into)


def _require_back(
    path: str, leaf: Array, pieces: tuple[Piece, ...], read: Callable[[str], np.ndarray]
) -> None:
    """Checks that the written arrays restore the leaf, as far as their dtypes allow."""
    value, dtypes = np.asarray(leaf), [read(piece.source).dtype for piece in pieces]
    back = assemble_leaf(path, value.shape, value.dtype, pieces, read)
    if not is_inexact(value.dtype):
        good = back == value
    else:
        wide = np.complex128 if value.dtype.kind == "c" else np.float64
        value, back = value.astype(wide), back.astype(wide)
        terms = [np.abs(read(p.source).astype(wide)).max(initial=0) for p in pieces if p.adds]
        terms += [abs(step[1]) for p in pieces for step in p.steps if step[0] == "add"]
        facts = [jax.numpy.finfo(dtype) for dtype in (*dtypes, leaf.dtype)]
        room = 4 * max(float(each.eps) for each in facts) * (np.abs(value) + sum(terms))
        least = max(float(each.smallest_subnormal) for each in facts)
        with np.errstate(invalid="ignore"):  # infinities do not change
            good = (np.abs(back - value) <= room + least) | (back == value) | np.isnan(value)
            good &= np.isnan(back) == np.isnan(value)
            good &= np.isinf(back) == np.isinf(value)
    if not good.all():
        at = tuple(np.argwhere(~good)[0])
        raise AdoptionError(
            "A leaf cannot be stored in the dtype of its arrays.",
            where=path,
            got=f"{value[at]:.6g} becomes {back[at]:.6g}, in "
            f"{', '.join(dict.fromkeys(p.source for p in pieces))} of {dtypes[0]}",
            write="like= with arrays of a dtype that has room for these numbers",
        )


# --- writes arrays as files of safetensors, numpy or torch ----------------------------


Arrays = Mapping[str, np.ndarray]
_STORAGES = {dtype: name for name, dtype in TORCH_STORAGES.items()}

_DATE = (1980, 1, 1, 0, 0, 0)  # the same bytes whenever it is written
_ALIGNED = 64  # torch memory-maps storages that begin at multiples of this

_DICT = b"ccollections\nOrderedDict\n)R"
_BEGIN = b"\x80\x02" + _DICT + b"("  # torch's own pickles number their contents
_PICKLE = "archive/data.pkl"
_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"


def choose_writer(path: str | os.PathLike[str]) -> Callable[[Arrays, Mapping[str, Any]], None]:
    """A function that writes arrays and metadata to a path, atomically; chosen by its suffix."""
    file = Path(path)
    writer = _WRITERS.get(file.suffix.lower())
    if writer is None:
        raise InvalidArgumentError(
            "The format of the path is unsupported.",
            where="save_as",
            got=repr(os.fspath(path))[:200],
            write="a path that ends with .safetensors, .npz, .pt or .pth",
        )
    return lambda arrays, metadata: writer(file, arrays, metadata)


def _save_safetensors(path: Path, arrays: Arrays, metadata: Mapping[str, Any]) -> None:
    fixed = {
        name: metadata[name]
        for name in ("format", WRITTEN_AS)
        if isinstance(metadata.get(name), str)
    }
    stored = {name: to_stored(array) for name, array in arrays.items()}
    notes: dict[str, Note] = {name: note for name, (_, note) in stored.items() if note is not None}
    write_weights(path, {name: array for name, (array, _) in stored.items()}, notes, extra=fixed)


def _save_npz(path: Path, arrays: Arrays, metadata: Mapping[str, Any]) -> None:
    _require_dtypes("numpy", arrays, lambda dtype: dtype.kind in "biufc")
    with whole_file(path, own_files.recognize_npz, "save_as") as temporary:
        own_files.write_npz(temporary, arrays)


def _save_torch(path: Path, arrays: Arrays, metadata: Mapping[str, Any]) -> None:
    _require_dtypes("torch", arrays, lambda dtype: dtype.name in _STORAGES)
    with whole_file(path, _recognize_torch, "save_as") as temporary:
        _write_torch(temporary, arrays)


_WRITERS = {
    ".safetensors": _save_safetensors, ".npz": _save_npz, ".pt": _save_torch, ".pth": _save_torch,
}  # fmt: skip


def _require_dtypes(program: str, arrays: Arrays, knows: Callable[[np.dtype], bool]) -> None:
    for name, array in arrays.items():
        if not knows(array.dtype):
            raise UnsupportedDtypeError(
                f"Files of {program} have no place for an array of this dtype.",
                where=name,
                got=array.dtype,
                write="a path that ends with .safetensors",
            )


def _write_torch(path: Path, arrays: Arrays) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _write_member(archive, _PICKLE, _pickle_arrays(arrays))
        _write_member(archive, "archive/byteorder", b"little")
        for number, array in enumerate(arrays.values()):
            little = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
            _write_member(archive, f"archive/data/{number}", little.reshape(-1).view(np.uint8).data)
        _write_member(archive, "archive/version", b"3\n")


def _recognize_torch(path: Path) -> Belongs | None:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(_PICKLE) as file:
            return (lambda name: False) if file.read(len(_BEGIN)) == _BEGIN else None
    except (KeyError, *own_files.UNREADABLE_NPZ):
        return None


def _write_member(archive: zipfile.ZipFile, name: str, content: bytes | memoryview) -> None:
    info = zipfile.ZipInfo(name, _DATE)
    begin = archive.start_dir + 30 + len(name) + 20  # a header, and sizes of 64 bits
    padding = -(begin + 4) % _ALIGNED
    info.extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as file:
        file.write(content)


def _pickle_arrays(arrays: Arrays) -> bytes:
    parts = [_BEGIN]
    for number, (name, array) in enumerate(arrays.items()):
        strides = itertools.accumulate(
            array.shape[:0:-1], lambda stride, size: stride * max(size, 1), initial=1
        )
        steps = tuple(strides)[::-1][: array.ndim]
        kind = f"ctorch\n{_STORAGES[array.dtype.name]}\n".encode()
        storage = _pickle(("storage", kind, str(number), "cpu", array.size)) + b"Q"
        tensor = _pickle((storage, 0, array.shape, steps, b"\x89", _DICT))
        parts += [_pickle(name), _TENSOR, tensor, b"R"]
    return b"".join([*parts, b"u."])


def _pickle(value: bytes | tuple[Any, ...] | str | int) -> bytes:
    """The opcodes that make a tuple, a text or a number; bytes are opcodes already."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_pickle, value)) + b"t"
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(raw)) + raw
    assert isinstance(value, int)
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(raw)]) + raw
