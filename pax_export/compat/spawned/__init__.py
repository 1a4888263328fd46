"""A `sys.path` entry that provides `pax` to subprocesses of ``pax-export run``.

Such processes inherit `sys.path` only, so the first import of `pax` or `opax` installs it.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = str(Path(__file__).parent)
