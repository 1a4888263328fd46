"""Flatten and unflatten in C do what those in Python do."""

import abc
import copy
import gc
import pickle
import re
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.core import _mutation_detection, _native, _traversal, _tree, mutable
from pax_export.core._moduledef import ModuleDef
from pax_export.errors import ChangedOutsideWarning, ImmutableModuleError
from tests.core.models import Dense, Net
from tests.processes import ROOT, python

needs_compiled = pytest.mark.skipif(
    not _native.compiled,
    reason="flatten and unflatten run in Python here: no compiler when pax_export was "
    "installed, or PAX_EXPORT_PURE_PYTHON is set",
)


class InPython:
    flatten = staticmethod(_tree.flatten_in_python)
    unflatten = staticmethod(_tree.unflatten_in_python)


class InC:
    flatten = staticmethod(_tree.flatten)
    unflatten = staticmethod(_tree.unflatten)


@pytest.fixture(params=[InPython, pytest.param(InC, marks=needs_compiled)])
def way(request):
    return request.param


def again(way, module):
    children, moduledef = way.flatten(module)
    return way.unflatten(moduledef, children)


def test_the_pair_is_kept_and_nothing_else(way):
    module = Dense()
    children, moduledef = way.flatten(module)
    new = way.unflatten(moduledef, children)
    assert type(new) is Dense and _tree.attributes_now(new) == {}
    pair = way.flatten(new)
    assert pair[0] is children and pair[1] is moduledef and way.flatten(new) is pair
    assert new == module and list(vars(new)) == list(vars(module))


@pytest.mark.parametrize("make", [Dense, Net, pax.Module, lambda: pax.Linear(2, 3)])
def test_round_trips(way, make):
    module = make()
    new = again(way, module)
    assert new is not module and new == module
    for other in (pickle.loads(pickle.dumps(new)), copy.deepcopy(again(way, module))):
        assert jax.tree.structure(other) == jax.tree.structure(module)
    assert weakref.ref(new)() is new
    with pytest.raises(ImmutableModuleError):
        new.anything = 1


def test_a_module_with_containers_is_filled_at_once(way):
    module = Net()
    new = again(way, module)
    assert _tree.attributes_now(new)["options"] == module.options
    assert new.options is not module.options
    module.layers.append(Dense())
    with pytest.warns(ChangedOutsideWarning):
        assert way.flatten(module)[0] != way.flatten(new)[0]


def test_tracers(way):
    moduledef = way.flatten(Dense())[1]
    call = jax.jit(lambda children, x: way.unflatten(moduledef, children)(x))
    assert call((jnp.ones((2, 3)), jnp.ones(3)), jnp.ones((1, 2))).tolist() == [[3, 3, 3]]


def test_folded_modules_and_changed_ones(way):
    module = Dense()
    leaves, treedef = jax.tree.flatten(module)
    folded = _tree.from_folded(((leaves,), treedef))
    assert way.flatten(folded)[0][0] is module.weight
    with mutable(module) as changed:
        changed.bias = jnp.ones(3)
        assert way.flatten(changed)[0][1] is changed.bias


def test_cycles_are_collected(way):
    children, moduledef = way.flatten(Dense())
    box = []
    new = way.unflatten(moduledef, (box, *children[1:]))
    box.append(new)
    alive = weakref.ref(new)
    del new, box
    gc.collect()
    assert alive() is None


class Abstract(abc.ABC):
    @abc.abstractmethod
    def method(self): ...


def failures(way):
    """Calls that go wrong in every way."""
    empty = ModuleDef.__new__(ModuleDef)
    no_class = ModuleDef.__new__(ModuleDef)
    no_class.lazy = True
    odd = ModuleDef.__new__(ModuleDef)
    odd.lazy, odd.cls = True, 3
    abstract = ModuleDef.__new__(ModuleDef)
    abstract.lazy, abstract.cls = True, Abstract
    foreign = ModuleDef.__new__(ModuleDef)
    foreign.lazy, foreign.cls = True, dict
    yield from ([way.unflatten, x, ()] for x in (3, empty, no_class, odd, abstract, foreign))
    yield from ([way.flatten, x] for x in (3, None, jnp.ones(1)))


def said(function, *arguments):
    with pytest.raises(Exception) as error:
        function(*arguments)
    return type(error.value), str(error.value)


@needs_compiled
def test_errors_are_those_of_python():
    for in_c, in_python in zip(failures(InC), failures(InPython), strict=True):
        assert said(*in_c) == said(*in_python)
    assert said(InC.unflatten, 1) == (TypeError, "unflatten takes 2 arguments, got 1")
    assert said(InC.unflatten, 1, 2, 3)[0] is said(InPython.unflatten, 1, 2, 3)[0] is TypeError
    assert said(InC.flatten)[0] is TypeError


@needs_compiled
@pytest.mark.parametrize("arguments", [(), (1, len), (_tree.Node, len)])
def test_only_slots_are_taken_for_slots(arguments):
    make = sys.modules["pax_export.core._round_trip"]
    assert said(make.make_flatten, *arguments)[0] is TypeError
    assert said(make.make_unflatten, *arguments, *arguments)[0] is TypeError


