"""Whether a change of the sources changes what is exported.

python -m tests.export.same_bytes before.json --keep before     # on the old commit
python -m tests.export.same_bytes after.json --keep after --compare before.json

Writes exports of every kind, each with weights from one seed, and notes a hash
of every file, what each refusal says, and the public names.  Notes of two
commits can be compared where they were made in one environment on one machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

import jax


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.export.same_bytes",
        description="Notes the bytes of exports of every kind, and compares them.",
    )
    parser.add_argument("out", type=Path, help="the file of notes to write")
    parser.add_argument("--compare", type=Path, metavar="OLD", help="notes to compare with")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the exports there")
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help='such exports, e.g. "tflite/*"'
    )
    given = parser.parse_args()

    # Before jax makes its devices: a sharded export needs several.
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("ignore")
    from tests.export.same_bytes import notes

    found = notes.take(given.keep, given.only, tell=sys.stderr.isatty() or bool(given.keep))
    given.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(notes.summary(found))
    if given.compare is None:
        return 0
    old = json.loads(given.compare.read_text(encoding="utf-8"))
    for line in notes.not_compared(old, found):
        print(f"not compared: {line}")
    differences = list(notes.differences(old, found, given.only))
    print(*differences, f"{len(differences)} differences", sep="\n")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
