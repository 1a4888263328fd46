"""GraphModule: calls, summaries, and drawings in DOT."""

import copy
import pickle
import re
import shutil
import subprocess
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.core import named_leaves
from pax_export.errors import ForeignInputError
from pax_export.experimental.graph import GraphModule, InputNode, Node, build_graph_module
from tests.closeness import assert_close
from tests.refusals import refused

X = jnp.linspace(-1.0, 1.0, 24).reshape(3, 8)


def residual(x):
    y = x >> pax.Linear(x.shape[-1], x.shape[-1]) >> jax.nn.relu
    return (x | y) >> jax.lax.add


def build(recipe=residual, *inputs):
    return build_graph_module(recipe)(*(inputs or (X,)))


def test_the_residual_computes_and_prints():
    net = build()
    assert net.summary().splitlines() == [
        "GraphModule",
        "├── modules.0: Linear(in_dim=8, out_dim=8, with_bias=True)",
        "├── modules.1: x => relu(x)",
        "└── modules.3: add(x, modules.1)",
    ]
    linear = net.modules[0]
    np.testing.assert_array_equal(net(X), X + jax.nn.relu(linear(X)))
    assert net(jnp.ones((5, 8))).shape == (5, 8)


def test_a_tuple_needs_no_identity():
    def recipe(a, b):
        h = a >> pax.Linear(8, 8)
        return (h & b & a) >> partial(jnp.concatenate, axis=-1)

    net = build(recipe, X, X)
    assert net.summary().splitlines() == [
        "GraphModule",
        "├── modules.0: Linear(in_dim=8, out_dim=8, with_bias=True) <- a",
        "└── modules.1: functools.partial(concatenate, axis=-1)((modules.0, b, a))",
    ]
    np.testing.assert_array_equal(net(X, 2 * X)[:, 8:16], 2 * X)


def test_each_node_runs_once_parents_first_left_to_right():
    calls = []

    def named(name):
        def function(*args):
            calls.append(name)
            return args[0]

        return function

    x = InputNode(1)
    a = x >> named("a")
    b, c = a >> named("b"), a >> named("c")
    net = GraphModule([x], (b | c) >> named("d"))
    calls.clear()
    assert net(7) == 7
    assert calls == ["a", "b", "c", "d"]


def test_a_deep_graph_needs_no_recursion():
    x = InputNode(np.float32(0))
    y = x
    for _ in range(3000):
        y = Node((y,), _plus_one, None)
    assert GraphModule((x,), y)(0) == 3000


def _plus_one(x):
    return x + 1


@pytest.mark.parametrize(
    ("output", "value"),
    [
        (lambda x, y: x, 1),
        (lambda x, y: y, 2),
        (lambda x, y: x & y, (1, 2)),
        (lambda x, y: y | x, (2, 1)),
        (lambda x, y: (x & y) | (x >> _plus_one), ((1, 2), 2)),
        (lambda x, y: ((x & y) | y) >> (lambda pair, b: pair[0] + b), 3),
    ],
)
def test_the_output_may_be_an_input_a_tuple_or_arguments(output, value):
    x, y = InputNode(10), InputNode(20)
    assert GraphModule((x, y), output(x, y))(1, 2) == value


def test_an_inner_node_may_be_an_input():
    x = InputNode(1)
    y = x >> _plus_one
    assert GraphModule((y,), y >> _plus_one)(10) == 11


# --- modules are in the tree ---------------------------------------------------


def everywhere(a, b):
    a = a >> pax.Linear(8, 8)
    c = (a | b) >> TwoInputs()  # D18
    d = c.binary_ops(TwoInputs(), b)  # D19, D20
    e = (c & d) >> Both()
    return e >> partial(pax.Linear(8, 4)) >> Coder().encode


class TwoInputs(pax.Module):
    def __init__(self):
        super().__init__()
        self.left, self.norm = pax.Linear(8, 8), pax.BatchNorm1D(8)

    def __call__(self, a, b):
        return self.norm((self.left(a) + b)[None])[0]


