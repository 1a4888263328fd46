"""Errors for keywords of other libraries, with the equivalent here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from pax_export._errors import InvalidArgumentTypeError
from pax_export.core._near_names import near_names

P = ParamSpec("P")
R = TypeVar("R")


def explain_keywords(table: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that rejects unknown and missing keywords and suggests what to write.

    Args:
        table: keyword of other libraries, or a missing keyword -> what to write.

    Example:
        >>> @explain_keywords({"dim": "axis=..., as numpy calls it"})
        ... def total(x, axis=0):
        ...     return x
        >>> try:
        ...     total([1], dim=0)
        ... except TypeError as error:
        ...     print(error)
        total has no argument `dim`.
          where: total
          got: dim=0
          write: axis=..., as numpy calls it
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters
        # Those before a star may have been given by position, which Python looks at.
        required = [
            name
            for name, parameter in known.items()
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        ]
        names = [name for name in known if name != "cls"]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    raise _unknown_keyword(function, names, name, kwargs[name], table)
            for name in required:
                if name not in kwargs:
                    raise InvalidArgumentTypeError(
                        f"{function.__name__} needs the argument `{name}`.",
                        where=function.__qualname__,
                        got=", ".join(kwargs) or "no keywords",
                        write=table.get(name, f"{name}=..."),
                    )
            return function(*args, **kwargs)

        return call

    return decorate


def explain_call(function: Callable, args: tuple, kwargs: Mapping[str, object]) -> None:
    """Raises if a call that failed has an unknown keyword, or lacks an argument."""
    known = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in known.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for name in kwargs:
            if name not in known:
                raise _unknown_keyword(function, list(known), name, kwargs[name], {}) from None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        name
        for name, parameter in known.items()
        if parameter.default is parameter.empty and parameter.kind not in variadic
    ]
    by_position = list(known)[: len(args)]
    missing = [name for name in required if name not in kwargs and name not in by_position]
    if missing:
        raise InvalidArgumentTypeError(
            f"{function.__name__} needs the argument `{missing[0]}`.",
            where=function.__qualname__,
            got=", ".join([*(f"{each!r:.80}" for each in args), *kwargs]) or "no arguments",
            write=f"{function.__name__}({', '.join(required)})",
        ) from None


def _unknown_keyword(
    function: Callable, names: list[str], name: str, value: object, table: Mapping[str, str]
) -> InvalidArgumentTypeError:
    near = near_names(name, names)
    meant = f"{near[0]}=..." if near else f"one of {', '.join(names)}"
    return InvalidArgumentTypeError(
        f"{function.__name__} has no argument `{name}`.",
        where=function.__qualname__,
        got=f"{name}={value!r:.80}",
        write=table.get(name, meant),
    )
