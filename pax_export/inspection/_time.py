"""Measures the share of time of each module."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import jax
import numpy as np

from pax_export._errors import InvalidArgumentError
from pax_export._types import PyTree
from pax_export.core import purecall
from pax_export.export.artifact import dimensions
from pax_export.inspection._calls import ModuleCall, Trace

_LEAST_SECONDS = 0.02  # of all repetitions together
_LEAST_REPETITIONS = 3


def time_shares(trace: Trace) -> dict[str, float]:
    """By path, the time of a module's calls as a share of the root's.

    Each call is compiled and timed alone, on random inputs of the shapes that the trace
    saw.  A compiler may fuse what lies between modules, so shares need not add up.
    """
    seconds = {path: _seconds(path, call) * call.count for path, call in trace.calls.items()}
    whole = seconds.get("") or max(seconds.values(), default=1.0)
    return {path: each / whole for path, each in seconds.items()}


def _seconds(path: str, call: ModuleCall) -> float:
    leaves, tree = jax.tree_util.tree_flatten((call.module, *call.arguments))
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def run(arrays: list[Any]) -> Any:
        given = list(leaves)
        for place, array in zip(places, arrays):
            given[place] = array
        module, args, kwargs = jax.tree_util.tree_unflatten(tree, given)
        output = purecall(module, *args, **kwargs)
        return [leaf for leaf in jax.tree_util.tree_leaves(output) if _is_array(leaf)]

    random = np.random.default_rng(0)
    arrays = [_random(leaves[place], random, path) for place in places]
    compiled = jax.jit(run).lower(arrays).compile()
    jax.block_until_ready(compiled(arrays))
    took: list[float] = []
    while sum(took) < _LEAST_SECONDS or len(took) < _LEAST_REPETITIONS:
        begin = time.perf_counter()
        jax.block_until_ready(compiled(arrays))
        took.append(time.perf_counter() - begin)
    return median(took)


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _random(leaf: PyTree, random: np.random.Generator, path: str) -> Any:
    if not all(isinstance(size, int) for size in leaf.shape):
        raise InvalidArgumentError(
            "The time of a call is measured with sizes that are numbers.",
            where=path or "(root)",
            got=str(tuple(map(str, leaf.shape))),
            write="pax.inspect(net, x, measure=True) with an array x",
        )
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape)
    return jax.numpy.asarray(dimensions.random_array(leaf.shape, np.dtype(leaf.dtype), random))
