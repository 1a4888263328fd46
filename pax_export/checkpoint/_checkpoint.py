"""Reading one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from pax_export._foundations.errors import CheckpointError, WeightsMismatchError
from pax_export._foundations.types import AnyMesh, Array
from pax_export.checkpoint import _orbax
from pax_export.checkpoint._saved import (
    LeafEntry,
    StoredArray,
    array_checksum,
    full_name,
    is_plain,
    name_leaves,
)
from pax_export.sharding import RulesLike, following, shardings_of_leaves
from pax_export.weights import (
    LoadReport,
    chosen_sharding,
    compare_leaves,
    mismatch_error,
    refuse_narrowing,
    require_shape,
)


class Checkpoint:
    """An open checkpoint: its structure and metrics, without its arrays.

    Returned by `Checkpoints.open`.

    Attributes:
        step: the step number.
        directory: the path of the checkpoint.
        metrics: the metrics saved with it.

    Example:
        >>> import jax, tempfile, pax_export as pax
        >>> with pax.checkpoint.Checkpoints(tempfile.mkdtemp()) as checkpoints:
        ...     checkpoints.save(10, model=pax.Linear(2, 3))
        >>> checkpoint = checkpoints.open()
        >>> checkpoint.trees
        ('model',)
        >>> for name, what in checkpoint.leaves.items():
        ...     print(name, what)
        model.weight float32[2,3]
        model.bias float32[3]
    """

    def __init__(self, directory: Path, step: int):
        self.directory = directory
        self.step = step
        try:
            about = _orbax.read_about(directory)
            self.metrics: dict[str, float] = dict(about["metrics"])
            self._entries: dict[str, dict[str, LeafEntry]] = {
                tree: {name: LeafEntry.from_json(fields) for name, fields in leaves.items()}
                for tree, leaves in about["trees"].items()
            }
        except Exception as error:  # orbax and its dependencies have no common error class
            raise _damaged(directory, error) from error

    @property
    def trees(self) -> tuple[str, ...]:
        """The names of the saved trees."""
        return tuple(self._entries)

    @property
    def leaves(self) -> dict[str, str]:
        """The shape and dtype of each leaf by dotted name."""
        return {
            full_name(tree, name): str(entry.description)
            for tree, entries in self._entries.items()
            for name, entry in entries.items()
        }

    def on_disk(self, tree: str, target: object) -> Any:
        """Returns a tree whose arrays are read from disk on use.

        `pax_export.export.to_saved_model` reads the arrays of such a module one at a
        time, and needs up to three times the size of the largest.

        Args:
            tree: the name of the saved tree.
            target: a tree with its structure, e.g. ``jax.eval_shape(make_model)``.

        Returns:
            The target, with a `StoredArray` for each array.

        Raises:
            WeightsMismatchError: the checkpoint is from another model.

        Example:
            >>> import jax, tempfile, pax_export as pax
            >>> with pax.checkpoint.Checkpoints(tempfile.mkdtemp()) as checkpoints:
            ...     checkpoints.save(10, model=pax.Linear(2, 3))
            >>> shapes = jax.eval_shape(lambda: pax.Linear(2, 3))
            >>> checkpoints.open().on_disk("model", shapes).weight
            StoredArray(model.weight: float32[2, 3])
        """
        leaves = name_leaves(tree, target)
        self.compared({tree: leaves}, strict=True)
        values = [self._stored(tree, name, leaf) for name, leaf in leaves.items()]
        return jax.tree_util.tree_structure(target).unflatten(values)

    def _stored(self, tree: str, name: str, leaf: Array | jax.ShapeDtypeStruct) -> Any:
        entry = self._entries[tree][name]
        if not entry.on_disk:
            return entry.without_array()

        def read() -> Any:
            return entry.restored(self._arrays(tree, {name: None})[name])

        return StoredArray(full_name(tree, name), tuple(leaf.shape), leaf.dtype, read)

    def restore(
        self, targets: Mapping[str, Any], shardings: Mapping[str, Any], strict: bool
    ) -> Restored:
        """Restores trees, as `Checkpoints.restore` does.

        Args:
            targets: the target of each tree by name.
            shardings: for each tree, a sharding or None per leaf in tree order; other
                trees get the shardings of the target.
            strict: whether each tree must have exactly the leaves on disk.
        """
        leaves = {tree: name_leaves(tree, target) for tree, target in targets.items()}
        report = self.compared(leaves, strict)
        fitting = set(report.loaded)
        trees = {}
        for tree, target in targets.items():
            own = leaves[tree]
            places = dict(zip(own, shardings.get(tree, [None] * len(own))))
            chosen = {name: own[name] for name in own if full_name(tree, name) in fitting}
            values = {**own, **self._read(tree, chosen, places)}
            trees[tree] = jax.tree_util.tree_structure(target).unflatten(values.values())
        return Restored(trees, self.step, self.metrics, report)

    def compared(self, leaves: Mapping[str, Mapping[str, Any]], strict: bool) -> LoadReport:
        """Compares the leaves of targets with those on disk; raises for differences if strict."""
        wanted, there = {}, {}
        for tree, own in leaves.items():
            for name, leaf in own.items():
                if not is_plain(leaf):
                    what = "Restoring needs a tree of arrays"
                    require_shape(full_name(tree, name), leaf, what)
                wanted[full_name(tree, name)] = LeafEntry.of(leaf).description
            for name, entry in self._entries.get(tree, {}).items():
                there[full_name(tree, name)] = entry.description
        report = compare_leaves(wanted, there)
        unknown = [tree for tree, own in leaves.items() if own and tree not in self._entries]
        if strict and unknown:
            error = WeightsMismatchError(
                "The checkpoint has no tree with this name.",
                where=str(self.directory),
                got=f"{', '.join(unknown)}; it has {', '.join(self.trees)}",
                write=f"restore({self.trees[0]}=...)",
            )
            error.report = report
            raise error
        if strict and not report.complete:
            raise mismatch_error(
                "The checkpoint does not match the target",
                report,
                where=f"{self.directory}, which has {', '.join(self.trees)}",
                write="the saved structure, or restore(..., strict=False) to load matching leaves",
            )
        return report

    def try_to_read(self) -> None:
        """Reads the smallest array of each tree to test the checkpoint.

        For checkpoints of several processes, only checks that all parts are present, since
        reading would involve all processes.
        """
        for tree, entries in self._entries.items():
            sizes = {name: each.size for name, each in entries.items() if each.on_disk}
            if sizes and jax.process_count() == 1:
                self._arrays(tree, {min(sizes, key=sizes.__getitem__): None})
            elif sizes and not (self.directory / tree / _orbax.MERGED).exists():
                raise _damaged(self.directory / tree, FileNotFoundError(f"no file {_orbax.MERGED}"))

    def _read(
        self, tree: str, leaves: Mapping[str, Any], places: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Reads leaves with the types and shardings of the target."""
        entries = self._entries.get(tree, {})
        wanted = {
            name: sharding_to_read(full_name(tree, name), own, entries[name], places[name])
            for name, own in leaves.items()
            if entries[name].on_disk
        }
        arrays = self._arrays(tree, wanted)
        values = {}
        for name, own in leaves.items():
            entry = entries[name]
            value = entry.restored(arrays[name]) if name in arrays else entry.without_array()
            values[name] = value if is_plain(own) else put_array(value, own, places[name])
        return values

    def _arrays(self, tree: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Reads stored arrays with the given shardings; None reads a numpy array."""
        if not wanted:
            return {}
        try:
            arrays = _orbax.read_arrays(self.directory / tree, wanted)
        except Exception as error:  # as above; a mistake of ours would be called damage
            alone = len(wanted) == 1
            where = self._described(tree, next(iter(wanted))) if alone else self.directory / tree
            raise _damaged(where, error) from error
        for name, array in arrays.items():
            saved, found = self._entries[tree][name].checksum, array_checksum(array)
            if found is not None and saved not in (None, found):
                differs = ValueError(f"the checksum is {found}, expected {saved}")
                raise _damaged(self._described(tree, name), differs)
        return arrays

    def _described(self, tree: str, name: str) -> str:
        what = self._entries[tree][name].description
        return f"{full_name(tree, name)}: {what}, in {self.directory / tree}"


def _damaged(where: str | Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        "The checkpoint is damaged or incomplete.",
        where=str(where),
        got=_orbax.first_line(error),
        write="another step; Checkpoints(...).steps lists them",
    )


# --- restored arrays where a target or rules say --------------------------------------


class Restored(dict[str, Any]):
    """The result of `Checkpoints.restore`: the trees by name, and a report.

    Attributes:
        step: the step of the checkpoint.
        metrics: the metrics saved with it.
        report: the names of loaded and of mismatched leaves.

    Example:
        >>> from pax_export.checkpoint import Restored
        >>> from pax_export.weights import LoadReport
        >>> state = Restored({"rng": 0}, 10, {"loss": 0.5}, LoadReport(("rng",), (), (), {}))
        >>> state["rng"], state.step, state.report.complete
        (0, 10, True)
    """

    def __init__(
        self, trees: Mapping[str, Any], step: int, metrics: Mapping[str, float], report: LoadReport
    ):
        super().__init__(trees)
        self.step = step
        self.metrics = dict(metrics)
        self.report = report


def sharding_to_read(
    name: str, own: Array | jax.ShapeDtypeStruct, entry: LeafEntry, sharding: Sharding | None
) -> Any:
    """Returns the sharding for reading an array; None to read it as numpy first."""
    if isinstance(own, (np.ndarray, np.generic)):
        return None
    refuse_narrowing(name, own)
    return None if entry.stored_as_another else sharding or chosen_sharding(own)


def put_array(array: Array, own: Array | jax.ShapeDtypeStruct, sharding: Sharding | None) -> Any:
    """Converts a restored array to the type and sharding of the target's leaf."""
    if isinstance(own, np.generic):
        return array[()]
    if isinstance(own, np.ndarray):
        return array.astype(own.dtype, copy=False)
    if isinstance(array, jax.Array) and array.committed:
        return array  # read as shards already
    sharding = sharding or chosen_sharding(own)
    return jax.device_put(array) if sharding is None else jax.device_put(array, sharding)


#: The tree whose rules also apply to the others.
MODEL = "model"


def shardings_of(
    targets: Mapping[str, Any], mesh: AnyMesh | None, rules: RulesLike
) -> dict[str, list[Any]]:
    """Returns the shardings of the leaves of each tree in tree order; empty without a mesh."""
    if mesh is None and rules is None:
        return {}
    places = {}
    for tree, target in targets.items():
        follows = tree != MODEL and MODEL in targets
        chosen = following(targets[MODEL], rules) if follows else rules
        # Rules need shapes, which Python numbers have not.
        shapes = jax.tree_util.tree_map(
            lambda leaf: np.zeros((), np.int32) if is_plain(leaf) else leaf, target
        )
        places[tree] = shardings_of_leaves(shapes, mesh, chosen)
    return places
