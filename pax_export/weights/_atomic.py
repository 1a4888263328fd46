"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pax_export._errors import WeightsFileError


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Gives an empty file that becomes ``path`` if the block succeeds.

    What stands at ``path`` is replaced in one step, after all bytes have reached
    the disk.  A process that dies before leaves the old file as it was, and
    perhaps a hidden sibling that ends in ``.part``.

    Raises:
        WeightsFileError: the file cannot be written here.
    """
    target = Path(os.path.realpath(path))  # a link stays; what it leads to is replaced
    if target.is_dir():
        raise WeightsFileError(
            "A file of weights cannot take the place of a directory.",
            where=str(path),
            write=f"the path of a file, e.g. {path / 'weights.safetensors'}",
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(
            prefix=f".{target.name}.", suffix=".part", dir=target.parent
        )
    except OSError as error:
        raise _unwritable(path, error) from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(_mode(target))
        _flush(temporary)
        temporary.replace(target)
        with suppress(OSError):  # not every file system can flush a directory
            _flush(target.parent)
    except OSError as error:
        raise error if isinstance(error, WeightsFileError) else _unwritable(path, error) from error
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def _unwritable(path: Path, error: OSError) -> WeightsFileError:
    return WeightsFileError(
        "The weights cannot be written here.",
        where=str(path),
        got=error.strerror or error,
        write="a path in a directory that you may write to, on a disk with room",
    )


def _mode(target: Path) -> int:
    """The permissions of the file that is replaced, or those of any new file."""
    with suppress(FileNotFoundError):
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _flush(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
