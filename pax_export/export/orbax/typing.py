"""Type aliases of orbax.export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Any nested value that `jax.tree_util` takes apart.
PyTree = Any
#: A function of params and inputs, each one pytree.
ApplyFn = Callable[[PyTree, PyTree], PyTree]

# Kinds of arguments are not functions that a page of the reference could show.
__all__: list[str] = []
