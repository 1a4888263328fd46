"""A directory of checkpoints, written in the background."""

from __future__ import annotations

import math
import operator
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, SupportsFloat

import jax

from pax_export._foundations.check import checked_choice, checked_integer
from pax_export._foundations.errors import (
    CheckpointError,
    InvalidArgumentError,
    MissingCheckpointError,
)
from pax_export._foundations.files import atomic
from pax_export._foundations.files.own_files import files, format_names, some_names
from pax_export._foundations.files.system import as_path
from pax_export._foundations.types import AnyMesh
from pax_export.checkpoint import _orbax
from pax_export.checkpoint._checkpoint import Checkpoint, Restored, shardings_of
from pax_export.checkpoint._orbax import ABOUT, DELETED
from pax_export.checkpoint._saved import saved_trees
from pax_export.sharding import RulesLike


class Checkpoints:
    """A directory of checkpoints.

    `save` copies the arrays and writes them in the background; every process writes
    its own shards.  Checkpoints are atomic: a directory with the name of a step is
    complete.  All processes must make the same calls with the same steps and metrics.

    Args:
        directory: the path, created by the first `save`; it must be shared by all
            processes.
        keep: the number of latest checkpoints to keep; None keeps all.
        best: the name of a metric; the best checkpoint by it is kept, too.
        mode: ``"min"`` or ``"max"``, which value of the metric is best.
        asynchronous: if False, `save` returns when everything is written.

    Raises:
        InvalidArgumentError: an argument is invalid.

    Example:
        >>> import tempfile, pax_export as pax
        >>> with pax.checkpoint.Checkpoints(tempfile.mkdtemp(), keep=2, best="loss") as run:
        ...     for step, loss in enumerate([0.5, 0.1, 0.3, 0.2]):
        ...         run.save(step, model=pax.Linear(2, 3), metrics={"loss": loss})
        >>> run.steps, run.latest, run.best
        ((1, 2, 3), 3, 1)
        >>> state = run.restore(model=pax.Linear(2, 3))
        >>> state.step, state.metrics, type(state["model"]).__name__
        (3, {'loss': 0.2}, 'Linear')
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        asynchronous: bool = True,
    ):
        self.directory = Path(os.path.abspath(as_path(directory, "directory")))
        self._retention = Retention(keep, best, mode)
        self._asynchronous = asynchronous
        self._manager: Any = None
        self._open_path = ExitStack()
        self._metrics: dict[int, dict[str, float]] = {}
        self._writing: int | None = None
        if atomic.is_remote(directory):
            raise self._no_directory("a path of another machine")

    # --- contents ------------------------------------------------------------------

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of complete checkpoints, in order.

        Use `wait` to include one that is still being written.
        """
        try:
            names = [each.name for each in os.scandir(self.directory) if _is_checkpoint(each)]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise self._no_directory(error.strerror) from error
        return tuple(sorted(map(int, names)))

    @property
    def latest(self) -> int | None:
        """The last step, or None."""
        return max(self.steps, default=None)

    @property
    def best(self) -> int | None:
        """The step with the best metric, or None."""
        if self._retention.best is None:
            raise InvalidArgumentError(
                "The best checkpoint is unknown: no metric is given.",
                where=str(self.directory),
                write='Checkpoints(directory, best="loss")',
            )
        return self._retention.best_of({step: self._metrics_of(step) for step in self.steps})

    def open(self, step: int | None = None) -> Checkpoint:
        """Opens a checkpoint without reading arrays.

        Waits for a checkpoint that is still being written.

        Args:
            step: the step; the last one if None.

        Raises:
            MissingCheckpointError: (a FileNotFoundError) the checkpoint does not exist.
            CheckpointError: the checkpoint is corrupted.
        """
        if step is None or step == self._writing:
            self.wait()
        steps = self.steps
        if not steps or (step is not None and step not in steps):
            raise self._missing(step, steps)
        step = steps[-1] if step is None else operator.index(step)
        return Checkpoint(self.directory / str(step), step)

    # --- writing -------------------------------------------------------------------

    def save(
        self, step: int, *, metrics: Mapping[str, SupportsFloat] | None = None, **trees: Any
    ) -> None:
        """Saves trees by name.

        Returns after copying the arrays, so that they may be donated or changed.
        Waits for a previous save first; older checkpoints beyond `keep` are removed
        after the new one is complete.

        Args:
            step: the step, larger than all existing ones.
            metrics: numbers stored with the checkpoint.
            **trees: ``model=``, ``optimizer=``, ``loss_scale=``, ``rng=`` or any
                other names: pytrees of arrays, typed keys, numbers and strings.

        Raises:
            InvalidArgumentError: the step is not larger, the metric of ``best`` is
                missing, or there are no trees.
            InvalidArgumentTypeError: a leaf has an unsupported type.
            CheckpointError: (an OSError) this or the previous checkpoint could not
                be written, or the directory of the step is not a checkpoint.

        Example:
            >>> import jax, tempfile, pax_export as pax
            >>> with pax.checkpoint.Checkpoints(tempfile.mkdtemp()) as run:
            ...     run.save(7, model=pax.Linear(2, 3), rng=jax.random.key(0), data={"epoch": 2})
            >>> run.restore(rng=jax.random.key(1), data={"epoch": 0})["data"]
            {'epoch': 2}
        """
        step = self._checked_step(step)
        numbers = self._retention.checked(metrics)
        arrays, about = saved_trees(trees)
        self.wait()
        self._refuse_old(step)
        manager = self._opened()
        self._metrics[step] = numbers
        self._writing = step
        try:
            _orbax.start_save(manager, step, arrays, {"metrics": numbers, "trees": about})
        except Exception as error:  # orbax and its dependencies have no common error class
            raise self._unwritten(error) from error

    def wait(self) -> None:
        """Waits until the last checkpoint is written.

        Raises:
            CheckpointError: (an OSError) it could not be written, or the smallest array of one of
                its trees cannot be read back.
        """
        if self._manager is None:
            return
        try:
            _orbax.wait_for_save(self._manager)
        except Exception as error:  # the same, of the thread that writes
            raise self._unwritten(error) from error
        step, self._writing = self._writing, None
        self._remove_deleted()
        if step is not None:
            Checkpoint(self.directory / str(step), step).try_to_read()

    def close(self) -> None:
        """Waits for the last checkpoint, and ends the writer threads.

        A program that exits without `close` or `wait` may lose the last checkpoint.

        Raises:
            CheckpointError: see `wait`.
        """
        try:
            self.wait()
        finally:
            manager, self._manager = self._manager, None
            if manager is not None:
                manager.close()
            self._open_path.close()

    def delete(self, step: int) -> None:
        """Removes a checkpoint.

        Raises:
            MissingCheckpointError: the checkpoint does not exist.
            CheckpointError: its directory contains other files.
        """
        self.wait()
        path = self.directory / str(step)
        strange = strange_files(path) if path.is_dir() else []
        if not strange and step not in self.steps:
            raise self._missing(step, self.steps)
        if strange:
            raise CheckpointError(
                "The directory of this step is not deleted: it has other files.",
                where=str(path),
                got=format_names(strange),
                write="delete it yourself, or move these files elsewhere",
            )
        self._opened().delete(step)
        self._metrics.pop(step, None)
        self._remove_deleted()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- reading -------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        mesh: AnyMesh | None = None,
        rules: RulesLike = None,
        strict: bool = True,
        **targets: Any,
    ) -> Restored:
        """Restores trees, matching arrays by name.

        Only the requested trees are read.

        Args:
            step: the step; the last one if None.
            mesh: the mesh of the restored arrays, which may differ from that of the
                saving run; if None, the arrays get the shardings of the targets.
            rules: the sharding rules of the tree ``model``, as for
                `pax_export.sharding.shard`; other trees follow it.
            strict: require exactly the saved leaves, with the same shapes and dtypes.
                Otherwise matching leaves are loaded, the target keeps the others, and
                ``report`` lists them.
            **targets: the target of each tree: a tree of arrays, or of shapes,
                ``jax.eval_shape(make_model)``, which may have shardings.

        Returns:
            The trees by name, with the step, metrics and a report.

        Raises:
            MissingCheckpointError: (a FileNotFoundError) the checkpoint does not exist.
            WeightsMismatchError: (a ValueError and a KeyError) with strict, leaves are
                missing, unexpected, or have other shapes or dtypes; the message lists
                all of them.
            ShardingError: (a ValueError) the rules do not match.
            CheckpointError: (an OSError) the checkpoint is corrupted.

        Example:
            >>> import jax, tempfile, pax_export as pax
            >>> with pax.checkpoint.Checkpoints(tempfile.mkdtemp()) as run:
            ...     run.save(0, model=pax.Linear(2, 3))
            >>> state = run.restore(model=jax.eval_shape(lambda: pax.Linear(2, 3)))
            >>> state["model"].weight.shape
            (2, 3)
            >>> state = run.restore(model=pax.Linear(2, 4), strict=False)
            >>> state.report.mismatched["model.bias"]
            'float32[3] in the file, float32[4] in the module'
        """
        return self.open(step).restore(targets, shardings_of(targets, mesh, rules), strict)

    # --- helpers -------------------------------------------------------------------

    def _opened(self) -> Any:
        """Returns the orbax manager, created on first write."""
        if self._manager is None:
            _orbax.require_orbax()
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._remove_deleted()
                path = self._open_path.enter_context(_orbax.plain_path(self.directory))
                self._manager = _orbax.make_manager(path, self._steps_to_keep, self._asynchronous)
            except CheckpointError:
                raise
            except OSError as error:
                raise self._no_directory(error.strerror) from error
        return self._manager

    def _steps_to_keep(self, steps: Sequence[int]) -> Sequence[int]:
        """Returns the steps to keep, including directories with other files."""
        if self._retention.last is None:
            return steps
        strange = [step for step in steps if step != self._writing and self._is_strange(step)]
        own = {step: self._metrics_of(step) for step in steps if step not in strange}
        return [*strange, *self._retention.steps(own)]

    def _is_strange(self, step: int) -> bool:
        path = self.directory / str(step)
        try:
            return not _is_checkpoint(path) or bool(strange_files(path))
        except OSError:
            return True

    def _metrics_of(self, step: int) -> dict[str, float]:
        if step not in self._metrics:
            try:
                self._metrics[step] = self.open(step).metrics
            except CheckpointError:  # a corrupted one is not the best, and does not prevent saving
                self._metrics[step] = {}
        return self._metrics[step]

    def _remove_deleted(self) -> None:
        if jax.process_index() == 0:
            remove_deleted(self.directory)

    def _checked_step(self, step: int) -> int:
        write = "checkpoints.save(100, model=model)"
        return checked_integer(step, "step", 0, what="The step of a checkpoint", write=write)

    def _refuse_old(self, step: int) -> None:
        steps = self.steps
        later = [other for other in steps if other >= step]
        if step not in steps and (self.directory / str(step)).exists():
            raise CheckpointError(
                "A checkpoint of this step would replace a directory that is not a checkpoint.",
                where=str(self.directory / str(step)),
                write="another step, or another directory",
            )
        if later:
            raise InvalidArgumentError(
                "Training would resume from this or a later checkpoint of the directory.",
                where=str(self.directory),
                got=f"step {step} after {', '.join(map(str, later))}",
                write=f"checkpoints.delete({later[-1]}) and so on, or another directory",
            )

    def _missing(self, step: int | None, steps: Sequence[int]) -> MissingCheckpointError:
        there = some_names(self.directory) if self.directory.is_dir() else "no such directory"
        return MissingCheckpointError(
            "The directory has no checkpoint, or none of this step.",
            where=str(self.directory),
            got=f"step {step!r}, found {', '.join(map(str, steps)) or there}",
            write="a step of Checkpoints(...).steps, or None for the last one",
        )

    def _no_directory(self, reason: str | None) -> CheckpointError:
        return CheckpointError(
            "Checkpoints cannot be stored here.",
            where=str(self.directory),
            got=reason,
            write="a writable directory, or one that does not exist yet",
        )

    def _unwritten(self, error: Exception) -> CheckpointError:
        step, self._writing = self._writing, None
        self._metrics.pop(step, None) if step is not None else None
        return CheckpointError(
            f"The checkpoint of step {step} was not written.",
            where=str(self.directory),
            got=_orbax.first_line(error),
            write="a writable directory with room; all processes again, if one was lost",
        )


