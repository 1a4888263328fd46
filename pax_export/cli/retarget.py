"""``pax-export retarget``: repairs a SavedModel of jax2tf, orbax-export or Keras."""

from __future__ import annotations

import argparse

from pax_export.cli._command import DONE, Commands, add_command, add_shared_options, print_result

_VALIDATE = {"here": True, "process": "process", "no": False}

_EXAMPLES = """\
  pax-export retarget old --out mended
  pax-export retarget served/1 --overwrite --consumer "tensorflow>=2.15"
"""


def add(commands: Commands) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = add_command(
        commands, "retarget", _run_retarget,
        "repair a SavedModel written by jax2tf, orbax-export or Keras",
        "Rewrites the jax programs of a SavedModel for the oldest possible TensorFlow, and prints "
        "a report.  Variables, assets and signatures do not change.",
        _EXAMPLES,
    )  # fmt: skip
    parser.add_argument("path", metavar="DIR", help="the path of the SavedModel")
    parser.add_argument(
        "--out", metavar="DIR", help="the directory to write; default: DIR itself, with --overwrite"
    )
    parser.add_argument(
        "--consumer", metavar='"tensorflow>=2.17"', help="the oldest TensorFlow that must run it"
    )
    parser.add_argument(
        "--validate",
        choices=tuple(_VALIDATE),
        default="here",
        help="where signatures are called and compared; default: here",
    )
    add_shared_options(parser, "overwrite", "trusted", "json")


def _run_retarget(options: argparse.Namespace) -> int:
    from pax_export import export

    report = export.retarget(
        options.path,
        options.consumer,
        out=options.out,
        overwrite=options.overwrite,
        validate=_VALIDATE[options.validate],
        trusted=options.trusted,
    )
    print_result(options, report.as_dict, report)
    return DONE
