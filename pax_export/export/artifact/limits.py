"""Size limits for untrusted reports.

A report of a model with 100,000 arrays has some 25 MB, and a million values.
"""

from __future__ import annotations

import json
from typing import Any

#: The most bytes of a report, and the most values in it: either is far beyond any model.
BYTES, VALUES = 1 << 26, 1 << 22


def parsed(text: str) -> Any:
    """What JSON text holds; a ValueError if it is no JSON, or would fill our memory.

    Example:
        >>> parsed('{"a": [1, 2]}')
        {'a': [1, 2]}
        >>> parsed("[" * 100_000 + "]" * 100_000)
        Traceback (most recent call last):
        ValueError: it is nested too deeply
    """
    if len(text) > BYTES:
        raise ValueError("a report of such a size is none")
    if sum(text.count(each) for each in ",[{") > VALUES:
        raise ValueError("a report has too many values")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
