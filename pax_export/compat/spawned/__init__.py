"""A `sys.path` entry that provides `pax` to subprocesses.

`pax-export run` installs this package as `pax` in its own process.  A process that
multiprocessing starts afresh is given the same `sys.path` and nothing else, so
the first import of `pax` or `opax` there must do the installing.  The files are
imported as top-level modules, never as parts of this package.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = str(Path(__file__).parent)
