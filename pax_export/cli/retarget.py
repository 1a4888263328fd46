"""``pax-export retarget``: repairs a SavedModel of jax2tf, orbax-export or Keras."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pax_export.cli._failure import DONE, EXIT_CODES, SIGN, TRUSTED, VERIFY, told

_VALIDATE = {"here": True, "process": "process", "no": False}

_EPILOG = f"""\
examples:
  pax-export retarget old --out mended
  pax-export retarget served/1 --overwrite --consumer "tensorflow>=2.15"

{EXIT_CODES}"""


def add(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "retarget",
        help="mend a SavedModel that jax2tf wrote",
        description="Writes the jax programs of a SavedModel anew, for the oldest TensorFlow that "
        "can be, and prints what became of them.  Its variables, assets and signatures stay.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="DIR", help="of the SavedModel")
    parser.add_argument("--out", metavar="DIR", help="where to write; DIR itself, if not given")
    parser.add_argument("--consumer", metavar='"tensorflow>=2.17"')
    parser.add_argument("--validate", choices=tuple(_VALIDATE), default="here")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing export")
    parser.add_argument("--trusted", action="store_true", help=TRUSTED)
    parser.add_argument("--sign", metavar="KEY.pem", help=SIGN)
    parser.add_argument("--verify", metavar="KEY.pub", help=VERIFY)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(call=_call)


@told
def _call(options: argparse.Namespace) -> int:
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
    print(json.dumps(report.as_dict(), indent=1) if options.json else report)
    return DONE
