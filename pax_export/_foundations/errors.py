"""Error and warning classes: *what* is wrong, *where*, what was *got*, and the *fix*.

Frames of this package are left out of tracebacks, as jax leaves out its own (`hide_frames`).
Each class derives from the built-in error that callers of PAX, jax or orbax catch. A new one
is also listed in `pax_export.errors` and docs/api/errors.md.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import SequenceMatcher
from types import FrameType, MappingProxyType
from typing import Any

_PUBLIC = "pax_export.errors"


def _made_public(cls: type) -> None:
    """Gives a class of this file the name by which users import it; pickles take that one."""
    if cls.__module__ == __name__:
        cls.__module__ = _PUBLIC


def a_few(names: Sequence[str], most: int) -> str:
    """Formats the first few names and the number of the rest.

    Example:
        >>> a_few(["a", "b"], 3), a_few(list("abcde"), 3)
        ('a, b', 'a, b, c, and 2 more')
    """
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


#: From which likeness on a name is proposed, between 0 and 1.
_ALIKE = 0.6


def near_names(name: str, names: Iterable[str], count: int = 1) -> list[str]:
    """Returns the `count` nearest names, best first; also compares the last steps of paths.

    Example:
        >>> near_names("wieght", ["bias", "weight"])
        ['weight']
        >>> near_names("atention", ["encoder.attention", "encoder.norm"])
        ['encoder.attention']
        >>> near_names("flux", ["bias", "weight"])
        []
    """
    parts = name.count(".") + 1
    found = []
    for index, other in enumerate(names):
        end = ".".join(other.split(".")[-parts:])
        likeness = max(_name_similarity(name, each) for each in {other, end})
        if likeness >= _ALIKE:
            found.append((-likeness, index, other))
    return [other for _, _, other in sorted(found)[:count]]


def _name_similarity(name: str, other: str) -> float:
    matcher = SequenceMatcher(None, other, name)
    # The quick bounds first: the whole comparison takes long for long names.
    if matcher.real_quick_ratio() < _ALIKE or matcher.quick_ratio() < _ALIKE:
        return 0.0
    return matcher.ratio()


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for another message; without any, its class."""
    lines = str(error).strip().splitlines()
    return " ".join(lines[0].split()).rstrip(".:") if lines else type(error).__name__


