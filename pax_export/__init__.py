"""Immutable pytree modules for JAX, with exports that work where they are served.

The idea in four sentences: a module is data, arrays and a static description of
everything else.  Whoever changes one gets a new one; inside `pure`, `mutable`
and constructors a copy is open for change, and only there.  Every transform,
precision policy, freeze and export is one rule applied to that data: split the
leaves, do one thing, merge.  An export is the same data written where other
programs can run it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pax_export._optional import is_installed, require

# Without jax there is no library.  But a process that serves what was exported may have none,
# and the command line inspects, tests and runs SavedModels there.
if TYPE_CHECKING or is_installed("jax"):
    import pax_export.experimental as experimental
    import pax_export.nets as nets
    import pax_export.optim as optim
    import pax_export.precision as precision
    import pax_export.transforms as transforms
    import pax_export.utils as utils
    import pax_export.weights as weights
    from pax_export.compat import install_as_pax
    from pax_export.core import (
        EmptyNode,
        Module,
        ParameterModule,
        StateModule,
        assert_structure_equal,
        enable_eval_mode,
        enable_train_mode,
        freeze_parameters,
        module_and_value,
        next_rng_key,
        parameters_method,
        pure,
        purecall,
        seed_rng_key,
        select_parameters,
        unfreeze_parameters,
        update_parameters,
    )
    from pax_export.nn import (
        EMA,
        GRU,
        LSTM,
        BatchNorm1D,
        BatchNorm2D,
        Conv1D,
        Conv1DTranspose,
        Conv2D,
        Conv2DTranspose,
        Dropout,
        Embed,
        GroupNorm,
        GRUState,
        Identity,
        Lambda,
        LayerNorm,
        Linear,
        LSTMState,
        MultiHeadAttention,
        RngSeq,
        Sequential,
        VanillaRNN,
        VanillaRNNState,
        avg_pool,
        dropout,
        max_pool,
    )
    from pax_export.optim import build_update_fn
    from pax_export.precision import apply_mp_policy, unwrap_mp_policy
    from pax_export.transforms import grad, value_and_grad
    from pax_export.transforms._loop import scan
    from pax_export.weights import load_weights, save_weights

if TYPE_CHECKING:
    from pax_export import export
    from pax_export import opax as opax

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    import pax_export.checkpoint as checkpoint
    import pax_export.sharding as sharding

# Loaded when first used: many programs do without, and some need packages of their own.
_ON_FIRST_USE = ("checkpoint", "export", "opax", "sharding")
_WITHOUT_JAX = ("export",)

__all__ = [
    "BatchNorm1D",
    "BatchNorm2D",
    "Conv1D",
    "Conv1DTranspose",
    "Conv2D",
    "Conv2DTranspose",
    "Dropout",
    "EMA",
    "Embed",
    "EmptyNode",
    "GRU",
    "GRUState",
    "GroupNorm",
    "Identity",
    "LSTM",
    "LSTMState",
    "Lambda",
    "LayerNorm",
    "Linear",
    "Module",
    "MultiHeadAttention",
    "ParameterModule",
    "RngSeq",
    "Sequential",
    "StateModule",
    "VanillaRNN",
    "VanillaRNNState",
    "apply_mp_policy",
    "assert_structure_equal",
    "avg_pool",
    "build_update_fn",
    "checkpoint",
    "dropout",
    "enable_eval_mode",
    "enable_train_mode",
    "experimental",
    "export",
    "freeze_parameters",
    "grad",
    "install_as_pax",
    "load_weights",
    "max_pool",
    "module_and_value",
    "nets",
    "next_rng_key",
    "optim",
    "parameters_method",
    "precision",
    "pure",
    "purecall",
    "save_weights",
    "scan",
    "seed_rng_key",
    "select_parameters",
    "sharding",
    "transforms",
    "unfreeze_parameters",
    "unwrap_mp_policy",
    "update_parameters",
    "utils",
    "value_and_grad",
    "weights",
]


def __getattr__(name: str) -> Any:
    if name in __all__ and name not in _WITHOUT_JAX:
        require("jax", "all", f"{__name__}.{name}")
    if name in _ON_FIRST_USE:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
