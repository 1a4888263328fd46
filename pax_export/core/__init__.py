"""Modules: immutable pytrees, and the scopes in which they are mutable."""

# Rooms above import names that are not public.
# pyright: reportUnusedImport=false

from pax_export.core._call_paths import (
    Labeling,
    label_modules,
    path_in,
    path_of_call,
    record_calls,
    traced_anew,
    with_labels,
)
from pax_export.core._check import (
    assert_structure_equal,
    describe_array,
    structure_differences,
)
from pax_export.core._declared import (
    Declared,
    DeclaredArray,
    adaptable_arrays,
    declared_at,
    declared_in,
    kernel_of,
)
from pax_export.core._edit import SPECS, Spec, set_training, specs_of, with_class, with_static
from pax_export.core._metaclass import made_of, remember_call, restore, to_picklable
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
from pax_export.core._parameters import (
    ROLES,
    STATE,
    TRAINABLE,
    Frozen,
    differentiating,
    frozen_of,
    merge,
    named_roles,
    parameters_method,
    warn_of_untrained,
    with_frozen,
)
from pax_export.core._pure import (
    module_and_value,
    mutable,
    open_copies,
    pure,
    purecall,
    require_module,
)
from pax_export.core._random import (
    filled_array,
    keys_changed_by,
    next_rng_key,
    sample_padded,
    seed_rng_key,
    split_rng_key,
)
from pax_export.core._scopes import (
    anything_is_open,
    changed_modules,
    is_constructing,
    is_open,
    lent_to_constructors,
    open_children,
    require_open,
    store_attribute,
    take_over,
)
from pax_export.core._state_dict import load_state_dict, state_dict
from pax_export.core._static import (
    LeafValue,
    aspect_of,
    derive_class,
    register_aspect,
    register_verbs,
    static_key,
)
from pax_export.core._summary import count_array_elements, pax_line, summary_lines, tree_lines
from pax_export.core._traversal import (
    apply_bottom_up,
    fold_bottom_up,
    is_at,
    is_labeled,
    join_path,
    map_attributes,
    map_submodules,
    modules_and_leaves,
    modules_with_paths,
    named_leaves,
    named_modules,
    one_level,
    path_name,
    rebuild_tree,
)
from pax_export.core._tree import (
    STATIC,
    EmptyNode,
    Node,
    attributes_now,
    attributes_of,
    current_kinds,
    flatten,
    from_folded,
    is_array,
    is_floating,
    is_node,
    kind_of,
    owner_of,
    set_owner,
    update_moduledef,
)
from pax_export.core.selections.filters import (
    All,
    AnyOf,
    FilteredLeaf,
    Not,
    Param,
    PathContains,
    PathIn,
    RngState,
    Selector,
    State,
    as_filter,
    as_rule,
    has_names,
    is_random_key,
    leaves_of,
    require_names,
    require_names_among,
)
from pax_export.core.selections.finding import matcher
from pax_export.core.selections.paths import (
    Chosen,
    better_path,
    escape_step,
    path_pattern,
)
from pax_export.core.selections.selection import Selection

# Names imported but not listed are for other rooms of the package.
__all__ = [
    "Declared",
    "DeclaredArray",
    "EmptyNode",
    "Module",
    "ParameterModule",
    "Selection",
    "StateModule",
    "assert_structure_equal",
    "enable_eval_mode",
    "enable_train_mode",
    "freeze_parameters",
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
