"""How much the machines of this folder try: a little in every run, a lot in `tox -e hard`."""

from __future__ import annotations

import os

#: Set by `tox -e hard`.
VARIABLE = "PAX_EXPORT_HARD"
IN_LONG_RUNS = os.environ.get(VARIABLE) == "1"


def runs(*, short: int, long: int) -> int:
    """How often to try: `short` among all tests, `long` where much time was asked for."""
    return long if IN_LONG_RUNS else short