#: Files that orbax writes next to the trees of a step, and in each tree.
_OF_STEP = re.compile(rf"_CHECKPOINT_METADATA|commit_success\.txt|{ABOUT}/[^/]+")
_OF_TREE = re.compile(
    r"[^/]+/(_METADATA|_sharding|commit_success\.txt|array_metadatas/process_\d+"
    r"|(ocdbt\.process_[^/]+/)?(manifest\.ocdbt|d/[^/]+))"
)


def _is_checkpoint(path: os.DirEntry[str] | Path) -> bool:
    """Returns whether a directory is a checkpoint, perhaps a damaged one, by its name and files."""
    if not (path.name.isdecimal() and path.name.isascii()):
        return False
    return any(os.path.exists(os.path.join(path, each)) for each in (ABOUT, "_CHECKPOINT_METADATA"))


def strange_files(step: Path) -> list[str]:
    """Returns the files in a step's directory that are not part of a checkpoint."""
    names = list(files(step))
    if not (step / ABOUT).is_dir():
        return names
    return [name for name in names if not (_OF_STEP.fullmatch(name) or _OF_TREE.fullmatch(name))]


def remove_deleted(directory: Path) -> None:
    """Removes the checkpoints that were moved away for deletion."""
    folder = directory / DELETED
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.isdecimal():
                shutil.rmtree(folder / name, ignore_errors=True)
        folder.rmdir()


