"""``pax-export inspect`` and ``diff``: describe exports without loading them."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pax_export.cli._command import (
    DONE,
    Commands,
    add_command,
    add_shared_options,
    escape_controls,
    print_result,
)


def add(commands: Commands) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = add_command(
        commands, "inspect", _run_inspect, "describe an export",
        "Shows signatures, variables, sizes, versions and the oldest TensorFlow of an export, "
        "without loading it.  Third-party SavedModels are supported, too.",
    )  # fmt: skip
    parser.add_argument("path", metavar="DIR", help="the path of the export, a directory or a file")
    add_shared_options(parser, "json")
    parser.add_argument(
        "--flops",
        action="store_true",
        help="print the table of pax.inspect instead, with the FLOPs of a call; requires jax",
    )


def add_diff(commands: Commands) -> None:
    """Adds ``pax-export diff``, which prints the differences of two exports."""
    parser = add_command(
        commands, "diff", _run_diff, "compare two exports",
        "Prints which arrays of two exports were added, dropped, reshaped, retyped or changed in "
        "value.  Neither is loaded.",
    )  # fmt: skip
    parser.add_argument("first", metavar="DIR", help="the path of an export, a directory or a file")
    parser.add_argument("second", metavar="DIR", help="the path of another one")
    add_shared_options(parser, "json")


def _run_diff(options: argparse.Namespace) -> int:
    from pax_export import inspection

    found = inspection.diff(options.first, options.second)
    print_result(options, lambda: asdict(found), escape_controls(str(found)))
    return DONE


def _run_inspect(options: argparse.Namespace) -> int:
    if options.flops:
        from pax_export.inspection import inspect  # which imports jax

        table = inspect(options.path)
        print_result(options, table.to_dict, escape_controls(str(table)))
    else:
        found = _read_description(Path(options.path))
        print_result(options, found.as_dict, _with_variables(found))
    return DONE


def _read_description(path: Path) -> Any:
    from pax_export import export
    from pax_export.export.artifact import saved_models

    if saved_models.is_foreign(path):
        return saved_models.describe(path)
    return export.Report.read(path)


def _with_variables(found: Any) -> str:
    """The report, and a line for each variable."""
    lines = [str(found)]
    for variable in found.variables:
        shape = ", ".join(map(str, variable.shape))
        mark = " trainable" if variable.trainable else ""
        lines.append(f"    {variable.name}: {variable.dtype}[{shape}]{mark}")
    return escape_controls("\n".join(lines))
