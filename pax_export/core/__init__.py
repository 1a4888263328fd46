"""What a module is: the immutable pytree, and the places where it may change."""

from pax_export.core._check import assert_structure_equal
from pax_export.core._hidden import hidden_arrays
from pax_export.core._module import (
    Module,
    ParameterModule,
    StateModule,
    enable_eval_mode,
    enable_train_mode,
    freeze_parameters,
    select_parameters,
    unfreeze_parameters,
    update_parameters,
)
from pax_export.core._pure import module_and_value, mutable, pure, purecall
from pax_export.core._rng import next_rng_key, seed_rng_key
from pax_export.core._select import parameters_method
from pax_export.core._state_dict import load_state_dict, state_dict
from pax_export.core._tree import EmptyNode
from pax_export.core._walk import named_leaves, named_modules, path_name

__all__ = [
    "EmptyNode",
    "Module",
    "ParameterModule",
    "StateModule",
    "assert_structure_equal",
    "enable_eval_mode",
    "enable_train_mode",
    "freeze_parameters",
    "hidden_arrays",
    "load_state_dict",
    "module_and_value",
    "mutable",
    "named_leaves",
    "named_modules",
    "next_rng_key",
    "parameters_method",
    "path_name",
    "pure",
    "purecall",
    "seed_rng_key",
    "select_parameters",
    "state_dict",
    "unfreeze_parameters",
    "update_parameters",
]
