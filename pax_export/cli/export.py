"""``pax-export export``: writes the model that a factory makes as a SavedModel."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Any

from pax_export._errors import InvalidArgumentError
from pax_export.cli._failure import told

_VALIDATE = {"here": True, "process": "process", "no": False}

_EPILOG = """\
examples:
  pax-export export train:make_model served/1 --input "batch, 8, 8, 1:float32"
  pax-export export train:make_model served/1 --input "batch, length:int32" \\
      --input "mask=batch, length:bool" --constraint "length <= 512"

exit codes:
  0  written    1  refused, and the reason is on stderr    2  wrong usage
"""


def add(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "export",
        help="write a model as a SavedModel",
        description="Writes the model that a factory makes as a SavedModel, and prints the report.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "factory",
        metavar="module:factory",
        help="a function without arguments that returns a module or a pair (params, function); "
        "modules of the current directory are found",
    )
    parser.add_argument("directory", metavar="DIR", help="where to write")
    parser.add_argument(
        "--input",
        action="append",
        required=True,
        metavar="[NAME=]SHAPE[:DTYPE]",
        help='an input, e.g. "batch, 8, 8, 1:float32"; those without a name are positional',
    )
    parser.add_argument("--constraint", action="append", default=[], metavar='"n >= 2"')
    parser.add_argument("--state", choices=("frozen", "update"), default="frozen")
    parser.add_argument("--trainable", action="store_true", help="keep gradients")
    parser.add_argument(
        "--platform",
        action="append",
        choices=("cpu", "cuda", "rocm", "tpu"),
        help="a machine to lower for; all of them without this option",
    )
    parser.add_argument("--consumer", metavar='"tensorflow>=2.17"')
    parser.add_argument("--validate", choices=tuple(_VALIDATE), default="here")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing directory")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(call=_call)


@told
def _call(options: argparse.Namespace) -> int:
    from pax_export import export  # with jax.export, which other commands do not need

    positional, named = [], {}
    for text in options.input:
        name, spec = _input(text)
        if name:
            named[name] = spec
        else:
            positional.append(spec)
    report = export.to_saved_model(
        _make(options.factory),
        options.directory,
        tuple(positional),
        kwargs=named,
        constraints=options.constraint,
        state=options.state,
        trainable=options.trainable,
        consumer=options.consumer,
        validate=_VALIDATE[options.validate],
        overwrite=options.overwrite,
        **({"platforms": options.platform} if options.platform else {}),
    )
    print(json.dumps(report.as_dict(), indent=1) if options.json else report)
    return 0


def _input(text: str) -> tuple[str, Any]:
    """Reads ``[NAME=]SHAPE[:DTYPE]``."""
    from pax_export.export import spec

    name, equals, rest = text.rpartition("=")
    shape, colon, dtype = rest.rpartition(":")
    if not colon:
        shape, dtype = rest, "float32"
    if equals and not name.strip().isidentifier():
        raise InvalidArgumentError(
            "This input cannot be read.", got=text, write='--input "mask=batch, length:bool"'
        )
    return name.strip(), spec(shape.strip(), dtype.strip())


def _make(place: str) -> Any:
    """Imports the factory and calls it."""
    module_name, colon, name = place.partition(":")
    if not (module_name and colon and name):
        raise InvalidArgumentError(
            "The factory cannot be found.", got=place, write="package.module:function"
        )
    sys.path.insert(0, "")  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise InvalidArgumentError(
            "The factory cannot be found: there is no such module.",
            got=module_name,
            write="a module of the current directory, or one that is installed",
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise InvalidArgumentError(
            "The factory cannot be found: the module has no such function.",
            where=module_name,
            got=name,
        )
    return factory()
