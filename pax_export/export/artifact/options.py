"""`ExportOptions`: the options of every writer, written once.

The functions that write show them in their signatures and docstrings (`takes_options` of
`pipeline/arguments.py`, where `Request` has the defaults), and the command line takes their values
from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict, get_args, get_type_hints


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


def values(option: str) -> list[str]:
    """The strings that an option may be, for the command line."""
    hint = get_type_hints(ExportOptions)[option]
    found = (each for part in (hint, *get_args(hint)) for each in get_args(part))
    return list(dict.fromkeys(each for each in found if isinstance(each, str)))


#: Options of several formats, as `argparse` has them.
PLATFORMS: Mapping[str, Any] = {
    "flag": "--platform",
    "action": "append",
    "choices": ("cpu", "cuda", "rocm", "tpu"),
    "help": "of savedmodel and stablehlo: a platform to lower for; default: all",
}
ORDERS: Mapping[str, Any] = {
    "type": int,
    "metavar": "N",
    "help": "of savedmodel and stablehlo: the order of derivatives",
}
LEVELS: Mapping[str, Any] = {
    "type": int,
    "choices": (1, 4),
    "help": "of onnx and tflite: 1 for float32 products with quantized weights",
}