class Both(pax.Module):
    def __init__(self):
        super().__init__()
        self.right = pax.Linear(8, 8)

    def __call__(self, pair):
        return pair[0] + self.right(pair[1])


class Coder(pax.ParameterModule):
    def __init__(self):
        super().__init__()
        self.table = jnp.ones((4, 2))

    def encode(self, x):
        return x @ self.table


def test_d18_d19_d20_modules_are_found_wherever_they_stand():
    net = build(everywhere, X, X)
    weights = [name for name, _ in named_leaves(net.parameters())]
    found = [name[8:] for name in weights if name.split(".")[-1] in ("weight", "table")]
    assert (
        found
        == (
            "0.weight 2.left.weight 3.left.weight 4.right.weight 5.func.weight 6.module.table"
        ).split()
    )
    assert len(jax.tree.leaves(net.state_dict())) == len(jax.tree.leaves(net))
    assert net.summary().count("BatchNorm1D") == 2
    modules = [module for module in _all_modules(net.eval()) if module.training]
    assert modules == []
    assert net.eval().train() == net


def _all_modules(module):
    return [module] + [found for sub in module.submodules() for found in _all_modules(sub)]


def test_d18_d19_state_of_modules_after_or_and_in_binary_ops_changes():
    net = build(everywhere, X, X)
    after, _ = net % (X, X)
    for index in (2, 3):
        assert net.modules[index].norm.ema_mean.debias == 0
        assert after.modules[index].norm.ema_mean.debias == 1


def test_modules_in_partials_and_methods_print():
    net = build(everywhere, X, X)
    assert net.summary().splitlines()[-4:] == [
        "├── modules.5: x => functools.partial(Linear)(x)",
        "│   └── func: Linear(in_dim=8, out_dim=4, with_bias=True)",
        "└── modules.6: x => Coder.encode(x)",
        "    └── module: Coder",
    ]
    x = InputNode(X)
    assert type((x >> pax.Linear(8, 8).__call__).fx) is pax.Linear
    scaled = x >> partial(jnp.multiply, jnp.full(8, 2.0))
    assert scaled.fx.summary() == "x => functools.partial(multiply, float32[8])(x)"
    assert [name for name, _ in named_leaves(scaled.fx)] == ["args.0"]
    np.testing.assert_array_equal(scaled.value, 2 * X)
    assert type((x >> partial(jnp.sum, axis=0)).fx) is pax.Lambda
    clipped = x >> partial(jnp.clip, min=jnp.zeros(8), max=0.5)
    assert clipped.fx.summary() == "x => functools.partial(clip, min=float32[8], max=0.5)(x)"
    np.testing.assert_array_equal(clipped.value, jnp.clip(X, 0.0, 0.5))


def test_a_method_found_under_another_name_still_is_in_the_tree():
    class Renamed(Coder):
        other = Coder.encode
        encode = None

    node = InputNode(X[:, :4]) >> Renamed().other
    assert type(node.fx).__name__ == "Partial"
    assert len(jax.tree.leaves(node.fx)) == 1
    assert type((InputNode(X[:, :4]) >> Coder().encode).fx).__name__ == "Method"


def test_every_module_learns():
    net = build(everywhere, X, X)

    def loss(net):
        _, y = net % (X, X)
        return jnp.sum(y**2)

    grads = pax.grad(loss)(net)
    # The bias in front of a batch norm has no effect; every matrix has one.
    matrices = [g for name, g in named_leaves(grads) if name.endswith(("weight", "table"))]
    assert len(matrices) == 6
    assert all(float(jnp.abs(g).max()) > 0 for g in matrices)


def test_a_module_in_two_nodes_is_refused():
    x = InputNode(X)
    layer = pax.Linear(8, 8)
    for output in (x >> layer >> layer, (x | (x >> layer)) >> _Call(layer)):
        with refused(ValueError, got="Linear(in_dim=8, out_dim=8, with_bias=True)"):
            GraphModule((x,), output)


