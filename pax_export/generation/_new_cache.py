"""Creates an empty cache for any net."""

from __future__ import annotations

import inspect
from typing import Any

from pax_export._types import PyTree


def new_cache(lm: PyTree, batch: PyTree, room: object, dtype: Any, **wishes: object) -> Any:
    """Calls ``lm.init_cache`` with those of the options that it has parameters for."""
    known = inspect.signature(lm.init_cache).parameters
    options = {name: wish for name, wish in wishes.items() if name in known}
    return lm.init_cache(batch, room, dtype=dtype, **options)
