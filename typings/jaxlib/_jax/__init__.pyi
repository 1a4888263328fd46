"""Compiled code of jaxlib has no types; what `pytree.pyi` lacks stays unknown."""

from typing import Any

def __getattr__(name: str) -> Any: ...
