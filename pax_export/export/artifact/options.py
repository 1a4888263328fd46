"""The options of every writer: `ExportOptions` for users, their defaults in `Request`, checks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, Protocol, TypedDict, TypeVar, get_args, get_type_hints

from pax_export._foundations.check import as_named, as_strings, checked_choice, is_mapping
from pax_export._foundations.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    near_names,
)
from pax_export.export.artifact.formats import PLATFORMS
from pax_export.export.artifact.report import DEFAULT

_Writer = TypeVar("_Writer", bound=Callable[..., Any])


class ExportOptions(TypedDict, total=False):
    """The options of every function that writes a model.

    Attributes:
        kwargs: the keyword arguments of the call, in the same form as `inputs`.
        methods: signature keys -> the name of a method, or a function with the model as its first
            argument.  `inputs` and `kwargs` are then dicts with the same keys.  All signatures
            share the variables.  An ONNX file has one signature.
        constraints: constraints on symbolic dimensions, e.g. ``("length <= 512",)``.
        state: ``"frozen"`` refuses a model whose calls change state that later calls read; with
            ``"keep"`` every call starts with the exported state.  With ``"update"`` every call of
            a SavedModel assigns the new state to the variables, and ``purecall`` of a loaded
            bundle returns a new bundle with it.
        outputs: ``"float32"`` casts half-precision outputs of a module under a policy to float32,
            which every runtime supports; ``"model"`` keeps their dtype.
        validate: load the export, call it at several sizes in its runtime and compare with jax,
            within the time of the export itself plus two seconds; the report lists omitted calls.
            ``"full"`` omits none; ``"process"`` uses a fresh process without jax.
            ``"variables"``, of SavedModels, makes no calls and compares only the variables, one by
            one, for a model on several devices or on disk that is larger than memory.
        examples: a list of arguments for these calls, if random ones are meaningless for the
            model or its preprocessor; each is a tuple of positional arguments, a single one, or a
            dict of all by name.  With `methods`, a dict over some of their keys.
        overwrite: replace an existing export of `pax_export`; other files are never replaced.
        card: write the report as HTML with calls to copy, ``pax_export.html`` in the folder, or
            ``model.onnx.html`` beside a file; ``False`` omits it, and a drawing of
            ``pax.inspection.draw`` is included.
        quantization: the report of `pax_export.quantize`, if it made the model: the export's
            report then has the loss of the weights, next to the effect of the runtime's kernels.

    Example:
        >>> from typing import Unpack
        >>> import pax_export as pax
        >>> def to_server(net, **options: Unpack[pax.export.ExportOptions]):
        ...     inputs = pax.export.spec("batch, 3")
        ...     return pax.export.to_onnx(net, "server/model.onnx", inputs, **options)
    """

    kwargs: Mapping[str, Any] | None
    methods: Mapping[str, Any] | None
    constraints: Sequence[str]
    state: Literal["frozen", "update", "keep"]
    outputs: Literal["float32", "model"]
    validate: bool | Literal["full", "process", "variables"]
    examples: Any
    overwrite: bool
    card: object
    quantization: Summarized | None


class Summarized(Protocol):
    """The report of `pax_export.quantize`."""

    def summary(self) -> Any: ...


@dataclass(frozen=True)
class Request:
    """A model to write, and the `ExportOptions` with what they are when not given."""

    model: Any
    path: str | os.PathLike[str]
    inputs: Any
    _: KW_ONLY
    kwargs: Mapping[str, Any] | None = None
    methods: Mapping[str, Any] | None = None
    constraints: Sequence[str] = ()
    state: Literal["frozen", "update", "keep"] = "frozen"
    outputs: Literal["float32", "model"] = "float32"
    validate: bool | Literal["full", "process", "variables"] = True
    examples: Any = None
    overwrite: bool = False
    card: object = True
    quantization: Summarized | None = None

    @classmethod
    def of(
        cls,
        writer: Callable[..., Any],
        model: Any,
        path: str | os.PathLike[str],
        inputs: Any,
        **options: Any,
    ) -> Request:
        """The request of a call of a writer; raises for an option that it does not have."""
        own = [each for each in inspect.signature(writer).parameters if each != "options"]
        for name in options.keys() - own:
            near = near_names(name, own)
            raise InvalidArgumentTypeError(
                f"{writer.__name__} has no option {name}.",
                got=f"{name}={options[name]!r:.100}",
                write=f"{near[0]}={options[name]!r:.100}" if near else f"help({writer.__name__})",
            )
        return cls(model, path, inputs, **options)

    @property
    def keys(self) -> list[str]:
        """The keys of the signatures."""
        return signature_keys(self.methods)

    def calls(self, keys: Sequence[str], several: bool = False) -> dict[str, Any]:
        """The examples of each signature."""
        return by_signature("examples", self.examples, keys, several or self.methods is not None)


def values(option: str) -> list[str]:
    """The strings that an option may be, for the command line."""
    hint = get_type_hints(ExportOptions)[option]
    found = (each for part in (hint, *get_args(hint)) for each in get_args(part))
    return list(dict.fromkeys(each for each in found if isinstance(each, str)))


def takes_options(writer: _Writer) -> _Writer:
    """Shows the `ExportOptions` in the signature and docstring of a writer, for `help`."""
    own = inspect.signature(writer)
    shared = [
        inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type
        )
        for each in fields(Request)
        if each.kw_only
    ]
    parameters = [*own.parameters.values()][:-1]
    entries = (inspect.getdoc(ExportOptions) or "").partition("Attributes:\n")[2]
    text = inspect.getdoc(writer) or ""
    writer.__doc__ = text.replace(_POINTER, entries.partition("\n\n")[0])
    vars(writer)["__signature__"] = own.replace(parameters=[*parameters, *shared])
    return writer


#: The line of a writer's docstring that stands for all of them.
_POINTER = "    **options: those of every writer, `ExportOptions`."

_SOME_PLATFORMS = 'platforms=("cpu", "cuda")'


def checked_platforms(platforms: str | Sequence[str]) -> tuple[str, ...]:
    platforms = as_strings("platforms", platforms, _SOME_PLATFORMS)
    if not platforms or not set(platforms) <= set(PLATFORMS):
        raise InvalidArgumentError(
            "platforms: expected some of cpu, cuda, rocm and tpu.",
            got=f"platforms={platforms}",
            write=_SOME_PLATFORMS,
        )
    return platforms


def signature_keys(methods: Mapping[str, Any] | None) -> list[str]:
    """Returns the keys of the signatures: the given ones, or the default one."""
    if methods is None:
        return [DEFAULT]
    what = "methods must be a dict by signature."
    write = 'methods={"encode": "encode", "score": "__call__"}'
    return list(as_named("methods", methods, what, write))


#: What to write for a format without variables.
STATE_ELSEWHERE = (
    "the state as an input and an output of the model; to_saved_model, to_stablehlo or to_torch "
    'with state="update"'
)


def check_state(state: object, *, updates: bool = False) -> None:
    """Refuses an unknown `state=`, and "update" of a format without variables."""
    if not updates and isinstance(state, str) and state == "update":
        raise InvalidArgumentError(
            "A file of this format has no variables that a call could assign.",
            got="state='update'",
            write=f"state='keep'; or {STATE_ELSEWHERE}",
        )
    states = ("frozen", "update", "keep") if updates else ("frozen", "keep")
    checked_choice(state, states, "state")


def by_signature(name: str, value: object, keys: Sequence[str], several: bool) -> dict[str, Any]:
    """An argument for each signature; with `several`, it must be a dict over some keys."""
    if value is None:
        return {}
    named = several or len(keys) > 1
    if is_mapping(value) and set(value) <= set(keys) and named:
        return dict(value)
    if not several:
        return {keys[0]: value}
    raise InvalidArgumentError(
        "With several signatures, the argument must be a dict over signatures.",
        where=name,
        got=sorted(value) if is_mapping(value) else type(value).__name__,
        write=f"{name}={{{keys[0]!r}: ...}}",
    )
