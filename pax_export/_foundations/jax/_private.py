"""Private JAX APIs we use, and what degrades without each.

Such names are listed here only and looked up by `private`, never imported. Callers handle
None; `say_less` warns once where that does less.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import jax

#: What degrades without each name, where no public API does the same.
PRIVATE: dict[str, str] = {
    "jax._src.core.get_opaque_trace_state": "",
    "jax.interpreters.partial_eval.dce_jaxpr_consts": (
        "exports keep what loops, branches and nested functions compute and nobody reads"
    ),
    "jax._src.state.discharge.discharge_state": (
        "ONNX and TFLite exports refuse models that use jax.new_ref"
    ),
    "jax._src.core.eval_trace": "`with pax.debug.nans()` is jax.debug_nans, which names no module",
    "jax._src.core.set_current_trace": (
        "`with pax.debug.nans()` is jax.debug_nans, which names no module"
    ),
    "jax.experimental.sparse.bcoo._bcoo_dot_general_impl": "",
    "jax.experimental.sparse.bcsr._bcsr_dot_general_impl": "",
}

#: Attributes of jax's objects, in the same way.
PRIVATE_ATTRIBUTES: dict[str, str] = {"jax.export.SymbolicScope._explicit_constraints": ""}

#: APIs that older versions of jax lack, reported in the same way.
_LESS: dict[str, str] = {
    "jax.lax.add_p": (
        "a module that is changed under a jit, grad or vmap that began after it was opened is "
        "not refused: jax may speak of a leaked tracer then"
    ),
}


@functools.cache
def private(name: str) -> Any:
    """Returns jax's object for a name of `PRIVATE`, or None if jax does not have it."""
    if name not in PRIVATE:
        raise KeyError(name)
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        return None


@functools.cache
def say_less(name: str) -> None:
    """Warns once about what degrades because jax removed this name."""
    less = (PRIVATE | PRIVATE_ATTRIBUTES | _LESS)[name]
    text = f"jax {jax.__version__} no longer has {name}, so {less}. A newer pax-export may."
    warnings.warn(text, RuntimeWarning, stacklevel=3)
