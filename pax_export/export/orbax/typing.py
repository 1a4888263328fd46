"""What orbax's interface calls its kinds of arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
#: A value, or containers of such.
Nested = T | tuple[Any, ...] | Sequence[Any] | Mapping[str, Any]
#: Any nested value that `jax.tree_util` takes apart.
PyTree = Any
#: Takes the params and the inputs, each of them one pytree.
ApplyFn = Callable[[PyTree, PyTree], PyTree]
NestedTfTensorSpec = Any
NestedTfTrackable = Any
WarmupExample = list[Mapping[str, Any]] | Mapping[str, Any]

# Kinds of arguments are no functions that a page of the reference could show.
__all__: list[str] = []