def named_line(error: BaseException, most: int = 300) -> str:
    """The class of an error and the first line of its text, ``ValueError: too large``."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"[:most]


# --- tracebacks -------------------------------------------------------------------------


_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_keeps_frames: ContextVar[bool] = ContextVar("_keeps_frames", default=False)


def hide_frames(error: BaseException | None = None) -> None:
    """Hides the frames of this package on the stack and in an error; call it once per error.

    In IPython and pytest they have ``__tracebackhide__``; elsewhere they are removed, but for the
    one that raised the error. ``JAX_TRACEBACK_FILTERING=off`` and jax's
    ``jax_traceback_filtering`` show all frames.
    """
    if _mode() == "tracebackhide":
        inner = traceback.walk_tb(error and error.__traceback__)
        for frame, _ in itertools.chain(traceback.walk_stack(inspect.currentframe()), inner):
            if _is_ours(frame):
                frame.f_locals["__tracebackhide__"] = True
    elif _mode() != "off" and error is not None and not _keeps_frames.get():
        _remove_frames(error)


@contextmanager
def all_frames() -> Iterator[None]:
    """Context manager in which no frame is removed, for what reads layers from the frames."""
    token = _keeps_frames.set(True)
    try:
        yield
    finally:
        _keeps_frames.reset(token)


def _remove_frames(error: BaseException) -> None:
    # In place: `contextlib` restores the traceback that an error had when it left the block.
    entry = error.__traceback__
    while entry is not None:
        inner = entry.tb_next
        while inner is not None and inner.tb_next is not None and _is_ours(inner.tb_frame):
            inner = inner.tb_next
        entry.tb_next = inner
        entry = inner


def _is_ours(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename.startswith(_PACKAGE) and code.co_name != "<module>"


def _mode() -> str:
    config = getattr(sys.modules.get("jax"), "config", None)
    mode = getattr(config, "jax_traceback_filtering", None) or "auto"
    shell = sys.modules.get("IPython")
    in_notebook = mode == "auto" and shell is not None and shell.get_ipython() is not None
    return "tracebackhide" if in_notebook else mode


# --- errors -----------------------------------------------------------------------------


class PaxError(Exception):
    """The root of every error that this package raises on purpose.

    Args:
        what: one sentence about what is wrong.
        where: the path of the leaf, layer, file or dimension concerned.
        got: the value that caused it, described in a few words.
        write: what to write instead.

    Example:
        >>> print(PaxError("No such layer.", where="encoder.fc", write="model.encoder.fc2"))
        No such layer.
          where: encoder.fc
          fix: model.encoder.fc2
    """

    __module__ = _PUBLIC

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        _made_public(cls)

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        got: object | None = None,
        write: str | None = None,
    ):
        # Only `what` is in `args`: the rest is in `__dict__`, so
        # that an error raised in a worker process can be pickled.
        super().__init__(what)
        hide_frames()
        self.what = what
        self.where = where
        self.got = got
        self.write = write

    def __str__(self) -> str:
        lines = [self.what]
        lines += [f"  {label}: {text}" for label, text in self.parts()]
        return "\n".join(lines)

    def parts(self) -> list[tuple[str, str]]:
        """What stands below the first line, with its headings."""
        fields = {"where": self.where, "got": self.got, "fix": self.write}
        return [(label, f"{text}") for label, text in fields.items() if text is not None]


@contextmanager
def errors_in(file: object) -> Iterator[None]:
    """Context manager that adds the file which is read to the `where` of errors.

    Example:
        >>> with errors_in("a.json"):
        ...     raise PaxError("No size.", where="size")
        Traceback (most recent call last):
            ...
        pax_export.errors.PaxError: No size.
          where: size, in a.json
    """
    try:
        yield
    except PaxError as error:
        error.where = f"{error.where}, in {file}" if error.where else str(file)
        raise


class PaxWarning(UserWarning):
    """The root of the warnings about modules; its text has the shape of a `PaxError`."""

    __module__ = _PUBLIC

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        _made_public(cls)

    def __init__(self, what: str, **parts: str | None):
        super().__init__(str(PaxError(what, **parts)))


class RetracingWarning(PaxWarning):
    """Static data changes in every call of a jitted function, so jax retraces each time."""


class NearNameWarning(PaxWarning):
    """A name is not, or is almost, that of an existing attribute or value."""


class UntrainedArrayWarning(PaxWarning):
    """A class does not declare whether a floating array is trained or state."""


class UnchangedStateWarning(PaxWarning):
    """A training step leaves averages and keys of the net as they are."""


class NotValidatedWarning(PaxWarning):
    """An export was not validated: its runtime is missing, or no call gives an element."""


class InvalidArgumentError(PaxError, ValueError, AssertionError):
    """An argument has a value that the function cannot work with.

    It is an AssertionError as well, because PAX checked its arguments with
    ``assert`` and programs catch that.
    """


class InvalidArgumentTypeError(PaxError, TypeError, ValueError, AssertionError):
    """An argument has the wrong type."""


class ImmutableModuleError(PaxError, ValueError, AttributeError):
    """A module was changed outside of the scopes in which it is mutable."""


class NotMaterializedError(ImmutableModuleError):
    """A lazy module still has to create a submodule, and is not open for change."""


class SharedNodeError(PaxError, ValueError):
    """One module or one array occurs twice in a tree."""


class HiddenArrayError(PaxError, ValueError):
    """An array or a module is kept where the pytree cannot see it."""


class ForeignInputError(PaxError, ValueError):
    """The output of a graph needs a node that is none of its inputs."""


class StructureMismatchError(PaxError, ValueError, AssertionError):
    """Two trees that must have one structure differ."""


class MissingWeightError(PaxError, KeyError, ValueError):
    """A weight that the module has is missing from the given weights."""


class WeightNameError(PaxError, ValueError):
    """A weight has no unique name to store it under."""


class WeightsFileError(PaxError, OSError, ValueError):
    """A file of weights cannot be written, or is not one."""


class MissingWeightsFileError(WeightsFileError, FileNotFoundError):
    """There is no file of weights at this path."""


class TokenizerError(PaxError, ValueError):
    """A tokenizer or its chat template cannot be read, fails, or is that of another net."""


class WeightsMismatchError(PaxError, KeyError, ValueError):
    """The weights of a file are not those of the module; `report` lists them all."""

    report: object = None


class AdoptionError(WeightsMismatchError):
    """The arrays of a source cannot all be given to a module; `missing` and `left` list them."""

    missing: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class AmbiguousWeightsError(AdoptionError):
    """It is not decided where arrays of a source belong; `candidates` has the places of each."""

    candidates: Mapping[str, tuple[str, ...]] = MappingProxyType({})


class CheckpointError(PaxError, OSError, ValueError):
    """A checkpoint cannot be written, or is damaged, or is none."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint in this directory, or none of this step."""


