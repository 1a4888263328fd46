"""Transforms of functions that take modules."""

from pax_export.core import All, Not, Param, PathContains, PathIn, RngState, State
from pax_export.core import AnyOf as Any
from pax_export.transforms._axes import StateAxes
from pax_export.transforms._control_flow import cond, fori_loop, map, switch, while_loop
from pax_export.transforms._grad import grad, value_and_grad
from pax_export.transforms._grad import prepared_gradients as prepared_gradients
from pax_export.transforms._jit import Folded, fold, jit, unfold
from pax_export.transforms._lift import describe_result
from pax_export.transforms._lifted_modules import Remat, Scan, Vmap, stack_layers, unstack_layers
from pax_export.transforms._remat import remat
from pax_export.transforms._rng_split import rng_fold
from pax_export.transforms._scan import scan, scan_over_time
from pax_export.transforms._sharding import PARTITION_NAME, get_named_sharding, get_partition_spec
from pax_export.transforms._vmap import vmap

# Names that are imported but not in `__all__` are for other packages of pax_export.
__all__ = [
    "All",
    "Any",
    "Not",
    "PARTITION_NAME",
    "Param",
    "PathContains",
    "PathIn",
    "Remat",
    "RngState",
    "Scan",
    "State",
    "StateAxes",
    "Vmap",
    "cond",
    "fori_loop",
    "get_named_sharding",
    "get_partition_spec",
    "grad",
    "jit",
    "map",
    "remat",
    "rng_fold",
    "scan",
    "stack_layers",
    "switch",
    "unstack_layers",
    "value_and_grad",
    "vmap",
    "while_loop",
]
