"""Classes of modules: construction, dataclasses, protocols, pickling, threads."""

import abc
import copy
import functools
import pickle
import typing
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jax.tree_util import tree_structure

import pax_export as pax
from tests.core.models import Dense, Net
from tests.processes import printed
from tests.refusals import refused


def test_super_init_is_not_needed():
    class Bare(pax.Module):
        def __init__(self):
            self.x = jnp.ones(1)

    assert (Bare().name, Bare().training) == (None, True)
    assert pax.Module(name="m", training=False).training is False
    with pytest.raises(TypeError):
        pax.Module("m")


@dataclass
class Point(pax.ParameterModule):
    x: jax.Array
    title: str
    label: str = "p"


def test_dataclasses_are_modules():
    point = Point(jnp.ones(2), "north")
    assert (point.title, point.label) == ("north", "p")
    assert point.eval().title == "north"
    assert point == point.copy() and point != Point(jnp.ones(2), "north")
    assert isinstance(hash(point), int)
    assert repr(point).startswith("Point(x=")


@pytest.mark.parametrize("name", ["name", "training", "at", "map", "eval"])
def test_fields_with_names_of_modules_are_refused_when_the_class_is_made(name):
    with refused(
        pax.errors.InvalidArgumentError,
        where=f"Taken.{name}",
        write=f"another name, such as {name}_",
    ):
        type(pax.Module)("Taken", (pax.Module,), {"__annotations__": {name: "int"}})


@pytest.mark.parametrize("name", ["training", "at"])
def test_reserved_names_are_not_redefined(name):
    with refused(pax.errors.InvalidArgumentError, f"{name}_"):
        type(pax.Module)("Taken", (pax.Module,), {name: lambda self, x: x})


def test_two_dataclasses_of_one_class_under_one_parent():
    net = Pair(Point(jnp.ones(2), "a"), Point(jnp.ones(2), "b"))
    assert net.eval().a.training is False
    assert net.apply(lambda m: m).b.title == "b"


@dataclass
class Pair(pax.Module):
    a: Point
    b: Point


@pytest.mark.parametrize("options", [{"frozen": True}, {"unsafe_hash": True}, {"eq": False}])
def test_dataclasses_of_all_kinds_are_modules(options):
    @dataclass(**options)
    class Scale(pax.ParameterModule):
        factor: jax.Array

        def __call__(self, x):
            return x * self.factor

        def double(self):
            self.factor = 2 * self.factor
            return self

    scale = Scale(jnp.float32(2.0))
    assert float(jax.jit(scale)(3.0)) == 6
    assert scale == scale.copy() and hash(scale) == hash(scale.copy())
    assert float(pax.pure(scale.double)().factor) == 4
    with pytest.raises(pax.errors.ImmutableModuleError):
        scale.factor = 1


def test_a_user_may_write_eq():
    @dataclass
    class Odd(pax.Module):
        x: int

        def __eq__(self, other):
            return True

        __hash__ = None

    assert Odd(1) == 3


def test_modules_may_be_abstract_generic_or_follow_a_protocol():
    class Shape(pax.Module, abc.ABC):
        @abc.abstractmethod
        def area(self): ...

    class Callable(typing.Protocol):
        def __call__(self, x): ...

    T = typing.TypeVar("T")

    class Square(Shape, Callable, typing.Generic[T]):
        def __init__(self, side):
            self.side = side

        def area(self):
            return self.side**2

        def __call__(self, x):
            return x

    assert Square[int](3).area() == 9
    assert isinstance(Square(1), Shape) and not isinstance(3, Shape)
    with pytest.raises(TypeError):
        Shape()


def test_constructors_evaluate_no_property():
    class Lazy(pax.Module):
        def __init__(self):
            self.x = jnp.ones(2)

        @property
        def fails(self):
            raise RuntimeError

        @functools.cached_property
        def double(self):
            return self.x * 2

    module = Lazy().eval().replace(_name="x")
    assert module.double.shape == (2,)
    assert module.pytree_attributes == ("x",)
    assert "double" not in vars(module.copy())
    with pytest.raises(RuntimeError):
        _ = module.fails


