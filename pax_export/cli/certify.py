"""``pax-export certify``: runs an export wherever it can, and writes the results into it."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from pax_export._foundations.errors import ValidationError
from pax_export.cli import _factory
from pax_export.cli._command import (
    DONE,
    REFUSED,
    Commands,
    add_command,
    add_shared_options,
    escape_controls,
    fail,
    print_result,
)

_EXAMPLES = """\
  pax-export certify net.onnx
  pax-export certify net.onnx --runtime openvino --runtime web --against train:make_model

The report and the card of the export have another line for each runtime then: its version, the
machine, the number of calls, and the largest difference.  --no-write changes nothing.
"""


def add(commands: Commands) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = add_command(
        commands, "certify", _run_certify, "run an export in all installed runtimes",
        "Calls an export at several sizes with random inputs in its own runtime and, "
        "of an ONNX file, in OpenVINO, IREE and onnxruntime-web (in Node.js) where they are "
        "installed, each in a process of its own.  Compares the results with the model in jax "
        "(--against), or with those of its own runtime, and writes them into the report and the "
        "card of the export.",
        _EXAMPLES,
    )  # fmt: skip
    parser.add_argument(
        "path", metavar="FILE", help="the path of the export, a file or a directory"
    )
    _factory.add_against(parser, "compare with the model")
    parser.add_argument(
        "--runtime", action="append", default=[], metavar="NAME",
        help="a required runtime: openvino, iree or web; default: all that are installed",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=_seconds, metavar="N", help="the time limit of a runtime; default: 600"
    )
    parser.add_argument(
        "--no-write", action="store_true", help="print the results, and change nothing"
    )
    add_shared_options(parser, "trusted", "json")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"a number of seconds above 0 is expected, not {text}")
    return seconds


def _run_certify(options: argparse.Namespace) -> int:
    from pax_export.export.validation.certify import certify

    results = certify(
        Path(options.path),
        _factory.call_factory(options.against) if options.against else None,
        _factory.parse_methods(options.method),
        runtimes=options.runtime,
        seconds=options.seconds,
        write=not options.no_write,
        trusted=options.trusted,
    )
    print_result(
        options,
        lambda: {"runtimes": [dataclasses.asdict(each) for each in results]},
        "\n".join(escape_controls(str(each)) for each in results),
    )
    bad = [
        each
        for each in results
        if each.differs or (each.problem and each.runtime in options.runtime)
    ]
    for each in bad[:1]:
        what = f"{len(bad)} of {len(results)} runtimes do not run this export right."
        fail(ValidationError(what, where=each.runtime, got=each.problem[:500]))
    return REFUSED if bad else DONE
