"""Prints the tables of the topics that are named, or of all: ``python -m benchmarks tree step``."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

TOPICS = (
    *("imports", "build", "tree", "edit", "step", "nans"),
    *("trace", "deep", "exports", "files", "scaling", "lm", "quantize", "serving"),
)


def main(topics: list[str]) -> int:
    """Runs topics in turn; prints Markdown."""
    unknown = sorted(set(topics) - set(TOPICS))
    if unknown:
        print(f"no topic {', '.join(unknown)}; there are {', '.join(TOPICS)}", file=sys.stderr)
        return 2
    print(_machine(), flush=True)
    for topic in topics or TOPICS:
        for each in importlib.import_module(f"benchmarks.{topic}").tables():
            print(each, flush=True)
    return 0


def _machine() -> str:
    names = ("jax", "equinox", "flax", "dm-haiku", "tensorflow", "orbax-export")
    versions = ", ".join(f"{name} {_version(name)}" for name in names)
    cores = os.cpu_count()
    return f"{platform.machine()}, {cores} cores, Python {platform.python_version()}, {versions}\n"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
