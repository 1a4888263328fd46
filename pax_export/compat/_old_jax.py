"""Names removed from JAX since 2021, and their replacements, by module.

Most are current names; the others are in `_old_functions.py`. A test compares the list with the
migration guide.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy

from pax_export.compat import _old_functions as old


class Old(NamedTuple):
    """One removed name."""

    now: str | Callable[[], Any]  # dotted name of the replacement, or its factory
    write: str  # the current name for programs


def _same_names(names: str, home: str, write: str | None = None) -> dict[str, Old]:
    """Returns entries for names that a current module has unchanged."""
    return {name: Old(f"{home}.{name}", f"{write or home}.{name}") for name in names.split()}


def _tree_name(name: str) -> str:
    return f"jax.tree.{name.removeprefix('tree_')}"


_ARRAY = Old("jax.Array", "jax.Array")
_MESHES = _same_names("Mesh PartitionSpec NamedSharding", "jax.sharding")
_MAP = Old("jax.tree_util.tree_map", "jax.tree.map")

#: Module -> name -> replacement.
OLD_NAMES: dict[str, dict[str, Old]] = {
    "jax": {
        **{
            name: Old(f"jax.tree_util.{name}", _tree_name(name))
            for name in "tree_map tree_flatten tree_unflatten tree_leaves tree_structure "
            "tree_transpose".split()
        },
        "tree_multimap": _MAP,
        **_same_names("treedef_is_leaf", "jax.tree_util"),
        "device_put_replicated": Old(lambda: old.device_put_replicated, "jax.device_put"),
        "device_put_sharded": Old(lambda: old.device_put_sharded, "jax.device_put"),
        "xla_computation": Old(lambda: old.xla_computation, "jax.jit(f).lower(x).as_text()"),
        "host_id": Old("jax.process_index", "jax.process_index"),
        "host_count": Old("jax.process_count", "jax.process_count"),
        "host_ids": Old(
            lambda: lambda: list(range(jax.process_count())), "range(jax.process_count())"),
        "clear_backends": Old("jax.clear_caches", "jax.clear_caches"),
        "partial": Old("functools.partial", "functools.partial"),
        "curry": Old(lambda: partial(partial, partial), "functools.partial(functools.partial, f)"),
        "ShapedArray": Old("jax.core.ShapedArray", "jax.ShapeDtypeStruct"),
        "checkpoint": Old(
            lambda: old.without_arguments("jax.checkpoint", "concrete"), "no concrete="),
        "remat": Old(lambda: old.without_arguments("jax.checkpoint", "concrete"), "no concrete="),
    },
    "jax.tree_util": {"tree_multimap": _MAP},
    "jax.numpy": {
        "DeviceArray": _ARRAY,
        "clip": Old(
            lambda: old.rename_arguments("jax.numpy.clip", a="", a_min="min", a_max="max"),
            "jnp.clip(x, min=, max=)",
        ),
        "reshape": Old(
            lambda: old.rename_arguments("jax.numpy.reshape", newshape="shape"), "shape="),
        **{
            name: Old(
                lambda name=name: old.rename_arguments(f"jax.numpy.{name}", interpolation="method"),
                "method=",
            )
            for name in ("quantile", "percentile", "nanquantile", "nanpercentile")
        },
        "sort": Old(lambda: old.without_arguments("jax.numpy.sort", "kind"), "no kind="),
        "argsort": Old(lambda: old.without_arguments("jax.numpy.argsort", "kind"), "no kind="),
        "where": Old(lambda: old.where, "jnp.where(condition, x, y)"),
        "msort": Old(lambda: lambda a: jnp.sort(jnp.asarray(a), axis=0), "jnp.sort(x, axis=0)"),
        "row_stack": Old("jax.numpy.vstack", "jnp.vstack"),
        "in1d": Old(lambda: old.in1d, "jnp.isin"),
        "trapz": Old("jax.numpy.trapezoid", "jnp.trapezoid"),
        "product": Old("jax.numpy.prod", "jnp.prod"),
        "cumproduct": Old("jax.numpy.cumprod", "jnp.cumprod"),
        "sometrue": Old("jax.numpy.any", "jnp.any"),
        "alltrue": Old("jax.numpy.all", "jnp.all"),
        "round_": Old("jax.numpy.round", "jnp.round"),
        "fix": Old("jax.numpy.trunc", "jnp.trunc"),
        "issubsctype": Old(
            lambda: lambda x, kind: bool(jnp.issubdtype(getattr(x, "dtype", x), kind)),
            "jnp.issubdtype(x.dtype, t)"),
        "NINF": Old(lambda: -float("inf"), "-jnp.inf"),
        "PZERO": Old(lambda: 0.0, "0.0"),
        "NZERO": Old(lambda: -0.0, "-0.0"),
    },
    "jax.numpy.linalg": {
        "pinv": Old(lambda: old.rename_arguments("jax.numpy.linalg.pinv", rcond="rtol"), "rtol="),
        "matrix_rank": Old(
            lambda: old.rename_arguments("jax.numpy.linalg.matrix_rank", tol="rtol"), "rtol="
        ),
    },
    "jax.random": {
        "KeyArray": _ARRAY,
        "PRNGKeyArray": _ARRAY,
        "shuffle": Old(lambda: old.shuffle, "jax.random.permutation(key, x, independent=True)"),
        **{
            f"{kind}_key": Old(
                lambda kind=kind: old.with_implementation(kind),
                f'jax.random.PRNGKey(seed, impl="{kind}")',
            )
            for kind in ("threefry2x32", "rbg", "unsafe_rbg")
        },
    },
    "jax.ops": {
        "index": Old(lambda: old.INDEX, "x.at[...]"),
        **{
            f"index_{act}": Old(
                lambda method=method: old.index_act(method), f"x.at[i].{method}(y)"
            )
            for act, method in {
                "update": "set",
                "add": "add",
                "mul": "multiply",
                "min": "min",
                "max": "max",
            }.items()
        },
    },
    "jax.nn": {"normalize": Old("jax.nn.standardize", "jax.nn.standardize")},
    "jax.lax": {
        "tie_in": Old(lambda: lambda x, y: y, "y"),
        "prod": Old("math.prod", "math.prod"),
    },
    "jax.scipy.linalg": {
        **_same_names("tril triu", "jax.numpy", "jnp"),
        "polar_unitary": Old(
            lambda: lambda a: jax.scipy.linalg.polar(a)[0], "jax.scipy.linalg.polar(x)[0]"),
        "solve": Old(lambda: old.solve, 'assume_a="pos"'),
    },
    "jax.config": {"config": Old("jax.config", "jax.config")},
    "jax.core": {"get_aval": Old("jax.typeof", "jax.typeof")},
    "jax.abstract_arrays": {"ShapedArray": Old("jax.core.ShapedArray", "jax.ShapeDtypeStruct")},
    "jax.util": {
        "safe_map": Old(
            lambda: lambda f, *args: [f(*each) for each in zip(*args, strict=True)],
            "map, with lengths compared"),
        "safe_zip": Old(
            lambda: lambda *args: list(zip(*args, strict=True)), "zip(..., strict=True)"),
        "unzip2": Old(lambda: old.unzip2, "zip(*pairs)"),
        "partial": Old("functools.partial", "functools.partial"),
        "prod": Old("math.prod", "math.prod"),
    },
    "jax.interpreters.xla": {
        "DeviceArray": _ARRAY,
        "_DeviceArray": _ARRAY,
        "Buffer": _ARRAY,
        "Device": Old("jax.Device", "jax.Device"),
        "device_put": Old("jax.device_put", "jax.device_put"),
    },
    "jax.interpreters.pxla": {
        "ShardedDeviceArray": _ARRAY,
        "Mesh": _MESHES["Mesh"],
        "PartitionSpec": _MESHES["PartitionSpec"],
    },
    "jax.lib.xla_bridge": _same_names(
        "get_backend", "jax.extend.backend"
    ) | _same_names("device_count local_device_count devices local_devices process_index", "jax"),
    "jax.tools.colab_tpu": {"setup_tpu": Old(
        lambda: lambda *args, **kwargs: None, "nothing: jax finds a TPU")},
    "jax.experimental": {
        "PartitionSpec": _MESHES["PartitionSpec"],
        "enable_x64": Old(
            lambda: lambda new_val=True: jax.enable_x64(new_val), "jax.enable_x64(True)"),
        "disable_x64": Old(lambda: lambda: jax.enable_x64(False), "jax.enable_x64(False)"),
    },
    "jax.experimental.maps": {"Mesh": _MESHES["Mesh"]},
    "jax.experimental.pjit": {
        "pjit": Old(
            lambda: old.rename_arguments(
                "jax.jit", in_axis_resources="in_shardings", out_axis_resources="out_shardings"
            ),
            "jax.jit(f, in_shardings=, out_shardings=)",
        ),
        "with_sharding_constraint": Old(
            lambda: old.rename_arguments(
                "jax.lax.with_sharding_constraint", axis_resources="shardings"),
            "jax.lax.with_sharding_constraint",
        ),
        "PartitionSpec": _MESHES["PartitionSpec"],
        "NamedSharding": _MESHES["NamedSharding"],
    },
    "jax.experimental.host_callback": {
        "id_print": Old(lambda: old.id_print, "jax.debug.print"),
        "id_tap": Old(lambda: old.id_tap, "jax.debug.callback"),
        "call": Old(lambda: old.host_call, "jax.pure_callback, jax.experimental.io_callback"),
        "barrier_wait": Old("jax.effects_barrier", "jax.effects_barrier"),
    },
}  # fmt: skip

#: Modules that have another name today.
OLD_MODULES = {
    "jax.api": "jax",
    "jax.ad": "jax.interpreters.ad",
    "jax.xla": "jax.interpreters.xla",
    "jax.pxla": "jax.interpreters.pxla",
    "jax.partial_eval": "jax.interpreters.partial_eval",
    "jax.linear_util": "jax.extend.linear_util",
    "jax.experimental.optimizers": "jax.example_libraries.optimizers",
    "jax.experimental.stax": "jax.example_libraries.stax",
}
