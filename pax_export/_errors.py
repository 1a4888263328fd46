"""Error and warning classes: *what* is wrong, *where*, what was *got*, what to *write*.

Each class derives from the built-in error that callers of PAX, jax or orbax catch. A new one
is also listed in `pax_export.errors` and docs/api/errors.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pax_export._tracebacks import hide_frames

_PUBLIC = "pax_export.errors"


def _made_public(cls: type) -> None:
    """Gives a class of this file the name by which users import it; pickles take that one."""
    if cls.__module__ == __name__:
        cls.__module__ = _PUBLIC


def a_few(names: Sequence[str], most: int) -> str:
    """The first of some names, and how many there are besides.

    Example:
        >>> a_few(["a", "b"], 3), a_few(list("abcde"), 3)
        ('a, b', 'a, b, c, and 2 more')
    """
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class PaxError(Exception):
    """The root of every error that this package raises on purpose.

    Args:
        what: one sentence that says what went wrong.
        where: the path of the leaf, layer, file or dimension concerned.
        got: the value that caused it, described in a few words.
        write: what to write instead.

    Example:
        >>> print(PaxError("No such layer.", where="encoder.fc", write="model.encoder.fc2"))
        No such layer.
          where: encoder.fc
          write: model.encoder.fc2
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
        # Only `what` goes into `args`: the rest travels in `__dict__`, so
        # that an error raised in a worker process can be pickled.
        super().__init__(what)
        hide_frames()
        self.what = what
        self.where = where
        self.got = got
        self.write = write

    def __str__(self) -> str:
        lines = [self.what]
        for label in ("where", "got", "write"):
            text = getattr(self, label)
            if text is not None:
                lines.append(f"  {label}: {text}")
        return "\n".join(lines)


class PaxWarning(UserWarning):
    """The root of the warnings about modules; its text has the shape of a `PaxError`."""

    __module__ = _PUBLIC

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        _made_public(cls)

    def __init__(self, what: str, **parts: str | None):
        super().__init__(str(PaxError(what, **parts)))


class ChangedOutsideWarning(PaxWarning):
    """A list or dict of an immutable module was changed in place where it is not open."""


class RetracingWarning(PaxWarning):
    """Static data changes in every call of a jitted function, so jax traces each anew."""


class NearNameWarning(PaxWarning):
    """An attribute is added whose name is nearly that of one that the module has."""


class UntrainedArrayWarning(PaxWarning):
    """A class says of a floating array neither that it is trained nor that it is state."""


class NotValidatedWarning(PaxWarning):
    """An export was not tested, because what runs it is not installed."""


class LoadedShapeWarning(PaxWarning):
    """A program written for PAX loads a state that has another shape than the module's."""


class InvalidArgumentError(PaxError, ValueError, AssertionError):
    """An argument has a value that the function cannot work with.

    It is an AssertionError as well, because PAX checked its arguments with
    ``assert`` and programs catch that.
    """


class InvalidArgumentTypeError(PaxError, TypeError, ValueError, AssertionError):
    """An argument is of a kind that the function cannot work with."""


class ImmutableModuleError(PaxError, ValueError, AttributeError):
    """A module was changed outside the places where it is open for change."""


class NotMaterializedError(ImmutableModuleError):
    """A lazy module still has to create a submodule, and is not open for change."""


class SharedNodeError(PaxError, ValueError):
    """One module or one array stands at two places of a tree."""


class HiddenArrayError(PaxError, ValueError):
    """An array or a module is kept where the pytree cannot see it."""


class ForeignInputError(PaxError, ValueError):
    """The output of a graph needs a node that is none of its inputs."""


class StructureMismatchError(PaxError, ValueError, AssertionError):
    """Two trees that must have one structure differ."""


class MissingWeightError(PaxError, KeyError, ValueError):
    """A weight that the module has is missing from the given weights."""


class WeightNameError(PaxError, ValueError):
    """A weight has no name of its own under which a file could keep it."""


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


class MissingValueError(PaxError, AttributeError):
    """A value is asked for that a Flattener does not hold."""


class NameTakenError(PaxError, ImportError):
    """A module is to be known by a name that another module has already."""


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
    """An operation gave NaN or infinity out of finite numbers."""


class UnknownOptionError(PaxError, AttributeError):
    """An option is set or read that does not exist."""


class UncoveredStateError(InvalidArgumentError):
    """A leaf of a module may differ from call to call, and no axis says how to stack it."""


class ShardingError(InvalidArgumentError):
    """An array cannot lie on a mesh as a spec says, or a rule is for no array."""


class ProcessesError(PaxError, RuntimeError):
    """Processes that are to work together do not find each other, or one of them is lost."""


class NotPicklableError(PaxError, TypeError, AttributeError):
    """Something made on the spot was to be pickled, and no name leads to it."""


class NegativeToleranceError(PaxError, OverflowError, ValueError):
    """A tolerance is less than zero."""


class DTensorStateError(PaxError, RuntimeError):
    """DTensor is not initialized, or not for the devices that jax has."""


class QuantizationError(PaxError, ValueError):
    """Weights are quantized already, or their integers or scales are not what they should be."""


class ExportPathError(PaxError, OSError, ValueError):
    """An export cannot be written to, or read from, this directory."""


class UntrustedExportError(PaxError, PermissionError, ValueError):
    """An export is a program that does more than compute, and nobody said that it may."""


class SignatureError(PaxError, PermissionError, ValueError):
    """What is to be opened is not what the holder of a key has signed."""


class UnsupportedDtypeError(PaxError, TypeError, ValueError):
    """An array has a dtype that the target does not have, or that jax would narrow."""


class UnsupportedOperationError(PaxError, NotImplementedError, ValueError):
    """A model does something that cannot be expressed outside of jax."""


class SymbolicDimensionError(PaxError, TypeError, ValueError):
    """A model needs to know the size of a dimension that was given as symbolic."""


class TracedValueError(PaxError, TypeError, ValueError):
    """A model looks at the value of an array while it is traced, as a Python ``if`` does."""


class StateChangeError(PaxError, ValueError):
    """A model changes its own state while it is exported as one that does not."""


class ConsumerError(PaxError, ValueError):
    """A model cannot be expressed for the consumer that was asked for."""


class ValidationError(PaxError, ValueError):
    """What was written does not compute what the model computes.

    Attributes:
        parting: the first operation after which jax and the export differ, where it was
            found: its `operation`, the `path` and `kind` of the module, the `source` line,
            and how far they are `apart`.
    """

    parting: Any = None


class GradientMismatchError(ValidationError):
    """What was written computes what the model computes, and its gradient is another."""
