"""``pax-export retarget``: repairs a SavedModel of jax2tf, orbax-export or Keras."""

from __future__ import annotations

import argparse
from typing import Any

from pax_export.cli._command import DONE, add_command, add_shared_options, print_result

_VALIDATE = {"here": True, "process": "process", "no": False}

_EXAMPLES = """\
  pax-export retarget old --out mended
  pax-export retarget served/1 --overwrite --consumer "tensorflow>=2.15"
"""


def add(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = add_command(
        commands, "retarget", _run_retarget, "mend a SavedModel that jax2tf wrote",
        "Writes the jax programs of a SavedModel anew, for the oldest TensorFlow that can be, and "
        "prints what became of them.  Its variables, assets and signatures stay.",
        _EXAMPLES,
    )  # fmt: skip
    parser.add_argument("path", metavar="DIR", help="of the SavedModel")
    parser.add_argument("--out", metavar="DIR", help="where to write; DIR itself, if not given")
    parser.add_argument("--consumer", metavar='"tensorflow>=2.17"')
    parser.add_argument("--validate", choices=tuple(_VALIDATE), default="here")
    add_shared_options(parser, "overwrite", "trusted", "sign", "verify", "json")


def _run_retarget(options: argparse.Namespace) -> int:
    from pax_export import export

    report = export.retarget(
        options.path,
        options.consumer,
        out=options.out,
        overwrite=options.overwrite,
        validate=_VALIDATE[options.validate],
        trusted=options.trusted,
        sign=options.sign,
        verify=options.verify,
    )
    print_result(options, report.as_dict, report)
    return DONE
