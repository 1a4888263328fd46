"""Writes one file atomically, in a hidden sibling directory, as `directory` does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pax_export._foundations.errors import ExportPathError
from pax_export._foundations.files import (
    directory,
    overwrite_guard,
    stale_temporaries,
    system,
)
from pax_export._foundations.files.side_files import all_data_of_file, card_of_file, recognize_card


def check(path: Path, ours: overwrite_guard.Recognize | None) -> None:
    """Refuses, by an ExportPathError, a place that cannot take a file, before any work is done."""
    directory.require_local(path)
    try:
        _check_place(path, ours)
    except ExportPathError:
        raise
    except OSError as error:
        raise directory.unwritable_error(path, error) from error


def _check_place(path: Path, ours: overwrite_guard.Recognize | None) -> None:
    if path.is_dir() or path.name in ("", ".."):
        raise ExportPathError(
            "This export is one file, but the path is a directory.",
            where=str(path),
            write=f"the path of a file, e.g. {path / 'model'}",
        )
    if os.path.lexists(path):
        if ours is None:
            raise directory.existing_path_error(path)
        overwrite_guard.check_file(path, ours)
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise directory.unwritable_error(path, f"no directory that can be written to: {parent}")


@contextmanager
def replace_path(path: Path, ours: overwrite_guard.Recognize | None) -> Iterator[Path]:
    """Yields the path of a file that becomes ``path``, or replaces `ours`, if the block succeeds.

    Its card and external data are replaced, too.
    """
    check(path, ours)
    path = path.absolute()
    stale_temporaries.sweep(path.parent)
    old = set(all_data_of_file(path))
    with directory.temporary_sibling(path) as folder:
        temporary = folder / path.name  # in a directory, together with side files of a runtime
        yield temporary
        system.sync_all(folder)
        # Under their own names: until the file exists, they are not read.
        new = {each.replace(path.with_name(each.name)) for each in all_data_of_file(temporary)}
        try:
            _move_file(temporary, path, ours)
        except BaseException:
            _remove_files(new - old)
            raise
        card = card_of_file(temporary)
        if card.exists():
            _move_file(card, card_of_file(path), recognize_card)
        _remove_files(old - new)
        system.sync(path.parent)


def _remove_files(files: Iterable[Path]) -> None:
    for each in files:
        each.unlink(missing_ok=True)


def _move_file(temporary: Path, path: Path, ours: overwrite_guard.Recognize | None) -> None:
    directory.move_into_place(temporary, path, ours, overwrite_guard.check_file, Path.replace)
