"""Classes and functions made by a call: what call made them, so that they pickle.

``opax.adam(1e-3)`` makes classes inside of functions, and a schedule is a function
inside of a function.  Pickle finds neither by name; it can write down the call.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """A call of a function that can be imported.

    Attributes:
        module: the module of the function.
        name: its name there.
        args: positional arguments.
        kwargs: keyword arguments.
    """

    module: str
    name: str
    args: tuple
    kwargs: Mapping[str, Any]


_calls: weakref.WeakKeyDictionary[Any, Call] = weakref.WeakKeyDictionary()


def remember_call(value: Any, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Notes that a class or function is what a call of ``function`` returned."""
    _calls[value] = Call(function.__module__, function.__name__, args, dict(kwargs))


def call_that_made(value: Any) -> Call | None:
    """The call that returned this class or function, if it was noted."""
    return _calls.get(value)


def repeat_call(module: str, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """What a pickle runs: the call again."""
    return getattr(importlib.import_module(module), name)(*args, **kwargs)
