"""Selection: reads or edits parts of a net."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import jmp  # type: ignore  # has no types

from pax_export._foundations.errors import InvalidArgumentError, InvalidArgumentTypeError
from pax_export._foundations.types import Array, DTypeLike, PRNGKey, PyTree
from pax_export.core._check import describe_array
from pax_export.core._containers import is_sequence
from pax_export.core._edit import Change, edit_at, set_training
from pax_export.core._pure import require_module
from pax_export.core._scopes import on_own_array
from pax_export.core._static import verb
from pax_export.core._traversal import apply_bottom_up
from pax_export.core._tree import Node, is_array, is_floating, is_node
from pax_export.core.selections.finding import find, in_order, wants_path
from pax_export.core.selections.paths import (
    Chosen,
    Steps,
    at_or_below,
    dotted_path,
    outermost_paths,
    path_or_root,
    places_of,
    rest_of,
    value_at,
)
from pax_export.core.selections.verbs import freeze_at, reinitialize, unfreeze_at

if TYPE_CHECKING:
    from pax_export.core.selections.filters import Selector


class Selection(Chosen):
    """Parts of a net: modules, arrays, containers, static attributes.

    ``net.at(what)`` makes one. Like the net it is immutable: edits return a new net. For two
    selections of one net, ``a | b`` is their union, ``a & b`` their intersection, and ``~a`` all
    other places.

    A selection is also a filter: `pax_export.transforms` (``wrt=``), rules of
    `pax_export.sharding`, exemptions of `pax_export.precision`, `pax_export.debug.capture` and
    ``trainable=`` of exports take one of the net, or of an earlier version of it.

    Example:
        >>> import jax.numpy as jnp, pax_export as pax
        >>> net = pax.Sequential(pax.Linear(3, 4), pax.BatchNorm1D(4), pax.Linear(4, 2))
        >>> net.at(pax.Linear)
        2 parts of Sequential:
          modules.0  Linear(in_dim=3, out_dim=4, with_bias=True)
          modules.2  Linear(in_dim=4, out_dim=2, with_bias=True)
        >>> body = ~net.at("modules.2")
        >>> net = body.freeze()
        >>> [name for name, _ in pax.core.named_leaves(net.parameters())]
        ['modules.2.weight', 'modules.2.bias']
        >>> net = net.at(pax.Linear).at("bias").apply(jnp.zeros_like)
        >>> net = net.at("modules.1.eps").set(1e-3)
    """

    __slots__ = ("paths", "root")

    root: Any  # the net
    paths: tuple[Steps, ...]  # of the parts, in tree order

    def __init__(self, root: Node, paths: tuple[Steps, ...]):
        object.__setattr__(self, "root", root)
        object.__setattr__(self, "paths", paths)

    @classmethod
    def of(cls, net: Node, what: Selector) -> Self:
        """Selects parts of a module, as ``net.at(what)`` does.

        Args:
            net: a module.
            what: see `Module.at`.

        Raises:
            InvalidArgumentError: nothing in the net matches.
            InvalidArgumentTypeError: ``net`` is not a module, or ``what`` is not a valid selector.
        """
        require_module(net, "at")
        return cls(net, find(net, what))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("A selection is immutable; select again, or combine selections")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __reduce__(self) -> Any:
        return type(self), (self.root, self.paths)

    # --- looking ------------------------------------------------------------------

    def names(self) -> list[str]:
        """The paths of the parts, as modules and weights are named; the net's own is empty."""
        return [dotted_path(steps) for steps in self.paths]

    def values(self) -> list[Any]:
        """The parts, in the order of their names."""
        return [value_at(self.root, steps) for steps in self.paths]

    def items(self) -> Iterator[tuple[str, Any]]:
        """The names with the parts."""
        return zip(self.names(), self.values())

    def get(self) -> Any:
        """Returns the part, or a list if there are several."""
        values = self.values()
        return values[0] if len(values) == 1 else values

    def __len__(self) -> int:
        return len(self.paths)

    def __repr__(self) -> str:
        count = f"{len(self.paths)} part{'s' if len(self.paths) > 1 else ''}"
        names = [path_or_root(name) for name in self.names()]
        width = max(map(len, names), default=0)
        rows = [f"  {n:<{width}}  {_in_a_line(v)}" for n, v in zip(names, self.values())]
        more = [f"  and {len(rows) - 20} more"] if len(rows) > 20 else []
        return "\n".join([f"{count} of {type(self.root).__name__}:", *rows[:20], *more])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Selection) and self.paths == other.paths

    def __hash__(self) -> int:
        return hash(self.paths)

    # --- other selections ------------------------------------------------------------

    def at(self, what: Selector) -> Selection:
        """Selects within these parts: paths begin at each of them.

        Args:
            what: see `Module.at`.

        Raises:
            InvalidArgumentError: nothing within these parts matches.
        """
        parts = [(s, v) for s, v in zip(self.paths, self.values()) if is_node(v)]
        if not parts:
            raise self._no_modules("to select in")
        found: list[Steps] = []
        error = None
        for steps, value in parts:
            try:
                found += [(*steps, *below) for below in find(value, what)]
            except InvalidArgumentError as nothing:
                error = nothing
        if not found and error is not None:
            raise error
        return Selection(self.root, in_order(self.root, found))

    def __or__(self, other: Selector) -> Selection:
        return Selection(self.root, in_order(self.root, self.paths + self._beside(other).paths))

    def __and__(self, other: Selector) -> Selection:
        other = self._beside(other)
        mine, others = set(self.paths), set(other.paths)
        both = [steps for steps in self.paths if at_or_below(steps, others)]
        both += [steps for steps in other.paths if at_or_below(steps, mine)]
        return self._made(in_order(self.root, both), f"both {self!r} and {other!r}")

    def __invert__(self) -> Selection:
        return self._made(rest_of(self.root, self.paths), "all but the whole net")

    def _beside(self, other: Selector) -> Selection:
        """Another selection of the net."""
        if not isinstance(other, Selection):
            return Selection.of(self.root, other)
        if other.root is not self.root:
            find(self.root, other)
        return other

    def _made(self, paths: tuple[Steps, ...], words: str) -> Selection:
        if paths:
            return Selection(self.root, paths)
        raise InvalidArgumentError(
            "The selection matches no part of the net.",
            where=type(self.root).__qualname__,
            got=words,
            write="selections that have something in common; of ~, one of a part of the net",
        )

    # --- replacing values ------------------------------------------------------------

    def set(self, value: PyTree) -> Any:
        """Returns the net with a new value at each part.

        Args:
            value: the new value: an array, a module, static data.  For several
                parts, a list with one value each, as `get` returns it; any other value is used for
                all of them, and an array is then copied, because it can occur only once.

        Raises:
            InvalidArgumentError: a list of another length; one module for several places; one part
                is inside another, so its new value would be lost.
            SharedNodeError: a module or array would be at two places.

        Example:
            >>> import jax.numpy as jnp, pax_export as pax
            >>> net = pax.Sequential(pax.Linear(3, 4), pax.Linear(4, 2))
            >>> net = net.at("modules.1.bias").set(jnp.ones(2))
            >>> net.at(pax.Linear).set(net.at(pax.Linear).get()) == net
            True
        """
        values = self._for_each(value)
        before = zip(values, self.values())
        if outermost_paths(self.paths) != self.paths and not all(new is old for new, old in before):
            raise InvalidArgumentError(
                "One selected part contains another, so one of two values would be lost.",
                got=", ".join(map(path_or_root, self.names()))[:200],
                write="a selection of the outer or of the inner parts, or replace(function), "
                "which takes the inner ones first",
            )
        return self._changed([lambda old, new=new: new for new in values])

    def replace(self, module_or_function: Callable[..., Any]) -> Any:
        """Returns the net with parts replaced by a module or the result of a function.

        Args:
            module_or_function: a module; or a function of the part, or of its path and the part.
                Nested parts are replaced first.

        Raises:
            InvalidArgumentError: one module for several places.
            SharedNodeError: a module or array would be at two places.

        Example:
            >>> import pax_export as pax
            >>> net = pax.Sequential(pax.Linear(3, 4), pax.BatchNorm1D(4))
            >>> net = net.at(pax.BatchNorm1D).replace(lambda old: pax.LayerNorm(4, -1))
            >>> net = net.at("modules.0").replace(pax.Linear(3, 4, with_bias=False))
        """
        new = module_or_function
        if isinstance(new, Node):
            return self.set(new)
        if not wants_path(new):
            return self._changed([on_own_array(new)] * len(self.paths))
        named = [partial(new, name) for name in self.names()]
        return self._changed([on_own_array(change) for change in named])

    def apply(self, function: Callable[[Any], Any]) -> Any:
        """Returns the net with ``function`` applied to the parts.

        Of a module it is applied to the module and all in it, children first, as
        `Module.apply` does; of an array, to the array.

        Args:
            function: takes a module, or an array, and returns another one.
        """
        on_array = on_own_array(function)

        def applied(part: Node | Array) -> Any:
            return apply_bottom_up(part, function) if is_node(part) else on_array(part)

        change = partial(jax.tree_util.tree_map, applied, is_leaf=is_node)
        return edit_at(self.root, dict.fromkeys(outermost_paths(self.paths), change))

    def map(self, function: Callable[[Any], Any]) -> Any:
        """Returns the net with ``function(array)`` for each array in the parts.

        Args:
            function: takes an array and returns one.
        """
        change = on_own_array(function)
        leaves, treedef = jax.tree_util.tree_flatten(self.root)
        chosen = frozenset(self.paths)
        mask = [at_or_below(p.steps, chosen) for p in places_of(self.root) if p.cls is None]
        new = [change(x) if meant else x for x, meant in zip(leaves, mask)]
        return jax.tree_util.tree_unflatten(treedef, new)

    def _for_each(self, value: PyTree) -> list[Any]:
        count = len(self.paths)
        if count == 1:
            return [value]
        if is_sequence(value):
            if len(value) != count:
                raise InvalidArgumentError(
                    "A list of values must have one value for each selected part.",
                    where=", ".join(map(path_or_root, self.names()))[:200],
                    got=f"{len(value)} values for {count} parts",
                    write="as many values as names() has; replace(lambda old: [...]) to put one "
                    "list everywhere",
                )
            return list(value)
        if is_node(value):
            raise InvalidArgumentError(
                "One module cannot be at several paths.",
                where=", ".join(map(path_or_root, self.names()))[:200],
                got=repr(value)[:120],
                write="set([one module for each]), or replace(lambda old: a new module)",
            )
        return [value, *[jnp.copy(value) if is_array(value) else value for _ in range(count - 1)]]

    def _changed(self, changes: list[Change]) -> Any:
        return edit_at(self.root, dict(zip(self.paths, changes)))

    # --- new nets: how the parts behave ------------------------------------------------

    def freeze(self, *, statistics: bool = False) -> Any:
        """Returns the net with the arrays of these parts frozen.

        They are not in ``parameters()``, so gradients and optimizer states omit them.

        Args:
            statistics: whether modules also stay in eval mode, so that running
                statistics are not updated and dropout is not applied.

        Raises:
            InvalidArgumentError: the parts contain no modules and no arrays.

        Example:
            >>> import jax, pax_export as pax
            >>> net = pax.Sequential(pax.Linear(3, 4), pax.Linear(4, 2))
            >>> frozen = net.at("modules.0").freeze()
            >>> len(jax.tree_util.tree_leaves(frozen.parameters()))
            2
            >>> frozen.at("modules.0").unfreeze() == net
            True
        """
        return freeze_at(self.root, self.paths, statistics)

    def unfreeze(self) -> Any:
        """Returns the net with these parts trainable.

        No array changes, even if arrays were replaced since they were frozen. Modules that stayed
        in eval mode take the mode of the module around the parts; if the whole net is selected they
        stay in eval mode.

        Raises:
            InvalidArgumentError: the parts contain no modules and no arrays.
        """
        return unfreeze_at(self.root, self.paths)

    def train(self) -> Any:
        """Returns the net with these modules, and all in them, in train mode.

        Raises:
            InvalidArgumentError: no part is a module.
        """
        return self._in_mode(True)

    def eval(self) -> Any:
        """Returns the net with these modules, and all in them, in eval mode.

        Raises:
            InvalidArgumentError: no part is a module.
        """
        return self._in_mode(False)

    def _in_mode(self, training: bool) -> Any:
        paths = self._of_modules("that have a mode")
        switch: Change = lambda module: set_training(module, training)  # noqa: E731
        return edit_at(self.root, dict.fromkeys(paths, switch), same_kinds=True)

    def cast(self, dtype: DTypeLike) -> Any:
        """Returns the net with the floating-point arrays of these parts in another dtype.

        Args:
            dtype: a floating-point dtype.

        Raises:
            InvalidArgumentTypeError: no floating-point dtype.

        Example:
            >>> import jax.numpy as jnp, pax_export as pax
            >>> net = pax.Sequential(pax.Linear(3, 4), pax.Linear(4, 2))
            >>> net.at("modules.0").cast(jnp.bfloat16)[0].weight.dtype.name
            'bfloat16'
        """
        try:
            # numpy takes None for float64
            is_float = dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)  # type: ignore
        except TypeError:
            is_float = False
        if not is_float:
            raise InvalidArgumentTypeError(
                "cast takes a floating-point dtype.",
                got=repr(dtype),
                write="cast(jnp.bfloat16); for another kind of dtype, map(lambda x: ...)",
            )
        return self.map(lambda x: x.astype(dtype) if is_floating(x) else x)

    def policy(self, mp_policy: jmp.Policy | str | None) -> Any:
        """Returns the net with these modules, and all in them, under a mixed-precision policy.

        Args:
            mp_policy: a `jmp.Policy`, its text (``"p=f32,c=bf16,o=f32"``), or None to take
                policies off.  A module that has a policy already keeps it.

        Raises:
            InvalidArgumentError: no part is a module.
            PolicyError: all modules of a part have a policy already.

        Example:
            >>> import pax_export as pax
            >>> net = pax.Sequential(pax.Linear(3, 4), pax.Linear(4, 2))
            >>> net.at("modules.0").policy("p=f32,c=bf16,o=f32")[0]
            Linear(in_dim=3, out_dim=4, with_bias=True, mp_policy=FHF)
        """
        put_under = verb("under_policy")
        paths = self._of_modules("to put under a policy")
        return edit_at(self.root, dict.fromkeys(paths, lambda module: put_under(module, mp_policy)))

    def lora(
        self,
        rank: int,
        *,
        alpha: float | None = None,
        key: PRNGKey | None = None,
        **options: object,
    ) -> Any:
        """Returns the net with low-rank adapters at the layers in these parts.

        Args:
            rank: the size between the two arrays of an adapter.
            alpha: an adapter is multiplied by ``alpha / rank``; the rank itself by default.
            key: the key of the initial values; the next of the ambient stream by default.
            **options: other arguments of `pax_export.adapters.add`.

        Raises:
            InvalidArgumentError: there are no modules in these parts, or none can be adapted.
        """
        add = verb("add_adapters")
        paths = self._of_modules("to adapt")
        return add(self.root, Selection(self.root, paths), rank, alpha=alpha, key=key, **options)

    def init(
        self, key: PRNGKey | None, initializer: Callable[[Any, Any], Any] | None = None
    ) -> Any:
        """Returns the net with new initial values for the parameters in these parts.

        Each array has its own key, split from ``key`` in tree order. States, such as running means,
        and frozen arrays do not change.

        Args:
            key: a random key; None takes the next of the ambient stream.
            initializer: ``initializer(key, shape)`` makes the values of each array; by default
                those that the layer's class makes.

        Raises:
            InvalidArgumentError: without an initializer: an array of a class without a rule for
                its initial values; an initializer that returns another shape.
            InvalidArgumentTypeError: no key.
        """
        return reinitialize(self.root, self.paths, key, initializer)

    def _of_modules(self, purpose: str) -> tuple[Steps, ...]:
        """The outermost modules among the parts, or in containers that are parts."""
        chosen = frozenset(self.paths)
        inside = [p.steps for p in places_of(self.root) if p.cls is not None]
        found = outermost_paths([steps for steps in inside if at_or_below(steps, chosen)])
        if not found:
            raise self._no_modules(purpose)
        return found

    def _no_modules(self, purpose: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"These parts contain no modules {purpose}.",
            where=", ".join(map(path_or_root, self.names()))[:200],
            write="a selection of modules, by their paths or classes",
        )


def _in_a_line(value: object) -> str:
    text = describe_array(value) if is_array(value) else repr(value)
    return text if len(text) <= 70 else f"{text[:67]}..."