class _Call(pax.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def __call__(self, a, b):
        return a + self.layer(b)


# --- a module like any other ---------------------------------------------------


def mixed(a, b):
    c = a.binary_ops(lambda x, y: x + y, b) >> pax.Dropout(0.5)
    d = (a | c) >> partial(jnp.add)
    return (d & b) >> partial(jnp.concatenate, axis=-1) >> pax.Sequential(pax.Linear(16, 2))


@pytest.mark.parametrize(
    ("recipe", "inputs"), [(residual, (X,)), (everywhere, (X, X)), (mixed, (X, X))]
)
def test_d22_one_recipe_gives_one_treedef(recipe, inputs):
    first, second = build(recipe, *inputs), build(recipe, *inputs)
    assert jax.tree.structure(first) == jax.tree.structure(second)
    traced = []

    @jax.jit
    def run(net, inputs):
        traced.append(1)
        return net % inputs

    run(first, inputs)
    run(second, inputs)
    run(build(recipe, *inputs).train(), inputs)
    assert len(traced) == 1


def test_example_shapes_are_part_of_the_recipe():
    other = build(residual, X[:1])
    assert jax.tree.structure(build()) != jax.tree.structure(other)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))]
)
def test_d21_pickle_and_copies(duplicate):
    net = build(everywhere, X, X).eval()
    again = duplicate(net)
    assert jax.tree.structure(again) == jax.tree.structure(net)
    assert again.to_dot() == net.to_dot()
    np.testing.assert_array_equal(again(X, X), net(X, X))


def test_nothing_of_a_node_is_kept():
    def nodes(value):
        if isinstance(value, Node):
            return [value]
        if isinstance(value, pax.Module):
            return [n for x in vars(value).values() for n in nodes(x)]
        if isinstance(value, (list, tuple)):
            return [n for x in value for n in nodes(x)]
        return []

    assert nodes(build(everywhere, X, X)) == []


def test_jit_grad_vmap_and_scan():
    net = build(residual)
    expected = net(X)
    assert_close(jax.jit(lambda net, x: net(x))(net, X), expected, rtol=1e-6)
    one_by_one = jax.vmap(lambda net, x: net(x[None])[0], (None, 0))(net, X)
    assert_close(one_by_one, expected, rtol=1e-5)
    _, rows = pax.scan(lambda net, x: (net, net(x[None])[0]), net, X)
    assert_close(rows, expected, rtol=1e-5)


def test_export(tmp_path):
    from pax_export.export import load, spec, to_saved_model

    net = build(mixed, X, X).eval()
    to_saved_model(net, tmp_path / "net", (spec("batch, 8"), spec("batch, 8")))
    served = load(tmp_path / "net")
    assert_close(served(X[:2], X[1:]), net(X[:2], X[1:]), rtol=1e-5)


def test_name():
    x = InputNode(X)
    net = GraphModule((x,), x >> jnp.tanh, name="net")
    assert repr(net) == "(net) GraphModule(parameters=0, mode=train)"


# --- what is refused -----------------------------------------------------------


def test_d23_foreign_inputs():
    x, y = InputNode(X, name="x"), InputNode(X, name="mask")
    with refused(
        ForeignInputError, where="InputNode(float32[3,8]) named 'mask'", got="1 inputs: x"
    ):
        GraphModule((x,), (x | y) >> jnp.multiply)
    with refused(ValueError, where="InputNode(int)", got="0 inputs"):
        build_graph_module(lambda: InputNode(1))()
    with refused(ForeignInputError, where="Node(int)", got="1 inputs: x"):
        GraphModule((x,), Node((), jnp.tanh, 1) >> jnp.tanh)


def test_d24_surplus_and_missing_arguments():
    net = build(lambda x, mask: (x | mask) >> jnp.multiply, X, X)
    for arguments in ((X,), (X, X, X)):
        with refused(
            TypeError,
            where="GraphModule(parameters=0, mode=train)",
            got=f"{len(arguments)} arguments for 2 inputs: x, mask",
        ):
            net(*arguments)


def test_unused_inputs_are_arguments():
    x, unused = InputNode(1), InputNode(2)
    net = GraphModule((x, unused), x >> _plus_one)
    assert net(1, 5) == 2
    with refused(TypeError, where="GraphModule(parameters=0, mode=train)"):
        net(1)