@dataclass(frozen=True)
class Retention:
    """A retention policy."""

    last: int | None  # how many of the last ones; None for all
    best: str | None  # the metric by which the best one stays
    mode: Literal["min", "max"]  # whether the smallest or the largest is the best

    def __post_init__(self) -> None:
        if self.last is not None:
            checked_integer(self.last, "keep", 1, write="keep=3, or keep=None for all")
        checked_choice(self.mode, ("min", "max"), "mode")

    def checked(self, metrics: Mapping[str, SupportsFloat] | None) -> dict[str, float]:
        """Returns the metrics as numbers; raises if the metric of `best` is missing."""
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        if self.best is not None and self.best not in numbers:
            raise InvalidArgumentError(
                "The checkpoint lacks the metric by which the best one is kept.",
                where=f"best={self.best!r}",
                got=f"metrics with {', '.join(numbers) or 'nothing'}",
                write=f"save(step, metrics={{{self.best!r}: ...}}, ...)",
            )
        return numbers

    def best_of(self, metrics: Mapping[int, Mapping[str, float]]) -> int | None:
        """Returns the best step, the latest of equal ones, ignoring missing metrics and NaN."""
        if self.best is None:
            return None
        sign = -1 if self.mode == "min" else 1
        values = {step: each.get(self.best, math.nan) for step, each in metrics.items()}
        rated = [(sign * value, step) for step, value in values.items() if not math.isnan(value)]
        return max(rated)[1] if rated else None

    def steps(self, metrics: Mapping[int, Mapping[str, float]]) -> Sequence[int]:
        """Returns the steps to keep."""
        ordered = sorted(metrics)
        steps = ordered if self.last is None else ordered[-self.last :]
        best = self.best_of(metrics)
        return steps if best is None or best in steps else [best, *steps]