def test_nothing_is_leaked(way):
    children, moduledef = way.flatten(Dense())
    watched = [Dense, moduledef, children, moduledef.lazy, None, (), *children]

    def rounds():
        for _ in range(1000):
            way.flatten(way.unflatten(moduledef, children))
            for function, *arguments in failures(way):
                try:
                    function(*arguments)
                except (TypeError, AttributeError):
                    pass

    rounds()
    gc.collect()
    before, objects = [sys.getrefcount(x) for x in watched], len(gc.get_objects())
    rounds()
    gc.collect()
    assert len(gc.get_objects()) - objects < 500
    # Objects that are shared by all Python, as True and None, are counted elsewhere too.
    assert all(sys.getrefcount(x) - old < 500 for x, old in zip(watched, before))


def test_threads(way):
    children, moduledef = way.flatten(Dense())
    bad = []

    def work():
        for _ in range(2000):
            new = way.unflatten(moduledef, children)
            if way.flatten(new)[0] is not children or new.din != 2:
                bad.append(new)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bad == []


@needs_compiled
def test_the_environment_turns_it_off():
    """And then all that holds of modules as pytrees holds of the functions of Python."""
    code = (
        "import sys, pytest; from pax_export.core import _native, _tree; "
        "assert not _native.compiled and _tree.unflatten is _tree.unflatten_in_python; "
        "sys.exit(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', 'tests/core/test_tree.py']))"
    )
    python("-c", code, env={"PAX_EXPORT_PURE_PYTHON": "1"})


# --- detection of changed containers: see _mutation_detection.py ------------------------------


class Both:
    """The two functions of each kind, in C and in Python; all answers must be equal."""

    def seen_in(self, values):
        found = [_mutation_detection.seen_in(values), _mutation_detection.seen_in_python(values)]
        assert len(found[0]) == len(found[1]) and all(map(same_thing, *found))
        return found[0]

    def is_unchanged(self, seen):
        answer = _mutation_detection.is_unchanged(seen)
        assert answer is _mutation_detection.is_unchanged_in_python(seen)
        return answer


def same_thing(a, b):
    return a is b or (type(a) is type(b) is tuple and all(map(same_thing, a, b)))


class Own(dict):
    pass


@needs_compiled
def test_containers_are_seen_and_changes_noticed():
    both, inner = Both(), [1]
    ordered, default = OrderedDict(a=1, b=inner), defaultdict(list, k=[2])
    values = (Dense(), jnp.ones(2), [inner, (default,)], {"x": ordered}, Own(y=[3]), None, [])
    seen = both.seen_in(values)
    kinds = [type(each) for each in seen[::2]]
    assert kinds == [list, list, defaultdict, list, dict, OrderedDict, list, list]
    assert both.is_unchanged(seen)
    for change, back in (
        (lambda: inner.append(2), inner.pop),
        (lambda: default.update(m=1), lambda: default.pop("m")),
        (lambda: ordered.move_to_end("a"), lambda: ordered.move_to_end("b")),
        (lambda: ordered.update(a=1.0), lambda: ordered.update(a=1)),
        (lambda: values[2].__setitem__(0, [1]), lambda: values[2].__setitem__(0, inner)),
        (lambda: values[3].update(z=1), lambda: values[3].pop("z")),
        (lambda: values[-1].append(None), values[-1].clear),
    ):
        change()
        assert not both.is_unchanged(seen)
        back()
        assert both.is_unchanged(seen)
    assert both.seen_in(()) == both.seen_in((1, "a", (2, (3,)))) == ()


@needs_compiled
def test_a_list_in_itself_ends_the_look():
    inside = []
    inside.append(inside)
    for look in (_mutation_detection.seen_in, _mutation_detection.seen_in_python):
        with pytest.raises(RecursionError):
            look([inside])


@needs_compiled
def test_looking_leaks_nothing():
    values = ([1, {"a": (2, [3])}], OrderedDict(b=[4]))

    def rounds():
        for _ in range(1000):
            assert _mutation_detection.is_unchanged(_mutation_detection.seen_in(values))

    rounds()
    gc.collect()
    before, objects = [sys.getrefcount(x) for x in values], len(gc.get_objects())
    rounds()
    gc.collect()
    assert [sys.getrefcount(x) for x in values] == before
    assert len(gc.get_objects()) - objects < 500


# --- which values are modules -----------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [_traversal.collect_in_python, pytest.param(_traversal._collect, marks=needs_compiled)],
)
def test_modules_are_listed_and_those_met_before_stop_the_walk(make):
    net, modules, met = Net(), [], {0}
    net_again, empty = make(_tree.Node, modules, met), make(_tree.Node, [], None)
    assert [net_again(value) for value in (net, jnp.ones(1), None, [net], net)] == [
        False, False, False, False, True,
    ]  # fmt: skip
    assert modules == [net, net] and met == {0, id(net)}
    assert [empty(net), empty(net)] == [False, False]


@needs_compiled
def test_wrong_arguments_of_the_compiled_one_are_refused():
    make = _traversal._collect
    for wrong in [(3, [], None), (_tree.Node, (), None), (_tree.Node, [], 3), ()]:
        with pytest.raises(TypeError):
            make(*wrong)


@needs_compiled
def test_answers_are_counted():
    """Before Python 3.12 one that gives away False uncounted ends the process, some time later."""
    stop = _traversal._collect(_tree.Node, [], None)
    before = sys.getrefcount(False)
    for _ in range(1000):
        stop(3)
    assert abs(sys.getrefcount(False) - before) < 100


def test_extension_of_a_later_python_serves_an_earlier_one():
    text = (ROOT / "pax_export/core/_round_trip.c").read_text()
    assert not re.search(r"^\s*Py_RETURN_", text, re.M), "return PyBool_FromLong(...) instead"
