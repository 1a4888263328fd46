"""The interface to orbax-checkpoint, by its public API.

A checkpoint of step 100 is a directory:

    100/model/       arrays by their dotted names, one flat dict
    100/optimizer/   likewise; one directory for each tree
    100/about/       JSON: metrics, and the original dtype and shape of each leaf

orbax writes to a temporary name, and renames it when every process has
written its shards, so a directory named by a number is complete.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Sharding

from pax_export._foundations.errors import CheckpointError
from pax_export._foundations.optional import require

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager
    from orbax.checkpoint.checkpoint_managers import PreservationContext

#: Glob characters, which orbax misreads in the path of a checkpoint.
PATTERN = frozenset("*?[]\\")

#: Another path to a directory that is open; only Linux has it.
OPEN = "/proc/self/fd/{}"

#: The name of the JSON tree, reserved.
ABOUT = "about"

#: Where checkpoints wait to be deleted: moved there in one step, so that a
#: process killed while it deletes leaves no partial one.
DELETED = ".deleted"

#: The start of a tree's arrays, after the data of all processes are merged.
MERGED = "manifest.ocdbt"

#: ``(steps) -> those to keep``
Keep = Callable[[Sequence[int]], Iterable[int]]


def first_line(error: BaseException) -> str:
    """The class of an error of orbax, and the beginning of what it says."""
    text = str(error).split(" [tensorstore_spec=")[0]
    lines = [line for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:400]


def require_orbax() -> Any:
    """Imports orbax.checkpoint, or raises an error that names the extra."""
    return require("orbax.checkpoint", "checkpoint", "Checkpoints")


@dataclass(frozen=True)
class _Preservation:
    """The preservation policy that orbax queries after each save."""

    keep: Keep

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: PreservationContext
    ) -> Sequence[bool]:
        steps = set(self.keep([each.step for each in checkpoints]))
        return [each.step in steps for each in checkpoints]


def make_manager(directory: Path, keep: Keep, asynchronous: bool) -> CheckpointManager:
    """Returns an orbax manager, and removes incomplete checkpoints of killed processes."""
    ocp = require_orbax()
    return ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(
            cleanup_tmp_directories=True,
            preservation_policy=_Preservation(keep),
            enable_async_checkpointing=asynchronous,
            todelete_subdir=DELETED,
        ),
    )


@contextmanager
def plain_path(directory: Path) -> Iterator[Path]:
    """Context manager for a path to a directory without glob characters, which orbax interprets."""
    if not PATTERN & set(directory.as_posix()):
        yield directory
        return
    if not Path(OPEN).parent.is_dir():
        raise CheckpointError(
            "orbax interprets the path of this checkpoint as a pattern.",
            where=str(directory),
            got=f"a path with {' '.join(sorted(PATTERN & set(directory.as_posix())))}",
            write="a path without these characters, in any of its directories",
        )
    handle = os.open(directory, os.O_RDONLY)
    try:
        yield Path(OPEN.format(handle))
    finally:
        os.close(handle)


class _SaveLock:
    """Serializes the saves of a process: orbax numbers its saves globally, and two at once hang."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: CheckpointManager | None = None

    @contextmanager
    def of(self, manager: CheckpointManager) -> Iterator[None]:
        """Waits for another manager's save, without raising its error."""
        with self._lock:
            if self._last is not None and self._last is not manager:
                with suppress(Exception):  # whoever saved there hears of it from `finish`
                    self._last.wait_until_finished()
            self._last = manager
            yield

    def finish(self, manager: CheckpointManager) -> None:
        """Waits for this manager's save."""
        with self._lock:
            if self._last is manager:
                self._last = None
            manager.wait_until_finished()


_turns = _SaveLock()
wait_for_save = _turns.finish


def start_save(
    manager: CheckpointManager, step: int, trees: Mapping[str, Any], about: Mapping[str, Any]
) -> None:
    """Starts writing a checkpoint of nonempty trees (tree -> name -> array) and JSON."""
    args = require_orbax().args
    items = {tree: args.PyTreeSave(arrays) for tree, arrays in trees.items()}
    items[ABOUT] = args.JsonSave(about)
    with _turns.of(manager):
        manager.save(step, args=args.Composite(**items), force=True)


def read_about(directory: Path) -> dict[str, Any]:
    """Reads the JSON of a checkpoint."""
    ocp = require_orbax()
    with plain_path(directory) as path, ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        return reader.restore(path / ABOUT)


def read_arrays(directory: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Reads arrays of one tree: local shards as jax arrays, or numpy where the sharding is None."""
    ocp = require_orbax()

    def how(sharding: Sharding) -> Any:
        if sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)

    args = ocp.args.PyTreeRestore(
        item=dict.fromkeys(wanted, 0),  # only the names count
        restore_args={name: how(sharding) for name, sharding in wanted.items()},
        partial_restore=True,
    )
    with plain_path(directory) as path, ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(path, args=args)
