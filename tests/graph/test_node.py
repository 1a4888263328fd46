"""Nodes: operators, values, identity, what they refuse."""

import copy
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.experimental.graph import GraphModule, InputNode, Node
from pax_export.graph import ArgsNode, CatNode
from tests.core.models import Counter
from tests.refusals import refused


def test_a_node_keeps_what_it_is_given():
    x = Node((), lambda x: x, jnp.array(0))
    assert x.parents == ()
    assert type(x.fx) is pax.Lambda
    assert x.value == 0
    layer = pax.Linear(1, 1)
    y = Node([x], layer, None)
    assert y.parents == (x,)
    assert y.fx is layer
    assert y.shape is None and y.dtype is None


def test_shift_applies_a_function():
    x = Node((), lambda x: x, jnp.array(1.0))
    y = x >> partial(jax.lax.add, 1.0)
    assert y.value == 2.0
    assert y.parents == (x,)
    assert y.fx(jnp.array(5.0)) == 6.0
    assert InputNode(jnp.empty((3, 4))).shape == (3, 4)
    assert InputNode(jnp.empty((1,), jnp.int32)).dtype == jnp.int32


def test_and_and_or_are_flat_however_bracketed():
    x, y, z, w = map(InputNode, range(4))
    for kind, join in ((CatNode, Node.__and__), (ArgsNode, Node.__or__)):
        for joined in (join(join(x, y), z), join(x, join(y, z))):
            assert type(joined) is kind
            assert joined.parents == (x, y, z)
            assert joined.value == (0, 1, 2)
        assert join(join(x, y), join(z, w)).parents == (x, y, z, w)
    assert ((x & y) | z).value == ((0, 1), 2)
    assert (x & (y | z)).value == (0, (1, 2))


def test_a_tuple_and_arguments_reach_the_function_as_they_should():
    x, y = InputNode(1), InputNode(2)
    cat = (x & y) >> (lambda pair: pair)
    assert cat.value == (1, 2)
    assert cat.parents == (x, y)
    joined = x | y
    args = joined >> (lambda a, b: a - b)
    assert args.value == -1
    assert args.parents == (joined,)
    assert args.fx((5, 2)) == 3


def test_binary_ops_takes_one_pair():
    a, b = InputNode(1), InputNode(2)
    y = a.binary_ops(jax.lax.sub, b)
    assert y.value == -1
    assert y.parents == (a, b)
    assert y.fx((a.value, b.value)) == -1


def test_d17_the_trial_call_is_pure_wherever_the_module_stands():
    x = InputNode(jnp.ones((2, 3)))
    for build in (
        lambda fx: x >> fx,
        lambda fx: (x & x) >> fx,
        lambda fx: (x | x) >> _with_two(fx),
        lambda fx: x.binary_ops(_with_two(fx), x),
    ):
        dropout, counter = pax.Dropout(0.5), Counter()
        before = dropout.rng_key
        build(dropout)
        assert dropout.rng_key is before
        build(counter)
        assert counter.count == 0


def _with_two(fx):
    class Two(pax.Module):
        def __init__(self):
            super().__init__()
            self.fx = fx

        def __call__(self, a, b):
            return self.fx(a + b)

    return Two()


def test_an_error_of_a_layer_says_where_in_the_graph():
    x = InputNode(jnp.ones((2, 3)))
    with pytest.raises(TypeError) as caught:
        x >> pax.Linear(4, 4)
    assert caught.value.__notes__[-1] == (
        "  while building a graph: float32[2,3] >> Linear(in_dim=4, out_dim=4, with_bias=True)"
    )
    with pytest.raises(TypeError) as caught:
        (x | x) >> jnp.tanh
    assert caught.value.__notes__[-1] == (
        "  while building a graph: (float32[2,3], float32[2,3]) >> Lambda(tanh)"
    )


def test_nodes_are_compared_by_identity():
    a, b = InputNode(jnp.ones(2)), InputNode(jnp.ones(2))
    assert a == a and a != b
    assert len({a, b, a}) == 2


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_node_cannot_be_copied(duplicate):
    with refused(TypeError, got="InputNode(float32[3,8])"):
        duplicate(InputNode(jnp.ones((3, 8))))


def test_repr():
    x, y = InputNode(jnp.ones((2, 3))), InputNode([jnp.zeros(1, int), None, 3.0])
    assert repr(x) == "InputNode(float32[2,3])"
    assert repr(y) == "InputNode((int32[1], None, float))"
    assert repr(x & y) == "CatNode((float32[2,3], (int32[1], None, float)))"


def test_applied_functions_must_be_callable():
    x = InputNode(1)
    with refused(ValueError, got="int: 3"):
        x >> 3
    with refused(ValueError, got=f"ModuleMeta: {pax.Linear!r}"):
        x >> pax.Linear


@pytest.mark.parametrize(
    ("join", "what"),
    [
        (lambda x: x & 3, "The second operand of &"),
        (lambda x: x | 3, "The second operand of |"),
        (lambda x: x.binary_ops(jnp.add, 3), "The second argument of binary_ops"),
        (lambda x: Node((x, 3), jnp.tanh, None), "A parent of a node"),
    ],
)
def test_only_nodes_are_joined(join, what):
    with refused(ValueError, got="int: 3"):
        join(InputNode(1))


def test_an_example_may_be_any_pytree():
    x = InputNode({"a": jnp.ones(2), "b": None})
    net = GraphModule((x,), x >> (lambda tree: tree["a"]))
    assert net({"a": 5, "b": None}) == 5


@pytest.mark.parametrize(
    ("wrong", "write"),
    [
        (lambda x: pax.Linear(2, 2)(x), "x >> layer"),
        (lambda x: x + 1, "jax.numpy.add"),
        (lambda x: jnp.ones(2) * x, "x >> layer"),
        (lambda x: jnp.concatenate([x, x]), "x >> jax.numpy.tanh"),
        (jnp.tanh, "x >> jax.numpy.tanh"),
        (jax.nn.relu, "x >> jax.numpy.tanh"),
        (jax.jit(lambda x: x), "x >> jax.numpy.tanh"),
    ],
)
def test_a_node_is_not_an_array(wrong, write):
    with refused(pax.errors.InvalidArgumentError, write, got="InputNode(float32[1,2])"):
        wrong(InputNode(jnp.ones((1, 2))))