def test_a_cached_property_used_in_the_constructor_is_not_stored():
    class Eager(pax.Module):
        def __init__(self):
            self.x = jnp.ones(2)
            self.y = self.double + 1

        @functools.cached_property
        def double(self):
            return self.x * 2

    assert Eager().pytree_attributes == ("x", "y")


def test_flattening_inside_the_constructor():
    class Early(pax.Module):
        def __init__(self):
            self.a = Dense()
            self.size = sum(x.size for x in jax.tree_util.tree_leaves(self))
            self.b = Dense()

    assert Early().size == 9 and Early().pytree_attributes == ("a", "b")


def test_frozen_modules_are_unpickled_in_another_process(tmp_path):
    frozen = pax.freeze_parameters(Net())
    (tmp_path / "net.pickle").write_bytes(pickle.dumps(frozen))
    program = (
        "import pickle, sys; net = pickle.load(open(sys.argv[1], 'rb')); "
        "print(type(net).__name__, type(net.parameters().layers[0].weight).__name__)"
    )
    assert printed(program, tmp_path / "net.pickle").split() == ["Net", "EmptyNode"]


@pytest.mark.parametrize(
    "function",
    [
        jax.nn.relu,
        jnp.tanh,
        jax.nn.gelu,
        jax.lax.add,
        functools.partial(jax.nn.gelu, approximate=False),
    ],
)
def test_functions_of_jax_are_pickled_by_name(function):
    module = pax.Module().set_attribute("items", [Dense(1, 1), function])
    module = module.set_attribute("function", function)
    again = pickle.loads(pickle.dumps(module))
    assert tree_structure(again) == tree_structure(module)
    assert tree_structure(copy.deepcopy(module)) == tree_structure(module)


def test_a_lambda_cannot_be_pickled_and_pickle_says_so():
    with refused((pickle.PicklingError, AttributeError), "lambda"):
        pickle.dumps(pax.Module().set_attribute("function", lambda x: x))


def test_repr_and_str():
    assert repr(pax.Module(name="m")) == "(m) Module(parameters=0, mode=train)"
    assert pax.Module()._repr({}) == "Module()"
    assert pax.Module()._repr({"a": 1, "b": None}) == "Module(a=1)"


def test_summary():
    assert Net().summary().splitlines() == [
        "Net",
        "├── layers.0: Dense(din=2, dout=2)",
        "├── layers.1: Dense(din=2, dout=2)",
        "├── parts.a: Dense(din=3, dout=3)",
        "├── parts.b: Counter",
        "└── mixed.0: Dense(din=1, dout=1)",
    ]
    outer = pax.Module().set_attribute("a", Net()).set_attribute("b", Dense())
    assert outer.summary(return_list=True)[:3] == [
        "Module",
        "├── a: Net",
        "│   ├── layers.0: Dense(din=2, dout=2)",
    ]
    assert outer.summary(return_list=True)[-2:] == [
        "│   └── mixed.0: Dense(din=1, dout=1)",
        "└── b: Dense(din=2, dout=3)",
    ]


def test_a_repr_that_returns_nothing_is_named():
    class Silent(pax.Module):
        def __repr__(self):
            return None

    with refused(ValueError, "__repr__"):
        Silent().summary()


def test_random_keys():
    pax.seed_rng_key(42)
    keys = [int(pax.next_rng_key()[1]) for _ in range(4)]
    assert keys == [686579304, 119540832, 26855093, 796233791]
    pax.seed_rng_key(-3)
    import numpy as np

    pax.seed_rng_key(np.int64(42))
    assert int(pax.next_rng_key()[1]) == 686579304
    for wrong in (1.5, "42", None, True):
        with refused(AssertionError, "integer"):
            pax.seed_rng_key(wrong)


def test_threads_draw_different_keys():
    import threading

    keys = []

    def draw():
        keys.append(int(pax.next_rng_key()[1]))

    for _ in range(3):
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
    pax.seed_rng_key(42)
    draw()
    assert len(set(keys)) == 4


def test_a_key_drawn_while_tracing_is_a_constant():
    pax.seed_rng_key(42)
    draw = jax.jit(lambda: pax.next_rng_key())
    first, second = draw(), draw()
    assert (first == second).all()
    assert int(pax.next_rng_key()[1]) == 119540832