class MissingPackageError(PaxError, ImportError):
    """An optional package is not installed."""


class NameTakenError(PaxError, ImportError):
    """A name is already taken by another module."""


class NotInPaxError(PaxError, ModuleNotFoundError):
    """A program asks for a part of PAX that is not part of its interface."""

    def __init__(self, what: str, *, write: str | None = None, name: str | None = None):
        super().__init__(what, write=write)
        self.name = name


class PolicyError(PaxError, ValueError):
    """A mixed-precision policy is put on a module twice, or taken off one without."""


class NotDifferentiableError(PaxError, TypeError, ValueError):
    """A gradient is asked for with respect to something that has none."""


class NonFiniteError(PaxError, FloatingPointError):
    """An operation produced NaN or infinity from finite numbers."""


class UncoveredStateError(InvalidArgumentError):
    """A leaf of a module may differ between calls, but no axis is given to stack it."""


class ShardingError(InvalidArgumentError):
    """A partition spec does not fit its array or mesh, or a rule matches no array."""


class NotPicklableError(PaxError, TypeError, AttributeError):
    """A local object was to be pickled, but has no importable name."""


class DTensorStateError(PaxError, RuntimeError):
    """DTensor is not initialized, or not for the devices that jax has."""


class QuantizationError(PaxError, ValueError):
    """Weights are already quantized, or their integers or scales are invalid."""


class ExportPathError(PaxError, OSError, ValueError):
    """An export cannot be written to, or read from, this directory."""


class UntrustedExportError(PaxError, PermissionError, ValueError):
    """An export contains a program that does more than compute, and is not trusted."""


class UnsupportedDtypeError(PaxError, TypeError, ValueError):
    """An array has a dtype that the target does not have, or that jax would narrow."""


class UnsupportedOperationError(PaxError, NotImplementedError, ValueError):
    """A model does something that cannot be expressed outside of jax."""


class SymbolicDimensionError(PaxError, TypeError, ValueError):
    """A model requires the value of a symbolic dimension."""


class TracedValueError(PaxError, TypeError, ValueError):
    """A model looks at the value of an array while it is traced, as a Python ``if`` does."""


class StateChangeError(PaxError, ValueError):
    """A model exported as stateless changes its own state."""


class ConsumerError(PaxError, ValueError):
    """A model cannot be expressed for the consumer that was asked for."""


class ValidationError(PaxError, ValueError):
    """The results of an export differ from those of the model.

    Attributes:
        parting: the first operation after which jax and the export differ, if found: its
            `operation`, the `path` and `kind` of the module, the `source` line, and how far they
            are `apart`.
    """

    parting: Any = None


class GradientMismatchError(ValidationError):
    """The results of an export agree with the model, but its gradients differ."""
