"""A directory of functions that `jax.export` has serialised, one file for each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from jax import export as jax_export

from pax_export._errors import ExportPathError
from pax_export._files import directory as _directory

_SUFFIX = ".jax_exported"


def save_jax_exported_map(
    dir_path: str | os.PathLike[str],
    jax_exported_map: Mapping[str, jax_export.Exported],
    *,
    vjp_order: int = 0,
) -> None:
    """Writes exported functions into a new directory, all or none of them.

    Args:
        dir_path: the directory; it must not exist.
        jax_exported_map: the functions by their keys.
        vjp_order: how often they can be differentiated after loading.

    Raises:
        ExportPathError: the directory exists already.

    Example:
        >>> save_jax_exported_map(folder, module.obm_module_to_jax_exported_map(x))
        ... # doctest: +SKIP
    """
    path = Path(dir_path)
    if path.exists():
        raise ExportPathError(f"Directory {dir_path} already exists.", write="another path")
    with _directory.replaced(path, overwrite=False) as directory:
        for key, exported in jax_exported_map.items():
            (directory / f"{key}{_SUFFIX}").write_bytes(exported.serialize(vjp_order=vjp_order))


def load_jax_exported_map(dir_path: str | os.PathLike[str]) -> dict[str, jax_export.Exported]:
    """Reads what `save_jax_exported_map` wrote.

    Raises:
        ExportPathError: there is no such directory, or a file of it is damaged.

    Example:
        >>> load_jax_exported_map(folder)  # doctest: +SKIP
    """
    path = Path(dir_path)
    if not path.is_dir():
        raise ExportPathError(f"Directory {dir_path} does not exist.")
    files = sorted(path.glob(f"*{_SUFFIX}"))
    if not files:
        raise ExportPathError(f"No {_SUFFIX} files found in {dir_path}.")
    return {file.name.removesuffix(_SUFFIX): _read(file) for file in files}


def _read(file: Path) -> jax_export.Exported:
    try:
        return jax_export.deserialize(bytearray(file.read_bytes()))
    except Exception as error:  # of damaged bytes jax says StopIteration, and no more
        raise ExportPathError(
            "This file cannot be read as an exported function.",
            where=file.name,
            got=f"{type(error).__name__}: {error}",
        ) from error
