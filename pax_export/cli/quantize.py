"""``pax-export quantize``: stores the weights of a model as integers, and reports the loss."""

from __future__ import annotations

import argparse
import dataclasses
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from pax_export._foundations.errors import InvalidArgumentError
from pax_export._foundations.files import atomic
from pax_export.cli import _factory
from pax_export.cli._command import DONE, Commands, add_command, add_shared_options, print_result

_EXAMPLES = """\
  pax-export quantize train:make_model small.safetensors --batch images.npy
  pax-export quantize train:make_model small.safetensors --bits 4 --rounding gptq \\
      --batch first.npz --batch second.npz
  pax-export quantize train:make_model --bits 4 --batch images.npy        # the report alone
"""


def add(commands: Commands) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = add_command(
        commands, "quantize", _run_quantize, "quantize the weights of a model",
        "Quantizes the weights of the model that a factory returns, prints the report of "
        "`pax_export.quantize`, and writes the integers to a safetensors file.",
        _EXAMPLES,
    )  # fmt: skip
    parser.add_argument("factory", metavar="module:factory", help=_factory.HELP)
    parser.add_argument(
        "file",
        metavar="FILE.safetensors",
        nargs="?",
        help="the file to write; default: none, only the report",
    )
    parser.add_argument(
        "--batch",
        action="append",
        metavar="FILE",
        help="the inputs of one call: an array in a .npy file, or several in a .npz file, in the "
        "order of the arguments",
    )
    parser.add_argument("--bits", type=int, choices=(8, 4), default=8, help="default: 8")
    parser.add_argument(
        "--scheme",
        default="symmetric",
        metavar="symmetric|asymmetric|float",
        help="default: symmetric",
    )
    parser.add_argument(
        "--group", type=int, metavar="32", help="groups with float16 scales for 8 bits, too"
    )
    parser.add_argument("--at", metavar="PATTERN", help='a part of the model, e.g. "layers.*"')
    parser.add_argument(
        "--activations",
        metavar="dynamic|static|mse|minmax|percentile",
        help="round the inputs of products to 8 bits, too",
    )
    parser.add_argument(
        "--rounding", choices=("nearest", "gptq"), default="nearest", help="default: nearest"
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="LOSS",
        help="the allowed loss of the outputs; chooses 8 or 4 bits for each weight",
    )
    parser.add_argument(
        "--runtime",
        action="append",
        choices=("onnx", "tflite", "saved_model", "stablehlo"),
        default=[],
        help="also measure the differences and the latency in the runtime of this format",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    add_shared_options(parser, "json")


def _run_quantize(options: argparse.Namespace) -> int:
    from pax_export.quantization import quantize
    from pax_export.weights import save_weights

    path = Path(options.file) if options.file else None
    if path is not None:  # before any work; saving looks at the file itself
        atomic.check_file(path, (lambda _: lambda name: True) if options.overwrite else None)
    batches = [_read_batch(file) for file in options.batch or ()]
    if options.runtime and not batches:
        raise InvalidArgumentError(
            "Runtimes are called with batches.", got="--runtime", write="--batch FILE, too"
        )
    net = _factory.call_factory(options.factory)
    small, report = quantize(
        net,
        batches or None,
        bits=options.bits,
        group=options.group,
        scheme=options.scheme,
        at=options.at,
        activations=options.activations,
        rounding=options.rounding,
        budget=options.budget,
    )
    runtimes = {name: _run_in(name, net, small, batches) for name in options.runtime}
    report = dataclasses.replace(report, runtimes=runtimes)
    if path is not None:
        save_weights(small, path)
    print_result(options, lambda: dataclasses.asdict(report), report)
    return DONE


def _run_in(name: str, net: Any, small: Any, batches: list[tuple[np.ndarray, ...]]) -> Any:
    """Compares the runtime of a format with jax on the same integers; times both nets."""
    import jax

    from pax_export.export import load
    from pax_export.export.artifact.formats import all_formats, import_function
    from pax_export.quantization import compare_runtime

    write = import_function(all_formats()[name].export)
    with atomic.scratch() as folder:
        files = []
        for each in (net, small):
            path = folder / str(len(files))
            shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in batches[0])
            write(each, path, shapes, validate=False, card=False)
            files.append(load(path))
        return compare_runtime(small, files[0], files[1], batches)


def _read_batch(file: str) -> tuple[np.ndarray, ...]:
    try:
        found = np.load(file, allow_pickle=False)
        return (found,) if isinstance(found, np.ndarray) else tuple(found.values())
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidArgumentError(
            "The batch cannot be read.",
            where=file,
            got=str(error),
            write="a .npy or .npz file, as numpy.save and numpy.savez write them",
        ) from error
