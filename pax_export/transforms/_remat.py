"""remat: recomputes intermediate values for the gradient; and layers under a transform."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax

from pax_export._foundations.errors import (
    NearNameWarning,
    a_few,
    near_names,
)
from pax_export._foundations.jaxpr import jaxpr_parameters
from pax_export._foundations.types import PyTree, TracedProgram
from pax_export.core import Module
from pax_export.transforms._axes import StateAxes
from pax_export.transforms._lift import (
    Held,
    LiftedCall,
    Result,
    Strict,
    argument_places,
    require_array_arguments,
    require_array_results,
    wrap_like,
    wrap_static,
)

P = ParamSpec("P")
R = TypeVar("R")


def remat(
    f: Callable[P, R],
    *,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: Callable[..., bool] | None = None,
) -> Callable[P, R]:
    """Makes a function that stores only its arguments for its gradient.

    Intermediate values are recomputed, with the same random keys, so dropout drops the same
    elements.

    Args:
        f: takes arrays and modules; or a layer, which makes another layer.
        prevent_cse: as in `jax.checkpoint`; False inside of `scan` saves time.
        static_argnums: the positional arguments that are not arrays.
        policy: which values to store nevertheless, e.g.
            ``jax.checkpoint_policies.dots_saveable``.

    Returns:
        A function of the same arguments.

    Raises:
        InvalidArgumentError: (a ValueError, when called) there is no such argument.
        InvalidArgumentTypeError: (a TypeError, when called) an argument or a result is not
            an array.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> loss = T.remat(lambda net, x: jnp.sin(net(x)).sum())
        >>> T.grad(loss)(pax.Linear(2, 3), jnp.ones((1, 2))).weight.shape
        (2, 3)
    """
    static = [static_argnums] if isinstance(static_argnums, int) else list(static_argnums)
    if isinstance(f, Module):
        options = {"prevent_cse": prevent_cse, "static_argnums": static, "policy": policy}
        return TransformedLayer(f, remat, options)

    @wrap_like(f)
    def recomputed(*args: P.args, **kwargs: P.kwargs) -> R:
        places = argument_places("static_argnums", static, len(args))
        call = LiftedCall(f, tuple(wrap_static(args, places)), kwargs)
        require_array_arguments(call.parts, "remat", "static_argnums for it, or a closure of f")
        # Static arguments are leaves of the call, unseen by jax.
        leaves = {n: leaf for n, leaf in enumerate(call.leaves) if type(leaf) is not Held}
        results: list[Result] = []

        def run(leaves_by_number: dict[int, Any]) -> list[Any]:
            results.append(call.inside(leaves_by_number))
            require_array_results(results[-1].parts, "remat")
            return [x for x, n in zip(results[-1].leaves, results[-1].untouched) if n is None]

        if names := _names_in(policy):
            _warn_of_unknown_names(names, jax.make_jaxpr(run)(leaves))
        checkpointed = jax.checkpoint(run, prevent_cse=prevent_cse, policy=policy)
        changed = iter(checkpointed(leaves))
        after = [next(changed) if n is None else call.leaves[n] for n in results[-1].untouched]
        return call.finish(results[-1], after)

    return recomputed


def _names_in(policy: Callable[..., Any] | None) -> set[str]:
    """The names that a policy of jax was made for, also of two policies."""
    found: set[str] = set()
    cells = getattr(policy, "__closure__", None) or ()
    for value in (
        *(cell.cell_contents for cell in cells),
        *getattr(policy, "__dict__", {}).values(),
    ):
        if isinstance(value, (set, frozenset)):
            found.update(name for name in value if isinstance(name, str))
        elif callable(value):
            found |= _names_in(value)
    return found


def _warn_of_unknown_names(names: set[str], program: TracedProgram) -> None:
    """Warns unless the function names a value so; several functions may share a policy."""
    own = {name for name in jaxpr_parameters(program, ["name"]) if isinstance(name, str)}
    near = [near_names(name, sorted(own - names)) for name in sorted(names - own)]
    if any(near) or not names & own:
        warning = NearNameWarning(
            "The policy of remat is for names that the function gives to no value.",
            where="remat.policy",
            got=f"{a_few(sorted(names - own), 5)}; the function has "
            f"{a_few(sorted(own), 5) or 'no names'}",
            write="the same name in jax.ad_checkpoint.checkpoint_name(value, name)",
        )
        warnings.warn(warning, stacklevel=4)


# --- what ``T.remat(layer)`` and ``T.vmap(layer)`` return -----------------------------


class TransformedLayer(Module):
    """A layer that is called under a transform; as an attribute it is trained and saved.

    Args:
        layer: any module that can be called.
        transform: a transform of this package that takes the layer as the first argument of a
            function.
        options: those of the transform; ``in_axes`` and ``static_argnums`` count the arguments of
            the layer.

    Attributes:
        layer: the layer.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> block = T.remat(pax.Linear(3, 4))
        >>> block.layer.weight.shape, block(jnp.ones((2, 3))).shape
        ((3, 4), (2, 4))
    """

    def __init__(
        self,
        layer: Module,
        transform: Callable[..., Callable[..., Any]],
        options: dict[str, Any],
    ):
        super().__init__()
        self.layer = layer
        self.transform = transform
        self.options = options

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Calls the layer under the transform; state that the call changes is written back."""
        options = dict(self.options)
        # The layer becomes argument 0.
        if "static_argnums" in options:
            numbers = options["static_argnums"]
            options["static_argnums"] = tuple([n + 1 if n >= 0 else n for n in numbers])
        if "in_axes" in options:
            axes = options["in_axes"]
            each = axes if isinstance(axes, (tuple, list)) else (axes,) * len(args)
            options["in_axes"] = (StateAxes({}), *each)
        call = self.transform(Strict(_call), **options)
        return call(self.layer, *args, **kwargs)


def _call(layer: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    return layer(*args, **kwargs)
