"""Writes under the blocks of pages what they print: `python -m tests.docs.fill docs/idea.md`.

What fits already stays as it is, with its `...`.  Read what it wrote: where it depends on the
machine or the day, put `...` there.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pax_export as pax
from tests.docs.pages import difference, printing


def fill(page: Path) -> None:
    """Runs one page in an empty folder, and writes it anew."""
    page = page.resolve()
    text, written, done = page.read_text(encoding="utf-8"), "", 0
    pax.seed_rng_key(42)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for block, printed in printing(page):
            if not difference(block.output, printed):
                continue
            written += text[done : block.end]
            done = block.end
            if block.output:
                done += len(f"\n\n```text\n{block.output}```")
            if printed.strip():
                lines = (line.rstrip() for line in printed.rstrip().splitlines())
                written += "\n\n```text\n" + "\n".join(lines) + "\n```"
    page.write_text(written + text[done:], encoding="utf-8")


if __name__ == "__main__":
    for path in [Path(argument).absolute() for argument in sys.argv[1:]]:
        fill(path)
