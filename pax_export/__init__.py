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
import sys
from typing import TYPE_CHECKING, Any

from pax_export._optional import is_installed, require

# Without jax there is no library.  But a process that serves what was exported may have none,
# and the command line inspects, tests and runs SavedModels there.
if TYPE_CHECKING or is_installed("jax"):
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

# What loads on first use, as type checkers and editors see it.  `_ROOMS` and `_NAMES` below
# say the same to Python; a test compares the two, and `__all__`.
if TYPE_CHECKING:
    from pax_export import checkpoint as checkpoint
    from pax_export import compat as compat
    from pax_export import experimental as experimental
    from pax_export import export as export
    from pax_export import flattener as flattener
    from pax_export import graph as graph
    from pax_export import lazy as lazy
    from pax_export import nets as nets
    from pax_export import nn as nn
    from pax_export import opax as opax
    from pax_export import optim as optim
    from pax_export import precision as precision
    from pax_export import sharding as sharding
    from pax_export import transforms as transforms
    from pax_export import utils as utils
    from pax_export import weights as weights
    from pax_export.compat import install_as_pax
    from pax_export.nn import *  # noqa: F403
    from pax_export.optim import build_update_fn
    from pax_export.precision import apply_mp_policy, unwrap_mp_policy
    from pax_export.transforms import grad, value_and_grad
    from pax_export.transforms._loop import scan
    from pax_export.weights import load_weights, save_weights

__version__ = "0.1.0.dev0"

# Rooms that load on first use, as attributes of the package or by their names: a program pays
# for what it uses.  `core` is loaded at once; `cli` has nothing to offer to programs.
_ROOMS = frozenset(
    "checkpoint compat experimental export flattener graph lazy nets nn opax optim "
    "precision sharding transforms utils weights".split()
)
# Names that the package takes from such a room.
_NAMES = {
    "compat": "install_as_pax",
    "nn": "EMA GRU LSTM BatchNorm1D BatchNorm2D Conv1D Conv1DTranspose Conv2D Conv2DTranspose "
    "Dropout Embed GroupNorm GRUState Identity Lambda LayerNorm Linear LSTMState "
    "MultiHeadAttention RngSeq Sequential VanillaRNN VanillaRNNState avg_pool dropout "
    "max_pool",
    "optim": "build_update_fn",
    "precision": "apply_mp_policy unwrap_mp_policy",
    "transforms": "grad value_and_grad",
    "transforms._loop": "scan",
    "weights": "load_weights save_weights",
}
_HOMES = {name: room for room, names in _NAMES.items() for name in names.split()}
_WITHOUT_JAX = ("compat", "export")

__all__ = [
    "EmptyNode",
    "Module",
    "ParameterModule",
    "StateModule",
    "apply_mp_policy",
    "assert_structure_equal",
    "build_update_fn",
    "checkpoint",
    "enable_eval_mode",
    "enable_train_mode",
    "experimental",
    "export",
    "freeze_parameters",
    "grad",
    "install_as_pax",
    "load_weights",
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

# And the layers.  A type checker reads their names in the room, which is not loaded for them.
if TYPE_CHECKING:
    __all__ += nn.__all__
else:  # a `__getattr__` would let type checkers believe in any name
    __all__ += _NAMES["nn"].split()

    def __getattr__(name: str) -> Any:
        """Loads a room, or the room of a name, when it is first used."""
        if name not in _ROOMS and name not in __all__:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}",
                name=name,
                obj=sys.modules[__name__],  # Python suggests names that are alike
            )
        if name not in _WITHOUT_JAX:
            require("jax", "all", f"{__name__}.{name}")
        if name in _ROOMS:
            return importlib.import_module(f"{__name__}.{name}")  # becomes an attribute
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'core')}"), name)
        globals()[name] = value  # so that this function is not asked again
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
