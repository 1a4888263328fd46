"""The only file that calls orbax-checkpoint, through its public names.

A checkpoint of step 100 is a directory:

    100/model/       arrays by their dotted names, one flat dict
    100/optimizer/   likewise; one directory for each tree
    100/about/       JSON: metrics, and what each leaf was

orbax writes it under another name and renames it when every process has
written its shards, so a directory named by a number is complete.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pax_export._errors import CheckpointError
from pax_export._optional import require

#: What orbax takes for a pattern in the path of a checkpoint, and then finds nothing.
PATTERN = frozenset("*?[]\\")

#: Another path to a directory that is open.
OPEN = "/proc/self/fd/{}"

#: The tree of JSON; no tree of arrays may have this name.
ABOUT = "about"

#: Where checkpoints wait to be deleted: moved there in one step, so that a
#: process killed while it deletes leaves no half of one behind.
DELETED = ".deleted"

#: Where the arrays of a tree begin, once what all processes wrote is put together.
MERGED = "manifest.ocdbt"

#: ``(steps) -> those to keep``
Keep = Callable[[Sequence[int]], Iterable[int]]


def orbax() -> Any:
    """orbax.checkpoint, or an error that names the extra which brings it."""
    return require("orbax.checkpoint", "checkpoint", "Checkpoints")


@dataclass(frozen=True)
class _Preservation:
    """What orbax asks after each save: which checkpoints stay."""

    keep: Keep

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        kept = set(self.keep([each.step for each in checkpoints]))
        return [each.step in kept for each in checkpoints]


def manager(directory: Path, keep: Keep, asynchronous: bool) -> Any:
    """What writes checkpoints; removes what a killed process has left half-written."""
    ocp = orbax()
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
def plain(directory: Path) -> Iterator[Path]:
    """A path to a directory that orbax does not take for a pattern, for the time of a block.

    orbax looks for the files that it has written by patterns that begin with the path.  Linux
    has another path for each directory that is open.
    """
    if not PATTERN & set(str(directory)):
        yield directory
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        other = Path(OPEN.format(handle))
        if not other.is_dir():
            raise CheckpointError(
                "orbax takes the path of this checkpoint for a pattern.",
                where=str(directory),
                got=f"a path with {' '.join(sorted(PATTERN & set(str(directory))))}",
                write="a path without these characters, in any of its directories",
            )
        yield other
    finally:
        os.close(handle)


class _Turns:
    """One save at a time in a process: orbax numbers them, and all its threads ask for the last.

    Two at once take each other's signals, and fail or wait for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Any = None

    @contextmanager
    def of(self, manager: Any) -> Iterator[None]:
        """Waits until what another manager writes is on the disk; its own error stays its own."""
        with self._lock:
            if self._last is not None and self._last is not manager:
                with suppress(Exception):
                    self._last.wait_until_finished()
            self._last = manager
            yield

    def finish(self, manager: Any) -> None:
        """Waits for what this manager writes."""
        with self._lock:
            if self._last is manager:
                self._last = None
            manager.wait_until_finished()


_turns = _Turns()


def save(manager: Any, step: int, trees: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Starts to write a checkpoint: tree -> name -> array, at least one in each, and JSON."""
    args = orbax().args
    items = {tree: args.PyTreeSave(arrays) for tree, arrays in trees.items()}
    items[ABOUT] = args.JsonSave(about)
    with _turns.of(manager):
        manager.save(step, args=args.Composite(**items), force=True)


def wait(manager: Any) -> None:
    """Returns when what was saved is on the disk."""
    _turns.finish(manager)


def about(directory: Path) -> dict[str, Any]:
    """The JSON of one checkpoint."""
    ocp = orbax()
    with plain(directory) as path, ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        return reader.restore(path / ABOUT)


def read(directory: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Reads arrays of one tree, and no others.

    A sharding makes an array of jax that reads its own shards only, None one of numpy.
    """
    ocp = orbax()

    def how(sharding: Any) -> Any:
        if sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)

    args = ocp.args.PyTreeRestore(
        item=dict.fromkeys(wanted, 0),  # only the names count
        restore_args={name: how(sharding) for name, sharding in wanted.items()},
        partial_restore=True,
    )
    with plain(directory) as path, ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(path, args=args)
