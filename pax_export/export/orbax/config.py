"""Process-wide configuration.

    OBX_EXPORT_TF_PREPROCESS_ONLY=true python export.py
    config.update("obx_export_tf_preprocess_only", True)
    with obx_export_tf_preprocess_only(True): ...

A context manager applies to one thread, and takes precedence over the others.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pax_export._errors import InvalidArgumentError, UnknownOptionError

__all__ = ["Config", "bool_env", "config", "obx_export_tf_preprocess_only"]

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")
#: The defaults of all options.
_OPTIONS = {"obx_export_tf_preprocess_only": False}


def bool_env(varname: str, default: bool) -> bool:
    """Reads a boolean from the environment; `default` if it is not set.

    True is y, yes, t, true, on or 1, False is n, no, f, false, off or 0, in any case.

    Raises:
        InvalidArgumentError: another value.

    Example:
        >>> bool_env("AN_UNSET_VARIABLE", True)
        True
    """
    value = os.getenv(varname, str(default)).lower()
    if value not in _TRUE + _FALSE:
        raise InvalidArgumentError(
            f"invalid truth value {value!r} for environment {varname!r}.",
            write=f"{varname}=true or {varname}=false",
        )
    return value in _TRUE


class _Block(threading.local):
    value: bool | None = None  # of the innermost block that the thread is in


class Config:
    """The options, each an attribute.

    Example:
        >>> config.obx_export_tf_preprocess_only
        False
    """

    def __init__(self):
        self._values: dict[str, bool] = {}
        self._block = _Block()

    def update(self, name: str, val: bool) -> None:
        """Sets an option for the whole process.

        Raises:
            UnknownOptionError: there is no such option.
        """
        self.read(name)
        self._values[name] = val

    def read(self, name: str) -> bool:
        """Returns the value of an option for the whole process.

        Raises:
            UnknownOptionError: there is no such option.
        """
        if name not in _OPTIONS:
            raise UnknownOptionError(
                f"Unrecognized config option: {name}", write=f"one of {', '.join(_OPTIONS)}"
            )
        # The environment is read each time until another value is set.
        known = self._values.get(name)
        return bool_env(name.upper(), _OPTIONS[name]) if known is None else known

    @property
    def obx_export_tf_preprocess_only(self) -> bool:
        """Whether preprocessors are exported alone, in this thread."""
        within = self._block.value
        return self.read("obx_export_tf_preprocess_only") if within is None else within


config = Config()


@contextmanager
def obx_export_tf_preprocess_only(new_val: bool) -> Iterator[None]:
    """A block in which preprocessors are exported alone, without the model.

    Example:
        >>> with obx_export_tf_preprocess_only(True):
        ...     config.obx_export_tf_preprocess_only
        True
    """
    block = config._block
    before, block.value = block.value, new_val
    try:
        yield
    finally:
        block.value = before
