"""``pax-export run``: runs an export, or a program written for `pax`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from pax_export._errors import PaxError
from pax_export._optional import require
from pax_export.cli import _run_export
from pax_export.cli._command import REFUSED, fail
from pax_export.export.artifact.formats import all_formats

_USAGE = (
    "pax-export run DIR [--input [NAME=]FILE.npy ...] [--signature KEY] [--output FILE.npz]\n"
    "       pax-export run [--compat-jax] program.py [argument ...]\n"
    "       pax-export run [--compat-jax] -m module [argument ...]"
)

_DESCRIPTION = """\
Runs an export or a program, depending on the first argument.

An export (a directory with saved_model.pb or pax_export.json, or a file that ends
with .tflite or .onnx): calls one of its signatures with arrays from files.
`pax-export run DIR --help` lists the options.

A program: runs it as `python` does, but `import pax` and `import opax` import
pax_export.  All arguments after its name are passed to it.  With --compat-jax
it also sees the names that jax has removed since 2021 (jax.tree_map,
jnp.clip(a_min=), jax.ops.index_update and more); other modules do not.
"""

_COMPAT_JAX = "--compat-jax"


def add(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "run",
        help="call an export with arrays from files, or run a program written for PAX",
        description=_DESCRIPTION,
        usage=_USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # Whatever begins with a dash belongs to the export's options, or to the program.
        prefix_chars="\0",
        add_help=False,
    )
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="an export or a program, and more")
    parser.set_defaults(call=_run_anything, parser=parser)


def _run_anything(options: argparse.Namespace) -> int:
    rest = options.rest
    if rest[:1] in (["-h"], ["--help"]):
        options.parser.print_help()
        return 0
    compat_jax = rest[:1] == [_COMPAT_JAX]
    rest = rest[compat_jax:]
    if not rest or (rest[0].startswith("-") and rest[0] != "-m"):
        options.parser.error("an export or a program is expected: a directory, a file, or -m")
    if not _is_export(rest[0]):
        return _run_program(rest, compat_jax)
    if compat_jax:
        options.parser.error(f"{_COMPAT_JAX} is for programs, and {rest[0]} is an export")
    return _run_export.main(rest)


def _run_program(rest: list[str], compat_jax: bool) -> int:
    try:
        require("jax", "all", "a program written for pax")
    except PaxError as error:
        fail(error)
        return REFUSED
    from pax_export.compat import run  # with jax, which an export of TensorFlow does not need

    return run(rest, compat_jax=compat_jax)  # exceptions of the program are its own


def _is_export(path: str) -> bool:
    if os.path.isdir(path):
        # Python runs a directory that contains a program.
        return not os.path.exists(os.path.join(path, "__main__.py"))
    return path.endswith(tuple(each.suffix for each in all_formats().values() if each.suffix))