def test_a_node_is_one_input():
    x = InputNode(1)
    with refused(ValueError, got="(InputNode(int), InputNode(int))"):
        GraphModule((x, x), x >> _plus_one)


def test_build_needs_a_function_that_returns_a_node():
    with refused(AssertionError, where="_returns_a_tuple", got=f"tuple: {(InputNode(X),)!r}"):
        build_graph_module(_returns_a_tuple)(X)


def _returns_a_tuple(x):
    return (x,)


def test_build_takes_names_from_the_function_where_it_has_them():
    def names(func, *inputs):
        return [entry.name for entry in build_graph_module(func)(*inputs)._program.inputs]

    assert names(lambda x, *rest: x, 1, 2, 3) == ["x", "input 1", "input 2"]
    assert names(lambda *xs: xs[0], 1) == ["input 0"]
    assert names(partial(lambda a, b: a & b, InputNode(1)).func, 1, 2) == ["a", "b"]


# --- dot -----------------------------------------------------------------------------


def residual_of_dot(x):
    y = x >> pax.Linear(8, 8) >> jax.nn.relu
    return (x | y) >> jax.lax.add


def dot_of(recipe, *inputs):
    return build_graph_module(recipe)(*inputs).to_dot()


def test_names_at_nodes_and_shapes_on_edges():
    assert dot_of(residual_of_dot, jnp.zeros((3, 8))).splitlines() == [
        'digraph "GraphModule" {',
        "  node [shape=box, style=rounded];",
        '  0 [label="x", shape=ellipse];',
        '  1 [label="Linear(in_dim=8, out_dim=8, with_bias=True)"];',
        '  2 [label="x => relu(x)"];',
        '  4 [label="x => add(x)"];',
        '  output [label="output", shape=ellipse];',
        '  0 -> 1 [label="float32[3,8]"];',
        '  1 -> 2 [label="float32[3,8]"];',
        '  0 -> 4 [label="0: float32[3,8]"];',
        '  2 -> 4 [label="1: float32[3,8]"];',
        '  4 -> output [label="float32[3,8]"];',
        "}",
    ]


def test_several_outputs_and_nested_tuples_are_edges():
    x, y = InputNode(jnp.zeros(2)), InputNode(jnp.zeros(3, int))
    net = GraphModule((x, y), (x & y) | (x >> jnp.tanh))
    assert [line.strip() for line in net.to_dot().splitlines() if "->" in line] == [
        '0 -> 3 [label="float32[2]"];',
        '0 -> output [label="0: float32[2]"];',
        '1 -> output [label="1: int32[3]"];',
        '3 -> output [label="2: float32[2]"];',
    ]


def test_the_drawing_is_that_of_the_modules_now():
    net = build_graph_module(residual_of_dot)(jnp.zeros((3, 8)))
    net = net.replace(modules=[*net.modules[:3], pax.Lambda(jnp.add, name="sum")])
    assert '4 [label="x => sum(x)"];' in net.to_dot()
    assert net.eval().to_dot() == net.to_dot()
    net = net.replace(modules=[*net.modules[:3], jnp.multiply])
    assert '4 [label="x => multiply(x)"];' in net.to_dot()


def awkward(x):
    return x >> pax.Lambda(jnp.tanh, name='a "quoted" \\ name\nof two lines')


def test_text_is_escaped():
    label = r'label="x => a \"quoted\" \\ name\nof two lines(x)"'
    assert label in dot_of(awkward, 1.0)


def test_every_edge_leads_from_a_node_to_a_node():
    dot = dot_of(residual_of_dot, jnp.zeros((3, 8)))
    nodes = set(re.findall(r"^  (\w+) \[label", dot, re.M))
    edges = re.findall(r"^  (\w+) -> (\w+) ", dot, re.M)
    assert {end for edge in edges for end in edge} == nodes


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
@pytest.mark.parametrize("recipe", [residual_of_dot, awkward])
def test_graphviz_reads_it(recipe):
    dot = dot_of(recipe, jnp.zeros((3, 8)))
    subprocess.run(["dot", "-Tsvg"], input=dot, text=True, check=True, capture_output=True)
