"""The function of a `Lambda` layer."""

from __future__ import annotations

from pax_export._types import PyTree
from pax_export.nn import Lambda, function_name

_LONGEST = 60


def function_of(module: PyTree) -> str:
    """The name of the function, shortened to one column; empty for other layers."""
    if not isinstance(module, Lambda):
        return ""
    name = " ".join(function_name(module.func).split())
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def title_of(module: PyTree) -> str:
    """The class of a module, with the function that it is for: ``Lambda(relu)``."""
    function = function_of(module)
    return type(module).__name__ + (f"({function})" if function else "")
