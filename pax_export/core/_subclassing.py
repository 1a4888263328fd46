"""What other rooms add to modules: classes derived from others, and verbs.

A derived class is cached by its base and its recipe, a tuple of ``(aspect, value)`` in the order
of registration. So policies and adapters commute, and equal models have equal treedefs. Pickles
store the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from pax_export.core._static import static_key

Recipe = tuple[tuple[str, Any], ...]
Builder = Callable[[type, dict[str, Any], Any], dict[str, Any]]

_aspects: dict[str, Builder] = {}
_verbs: dict[str, Callable[[], Any]] = {}


def register_verbs(**verbs: Callable[[], Any]) -> None:
    """Adds functions of other rooms that modules call; each is looked up when it is first used."""
    _verbs.update(verbs)


def verb(name: str) -> Any:
    """Returns a function that another room registered."""
    return _verbs[name]()


def register_aspect(name: str, build: Builder) -> None:
    """Adds a way to derive classes: ``build(base, namespace, value)`` returns additions."""
    _aspects[name] = build


def base_of(cls: type) -> type:
    """The class as the user wrote it."""
    return vars(cls).get("_pax_base", cls)


def recipe_of(cls: type) -> Recipe:
    """The aspects that a class was derived with; empty for a user's class."""
    return vars(cls).get("_pax_recipe", ())


def aspect_of(cls: type, name: str) -> Any:
    """Returns the value of one aspect of a class, or None."""
    return dict(recipe_of(cls)).get(name)


def builders_of(cls: type) -> tuple[Builder, ...]:
    """The functions that built a class from its recipe, in other rooms too."""
    return tuple([_aspects[name] for name, _ in recipe_of(cls)])


def derive_class(cls: type, name: str, value: Hashable) -> type:
    """The class with one aspect set, or taken off if the value is None."""
    values = {**dict(recipe_of(cls)), name: value}
    recipe = tuple([(n, values[n]) for n in _aspects if values.get(n) is not None])
    return from_recipe(base_of(cls), recipe)


def from_recipe(base: type, recipe: Recipe, builders: tuple[Builder, ...] = ()) -> type:
    """The class derived by a recipe; `builders` are for pickles, which import their packages."""
    if not recipe:
        return base
    if "_pax_derived" not in vars(base):
        base._pax_derived = {}  # type: ignore[attr-defined]
    known: dict[Hashable, type] = vars(base)["_pax_derived"]
    key = static_key(recipe)
    if key not in known:
        known[key] = _make_class(base, recipe)
    return known[key]


def _make_class(base: type, recipe: Recipe) -> type:
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_pax_base": base,
        "_pax_recipe": recipe,
    }
    for name, value in recipe:
        namespace.update(_aspects[name](base, namespace, value))
    return type(base)(base.__name__, (base,), namespace)
