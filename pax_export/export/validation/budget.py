"""The time budget of a validation."""

from __future__ import annotations

import time
from typing import Any, Literal

#: Seconds that a test may take beyond the time of the steps before it.
SPARE = 2.0
#: Margin for steps that take longer than estimated.
_MARGIN = 1.3


class Budget:
    """The seconds of a test; without end, if none are given.

    Example:
        >>> Budget().leaves_out(1e6, "everything"), Budget(0.0).leaves_out(1.0, "gradients")
        (False, True)
    """

    def __init__(self, seconds: float | None = None, probes: Literal["no", "few", "all"] = "no"):
        self._end = None if seconds is None else time.perf_counter() + seconds
        #: Descriptions of omitted checks.
        self.left_out: list[str] = []
        #: The extreme inputs that are tried, the differences there, and their sentences.
        self.probes = probes
        self.differences: list[Any] = []
        self.differs: list[str] = []

    def leaves_out(self, seconds: float, what: str) -> bool:
        """Returns whether there is too little time for a check of this duration."""
        if self._end is None or time.perf_counter() + seconds * _MARGIN <= self._end:
            return False
        self.left_out.append(what)
        return True
