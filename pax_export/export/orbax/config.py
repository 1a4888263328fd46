"""Options of the whole process: from the environment, by `update`, or within a block.

    OBX_EXPORT_TF_PREPROCESS_ONLY=true python export.py
    config.update("obx_export_tf_preprocess_only", True)
    with obx_export_tf_preprocess_only(True): ...

The last holds for one thread, and goes before the others.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from pax_export._errors import InvalidArgumentError, UnknownOptionError

__all__ = ["Config", "bool_env", "config", "obx_export_tf_preprocess_only"]

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")


unset = object()  #: What an option is in a thread that has not set it.
_of_thread = threading.local()


def bool_env(varname: str, default: bool) -> bool:
    """Reads a yes or no from the environment.

    Args:
        varname: the variable; its value may be y, yes, t, true, on or 1, n, no,
            f, false, off or 0, in capitals or not.
        default: the value where the variable is not set.

    Raises:
        InvalidArgumentError: it is set to something else.

    Example:
        >>> bool_env("A_VARIABLE_THAT_NOBODY_SETS", True)
        True
    """
    value = os.getenv(varname, str(default)).lower()
    if value not in _TRUE + _FALSE:
        raise InvalidArgumentError(
            f"invalid truth value {value!r} for environment {varname!r}.",
            write=f"{varname}=true or {varname}=false",
        )
    return value in _TRUE


class Config:
    """The options, each an attribute once it is defined.

    Example:
        >>> config.obx_export_tf_preprocess_only
        False
    """

    def __init__(self):
        self.values: dict[str, Any] = {}
        self.meta: dict[str, Any] = {}
        self._hooks: dict[str, Callable[[Any], None]] = {}

    def update(self, name: str, val: Any) -> None:
        """Sets an option for the whole process.

        Raises:
            UnknownOptionError: there is none of this name.
        """
        self._check(name)
        self.values[name] = val
        if name in self._hooks:
            self._hooks[name](val)

    def read(self, name: str) -> Any:
        """The value of an option for the whole process.

        Raises:
            UnknownOptionError: there is none of this name.
        """
        self._check(name)
        value = self.values[name]
        return value() if isinstance(value, functools.partial) else value

    def _check(self, name: str) -> None:
        if name not in self.values:
            raise UnknownOptionError(
                f"Unrecognized config option: {name}",
                write=f"one of {', '.join(sorted(self.values))}",
            )

    def define_bool(self, name: str, default: Any, *args: Any, **kwargs: Any) -> None:
        """Adds an option; `update_hook` is called with its value, now and when it changes."""
        hook = kwargs.pop("update_hook", None)
        if name in self.values:
            raise InvalidArgumentError(f"Config option {name} already defined.")
        self.values[name] = default
        self.meta[name] = (bool, args, kwargs)
        if hook is not None:
            self._hooks[name] = hook
            hook(self.read(name))

    def define_bool_state(
        self,
        name: str,
        default: Any,
        help_str: str,
        *,
        update_global_hook: Callable[[bool], None] | None = None,
        update_thread_local_hook: Callable[[bool | None], None] | None = None,
    ) -> Callable[[Any], AbstractContextManager[None]]:
        """Adds an option that the environment can set, and a block for one thread.

        Returns:
            A function that gives such a block: ``with option(True): ...``.
        """
        name = name.lower()
        # Read when it is asked for, as long as nobody sets another value.
        value = functools.partial(bool_env, name.upper(), default)
        self.define_bool(name, value, help_str, update_hook=update_global_hook)

        def current(self: Config) -> Any:
            chosen = getattr(_of_thread, name, unset)
            return self.read(name) if chosen is unset else chosen

        def choose(value: Any) -> None:
            setattr(_of_thread, name, value)
            if update_thread_local_hook is not None:
                update_thread_local_hook(None if value is unset else value)

        @contextmanager
        def within(new_val: Any) -> Iterator[None]:
            before = getattr(_of_thread, name, unset)
            choose(new_val)
            try:
                yield
            finally:
                choose(before)

        setattr(Config, name, property(current))
        within.__name__, within.__doc__ = name, help_str
        return within

    def _undefine_state(self, name: str) -> None:
        self._check(name)
        del self.values[name]
        self.meta.pop(name, None)
        self._hooks.pop(name, None)
        delattr(Config, name)


config = Config()

obx_export_tf_preprocess_only = config.define_bool_state(
    name="obx_export_tf_preprocess_only",
    default=False,
    help_str="""A block in which preprocessors are exported alone, without the model.

    Example:
        >>> with obx_export_tf_preprocess_only(True):
        ...     config.obx_export_tf_preprocess_only
        True
    """,
)
