"""Custom calls of a StableHLO program, checked against an allowlist: some take raw pointers."""

from __future__ import annotations

import re
from typing import Any

from pax_export._foundations.optional import require

#: XLA expands them itself, or they are only annotations.
EXPANDED = frozenset("""
    Sharding SPMDFullToShardShape SPMDShardToFullShape annotate_device_placement shape_assertion
    stablehlo.dynamic_reduce_window stablehlo.dynamic_rng_bit_generator stablehlo.dynamic_top_k
    stablehlo.dynamic_approx_top_k ApproxTopK mhlo.topk mhlo.erf AllocateBuffer
    Eigh Qr ProductOfElementaryHouseholderReflectors LuDecomposition
    xla.sdy.FuncResultSharding xla.sdy.GlobalToLocalShape xla.sdy.LocalToGlobalShape
""".split())  # fmt: skip
#: Functions of the SavedModel, which are looked over like all others.
_OF_TENSORFLOW = frozenset(("tf.call_tf_function",))
#: Operations that wait for another program.
WAITING = ("infeed", "outfeed", "send", "recv")

#: A module contains names literally or, in its text, with escapes for some letters.
_MARKS = tuple(each.encode() for each in ("custom_call", *WAITING, "\\"))
_OPERATION = re.compile(rf"\b(?:stablehlo|mhlo|vhlo)\.({'|'.join(WAITING)})(?:_v\d+)?\b")
_CALL = re.compile(r"\b(?:stablehlo|mhlo|vhlo)\.custom_call(?:_v\d+)?\b(.)(.?)")
_TARGET = re.compile(r'custom_call @(?:"((?:[^"\\]|\\.)*)"|([\w$.-]+))\(')


def may_call(module: bytes) -> bool:
    """Returns whether a module may contain operations to check."""
    return any(mark in module for mark in _MARKS)


def unknown_calls(module: bytes) -> list[str]:
    """Returns the calls of an `XlaCallModule` that are not allowed."""
    if not may_call(module):
        return []
    text = _module_text(module)
    if text is None:
        return ["a program that cannot be read"]
    targets = {quoted or plain for quoted, plain in _TARGET.findall(text)}
    found = sorted(targets - EXPANDED - _OF_TENSORFLOW)
    found += sorted(set(_OPERATION.findall(text)))
    if any(each != (" ", "@") for each in _CALL.findall(text)):
        found.append("a custom call without a name")
    return found


def _module_text(module: bytes) -> str | None:
    """Returns a program as text, by TensorFlow or by jax, whichever can read it."""
    for read in (_text_by_tensorflow, _text_by_jax):
        try:
            return read(module)
        except Exception:  # of several kinds without a public class
            continue
    return None


def _text_by_tensorflow(module: bytes) -> str:
    reader: Any = require("tensorflow.compiler.mlir.stablehlo.stablehlo", "tensorflow", "load")
    passes: Any = require("tensorflow.python.pywrap_mlir", "tensorflow", "load")
    name = "deserialize_portable_artifact"  # and of TensorFlow 2.19 on, with `_str`
    read = getattr(reader, f"{name}_str", None) or getattr(reader, name)
    return passes.ExperimentalRunPassPipeline(read(module), b"", False)


def _text_by_jax(module: bytes) -> str:
    stablehlo: Any = require("jax.extend.mlir.dialects.stablehlo", "all", "load")
    with require("jax.interpreters.mlir", "all", "load").make_ir_context() as context:
        handler = context.attach_diagnostic_handler(lambda diagnostic: True)
        try:
            parsed = stablehlo.deserialize_portable_artifact(context, module)
            return parsed.operation.get_asm(large_elements_limit=16)
        finally:
            handler.detach()
