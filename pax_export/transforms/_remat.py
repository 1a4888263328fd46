"""remat: a function whose inner values are computed again for its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pax_export.transforms._held import Held, hold, releasing
from pax_export.transforms._lift import Call, Result, wraps


def remat(
    f: Callable[..., Any],
    *,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: Callable[..., bool] | None = None,
) -> Callable[..., Any]:
    """Makes a function that keeps nothing for its gradient but its arguments.

    What happened inside is computed again, with the same random keys, so that
    dropout drops the same elements.

    Args:
        f: takes arrays and modules.
        prevent_cse: as in `jax.checkpoint`; False inside of `scan` saves time.
        static_argnums: the positional arguments that are no arrays.
        policy: which values to keep all the same, e.g.
            ``jax.checkpoint_policies.dots_saveable``.

    Returns:
        A function of the same arguments.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> from pax_export import transforms as T
        >>> loss = T.remat(lambda net, x: jnp.sin(net(x)).sum())
        >>> T.grad(loss)(pax.Linear(2, 3), jnp.ones((1, 2))).weight.shape
        (2, 3)
    """
    numbers = [static_argnums] if isinstance(static_argnums, int) else list(static_argnums)
    jax_options = {"prevent_cse": prevent_cse, "policy": policy}

    @wraps(f)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return call_recomputed(f, args, kwargs, numbers, jax_options)

    return recomputed


def call_recomputed(
    f: Callable,
    args: tuple,
    kwargs: dict,
    static: Sequence[int],
    jax_options: dict[str, Any],
    strict: bool = False,
) -> Any:
    """One call of such a function; ``strict`` as for `Call`."""
    held = tuple(hold(args, static))
    call = Call(releasing(f) if static else f, held, kwargs, strict=strict)
    # Held arguments are leaves of the call, and no business of jax.
    numbers = [n for n, leaf in enumerate(call.leaves) if type(leaf) is not Held]
    results: list[tuple[Result, list[int | None]]] = []

    def run(given: list[Any]) -> list[Any]:
        leaves = list(call.leaves)
        for number, leaf in zip(numbers, given):
            leaves[number] = leaf
        result = call.inside(leaves)
        results.append((result, result.untouched(leaves)))
        return [x for x, number in zip(result.leaves, results[-1][1]) if number is None]

    changed = iter(jax.checkpoint(run, **jax_options)([call.leaves[n] for n in numbers]))
    result, untouched = results[-1]
    leaves = [next(changed) if n is None else call.leaves[n] for n in untouched]
    return call.finish(result, leaves)
