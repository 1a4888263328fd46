"""SavedModels that others wrote: the XlaCallModule operations in them, made portable.

Only the operations change.  Variables, assets, signatures, and the names of
all functions stay as they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pax_export._errors import ExportPathError, UnsupportedOperationError
from pax_export.export.artifact import compatibility
from pax_export.export.lowering.lower import CALLING_CONVENTION, XLA_EXPANDS, portable

_OPERATION = "XlaCallModule"
#: How jax2tf calls back into the graph of TensorFlow; with it go functions of the graph.
_CALLS_OF_TENSORFLOW = frozenset(("tf.call_tf_function",))
#: Calling conventions 9 and 10 are needed for these only.
_SHARDING, _TOKENS = b"sdy.", b"token"
#: Since when XlaCallModule has an attribute; an older TensorFlow refuses what it does not know.
_SHARDY = "use_shardy_partitioner"


@dataclass(frozen=True)
class Module:
    """What one operation came from, and what it came to."""

    function: str  # the TensorFlow function that holds it
    stablehlo: tuple[compatibility.Version, compatibility.Version]  # before, after
    calling_convention: tuple[int, int]
    bytes: tuple[int, int]
    changes: dict[str, int]


def mend(model: Any, directory: Path) -> list[Module]:
    """Makes every module of a SavedModel portable, in place."""
    mended = [_mend(name, node) for name, node in _operations(model)]
    if not mended:
        raise ExportPathError(
            "There is no program of jax in this SavedModel, so there is nothing to mend.",
            where=str(directory),
            got=f"no operation {_OPERATION}",
            write="a SavedModel that jax2tf, orbax-export, Keras on jax, or pax_export wrote",
        )
    return mended


def _operations(model: Any) -> Iterator[tuple[str, Any]]:
    """Each operation that calls a module, with the name of its function."""
    for graph in model.meta_graphs:
        yield from (("graph", node) for node in graph.graph_def.node if node.op == _OPERATION)
        for function in graph.graph_def.library.function:
            for node in function.node_def:
                if node.op == _OPERATION:
                    yield function.signature.name, node


def _mend(function: str, node: Any) -> Module:
    old, convention = node.attr["module"].s, node.attr["version"].i
    calls_tensorflow = bool(node.attr["function_list"].list.func)
    allowed = XLA_EXPANDS | (_CALLS_OF_TENSORFLOW if calls_tensorflow else frozenset())
    changes: Counter[str] = Counter()
    try:
        new = portable(old, allowed, changes=changes)
    except UnsupportedOperationError as error:
        raise UnsupportedOperationError(
            error.what,
            where=", ".join(filter(None, (function, error.where))),
            got=error.got,
            write="pax_export.export.to_saved_model, which writes linear algebra without LAPACK, "
            "on the model itself",
        ) from error
    node.attr["module"].s = new.module
    needed = _needed_convention(convention, new.module)
    node.attr["version"].i = needed
    if needed < 10 and _SHARDY in node.attr:
        changes[f"attribute {_SHARDY}"] += node.attr[_SHARDY].b
        del node.attr[_SHARDY]
    return Module(
        function,
        (_written_for(old), new.stablehlo),
        (convention, needed),
        (len(old), len(new.module)),
        dict(changes),
    )


def _needed_convention(written: int, module: bytes) -> int:
    if _SHARDING in module or _TOKENS in module:
        return written
    # What is older than ours says what it says by other means; it is read as it is.
    return min(written, CALLING_CONVENTION)


def _written_for(module: bytes) -> compatibility.Version:
    """The version of StableHLO that the bytes name at their beginning."""
    match = re.search(rb"StableHLO_v([0-9.]+)", module[:64])
    return tuple(map(int, match[1].decode().split("."))) if match else ()
