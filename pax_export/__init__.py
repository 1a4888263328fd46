"""Immutable pytree modules for JAX, and exporters to the common serving runtimes.

A module is data: arrays and a static description of everything else. Only `pure`, `mutable` and
constructors change one, as a mutable copy. Transforms, precision policies, freezing and exports
follow one rule: split the leaves, change some, merge.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
import threading
from typing import TYPE_CHECKING, Any

from pax_export._foundations.optional import is_installed, require

# The library requires jax, but a process that only serves an export may not have it,
# and the command line inspects, tests and runs SavedModels there.
if TYPE_CHECKING or is_installed("jax"):
    from pax_export.core import Declared as Declared
    from pax_export.core import EmptyNode as EmptyNode
    from pax_export.core import Module as Module
    from pax_export.core import ParameterModule as ParameterModule
    from pax_export.core import Selection as Selection
    from pax_export.core import StateModule as StateModule
    from pax_export.core import assert_structure_equal as assert_structure_equal
    from pax_export.core import enable_eval_mode as enable_eval_mode
    from pax_export.core import enable_train_mode as enable_train_mode
    from pax_export.core import freeze_parameters as freeze_parameters
    from pax_export.core import module_and_value as module_and_value
    from pax_export.core import next_rng_key as next_rng_key
    from pax_export.core import parameters_method as parameters_method
    from pax_export.core import pure as pure
    from pax_export.core import purecall as purecall
    from pax_export.core import seed_rng_key as seed_rng_key
    from pax_export.core import select_parameters as select_parameters
    from pax_export.core import unfreeze_parameters as unfreeze_parameters
    from pax_export.core import update_parameters as update_parameters

# Names loaded on first use, for type checkers and editors; `_HOMES` below reads them here.
if TYPE_CHECKING:
    from pax_export import adapters as adapters
    from pax_export import checkpoint as checkpoint
    from pax_export import compat as compat
    from pax_export import debug as debug
    from pax_export import errors as errors
    from pax_export import experimental as experimental
    from pax_export import export as export
    from pax_export import flattener as flattener
    from pax_export import generation as generation
    from pax_export import graph as graph
    from pax_export import inspection as inspection
    from pax_export import lazy as lazy
    from pax_export import nets as nets
    from pax_export import nn as nn
    from pax_export import opax as opax
    from pax_export import optim as optim
    from pax_export import precision as precision
    from pax_export import quantization as quantization
    from pax_export import sharding as sharding
    from pax_export import transforms as transforms
    from pax_export import utils as utils
    from pax_export import weights as weights
    from pax_export.compat import install_as_pax as install_as_pax
    from pax_export.generation import generate as generate
    from pax_export.inspection import inspect as inspect
    from pax_export.nn import *  # noqa: F403
    from pax_export.optim import build_update_fn as build_update_fn
    from pax_export.precision import apply_mp_policy as apply_mp_policy
    from pax_export.precision import unwrap_mp_policy as unwrap_mp_policy
    from pax_export.quantization import quantize as quantize
    from pax_export.transforms import grad as grad
    from pax_export.transforms import value_and_grad as value_and_grad
    from pax_export.utils import scan as scan
    from pax_export.weights import load_weights as load_weights
    from pax_export.weights import save_weights as save_weights

__version__ = "0.2.0.dev0"

# Rooms load on first use, as attributes of the package or by their names: a program pays for what
# it uses.  `core` is imported eagerly; `cli` is not for programs.
_SOURCE = (pkgutil.get_data(__name__, "__init__.py") or b"").decode()
_ROOMS = frozenset(re.findall(r"from pax_export import (\w+) as", _SOURCE))
_PUBLIC_ROOMS = _ROOMS - set("compat flattener graph lazy nn opax".split())
_HOMES = {
    name: room for room, name in re.findall(r"from pax_export\.(\w+) import (\w+) as", _SOURCE)
}
# All of `nn`: the list in its file, which is not imported for it.
_NN = (pkgutil.get_data(__name__, "nn/__init__.py") or b"").decode()
_HOMES |= dict.fromkeys(re.findall(r'"(\w+)"', _NN), "nn")
# Python gives up where one thread loads a room that waits for a part of another one, which a second
# thread loads.
_LOADING = threading.RLock()
_WITHOUT_JAX = ("compat", "errors", "export")

if not TYPE_CHECKING:  # they take the names above, and would believe in any name
    __all__ = sorted(_PUBLIC_ROOMS.union(_HOMES))

    def __getattr__(name: str) -> Any:
        """Loads a room, or the room of a name, when it is first used."""
        if name not in _ROOMS and name not in __all__:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}{_elsewhere(name)}",
                name=name,
                obj=sys.modules[__name__],  # Python suggests similar names
            )
        if name not in _WITHOUT_JAX:
            require("jax", "all", f"{__name__}.{name}")
        with _LOADING:
            room = importlib.import_module(f"{__name__}.{_HOMES.get(name, name)}")
        if name in _ROOMS:
            return room  # an attribute from now on
        value = getattr(room, name)
        globals()[name] = value  # so that this function is not asked again
        return value

    def _elsewhere(name: str) -> str:
        """Returns the subpackage that has a public name which the package itself lacks."""
        if name.startswith("_"):
            return ""  # names that Python and notebooks look up
        if name == "Parameter":
            return "; a parameter is an array that a pax.ParameterModule has as an attribute"
        activations = sys.modules.get("jax.nn")
        for each in dir(activations):
            is_alike = each.replace("_", "") == name.lower().replace("_", "")
            if is_alike and callable(getattr(activations, each)):
                return f"; functions are layers, too: jax.nn.{each}"
        homes = []
        for room in (*sorted(_PUBLIC_ROOMS), "experimental.graph"):
            try:
                public = importlib.import_module(f"{__name__}.{room}").__all__
            except ImportError:  # an optional package is missing
                continue
            homes += [f"{__name__}.{room}.{name}"] * (name in public)
        return f"; it is {' or '.join(homes)}" if homes else ""

    def __dir__() -> list[str]:
        return sorted([*__all__, "__version__"])

    # What modules and selections do by means of rooms that load on first use.
    if is_installed("jax"):
        from pax_export.core import register_verbs

        register_verbs(
            add_adapters=lambda: __getattr__("adapters").add,
            inspect=lambda: __getattr__("inspection").inspect,
            under_policy=lambda: __getattr__("precision").under_policy,
        )
