"""`net.at(...)`: what is selected, and every verb on it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import tree_leaves, tree_structure

import pax_export as pax
from pax_export import transforms as T
from pax_export.core import named_leaves, named_modules
from pax_export.errors import InvalidArgumentError, InvalidArgumentTypeError, SharedNodeError
from tests.closeness import assert_close
from tests.refusals import fields, refused


class Pair(NamedTuple):
    left: object
    right: object


def squashed(x):
    return jax.nn.sigmoid(x)


class Mixer(pax.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = pax.BatchNorm1D(dim)
        self.token = pax.Linear(dim, dim)
        self.gate = Pair(pax.Linear(dim, dim), squashed)
        self.rate = 0.5

    def __call__(self, x):
        return x + self.gate.right(self.gate.left(x)) * self.token(self.norm(x[None])[0])


class Tower(pax.Module):
    parameters = pax.parameters_method("scale", "shifts")

    def __init__(self, dim=4, depth=3):
        super().__init__()
        self.blocks = [Mixer(dim) for _ in range(depth)]
        self.by_name = {"b": pax.Linear(dim, 2), "a": pax.Linear(dim, 2)}
        self.scale, self.shifts = jnp.ones(dim), (jnp.zeros(dim), jnp.ones(dim))
        self.steps = jnp.zeros((), jnp.int32)
        self.config = {"width": dim, "names": ["x"]}
        self.head = pax.Linear(dim, 2)

    def __call__(self, x):
        x = x * self.scale + sum(self.shifts)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.by_name["a"](x)


@pytest.fixture(scope="module")
def tower():
    return Tower()


def parameters_of(net):
    return {name for name, _ in named_leaves(net.parameters())}


# --- what is selected ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("head", ["head"]),
        ("blocks.*", ["blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.[!1].norm", ["blocks.0.norm", "blocks.2.norm"]),
        ("*.gate.left", [f"blocks.{n}.gate.left" for n in range(3)]),
        ("by_name.a", ["by_name.a"]),
        ("blocks", ["blocks"]),
        ("config", ["config"]),
        ("config.width", ["config.width"]),
        ("blocks.1.rate", ["blocks.1.rate"]),
        ("shifts.1", ["shifts.1"]),
        ("s[ch]*", ["scale", "shifts"]),
        (".*", ["blocks", "by_name", "scale", "shifts", "steps", "head"]),
        ("head.weight", ["head.weight"]),
        ("", [""]),
        (..., [""]),
        (pax.BatchNorm1D, [f"blocks.{n}.norm" for n in range(3)]),
        (lambda module: getattr(module, "out_dim", 0) == 2, ["by_name.a", "by_name.b", "head"]),
        (lambda path, value: path.endswith("shifts.0"), ["shifts.0"]),
        (["head", "scale"], ["scale", "head"]),
        (T.All("head", T.Not("bias")), ["head.weight"]),
        (T.PathIn(("head", "bias")), ["head.bias"]),
    ],
)
def test_selected_paths(tower, what, names):
    assert sorted(tower.at(what).names()) == sorted(names)
    assert len(tower.at(what)) == len(names)


def test_every_name_that_a_net_has_selects_what_it_names(tower):
    for name, value in [*named_modules(tower), *named_leaves(tower)]:
        assert tower.at(name).names() == [name]
        assert tower.at(name).get() is value


@pytest.mark.parametrize("what", ["*.weight", pax.Linear, ["head", "blocks.2", "blocks.0"]])
def test_names_are_in_the_order_of_the_tree(tower, what):
    names = tower.at(what).names()
    assert names == [name for name in tower.at("**").names() if name in names]


def test_one_part_or_a_list_of_them(tower):
    assert tower.at("head").get() is tower.head
    assert tower.at(Mixer).get() == tower.blocks
    assert dict(tower.at("by_name.*").items()) == {f"by_name.{k}": tower.by_name[k] for k in "ab"}
    assert tower.at("config").get() == {"width": 4, "names": ["x"]}


def test_selections_are_put_together(tower):
    norms, first = tower.at(pax.BatchNorm1D), tower.at("blocks.0")
    assert (norms & first).names() == ["blocks.0.norm"]
    assert (first & norms).names() == ["blocks.0.norm"]
    assert (first | "head" | norms).names() == [
        "blocks.0", "blocks.0.norm", "blocks.1.norm", "blocks.2.norm", "head",
    ]  # fmt: skip
    rest = ~(first | "head")
    assert rest.names() == [
        "blocks.1", "blocks.2", "by_name.a", "by_name.b", "scale", "shifts.0", "shifts.1", "steps",
    ]  # fmt: skip
    assert (~rest).names() == ["blocks.0", "head"]
    assert first.at(pax.Linear).names() == ["blocks.0.token", "blocks.0.gate.left"]
    assert tower.at("blocks.*").at("norm.ema_mean").at("averages").names() == [
        f"blocks.{n}.norm.ema_mean.averages" for n in range(3)
    ]


def test_a_selection_of_an_earlier_net_is_of_its_places(tower):
    norms = tower.at(pax.BatchNorm1D)
    later = tower.at("head").replace(pax.Linear(4, 10))
    assert later.at(norms).values() == [block.norm for block in later.blocks]
    assert (later.at("head") | norms).names() == [*norms.names(), "head"]
    with refused(InvalidArgumentError, where="blocks", got="Linear at (the root)"):
        pax.Linear(2, 2).at(norms)


def test_repr_of_a_selection(tower):
    assert repr(tower.at(["head", "shifts.0"])) == (
        "2 parts of Tower:\n"
        "  shifts.0  float32[4]\n"
        "  head      Linear(in_dim=4, out_dim=2, with_bias=True)"
    )
    assert repr(tower.at("**")).endswith("more")


# --- what stands there --------------------------------------------------------------


def test_set_puts_modules_arrays_containers_and_static_data(tower):
    new = pax.Linear(4, 10)
    assert tower.at("head").set(new).head == new
    assert tower.at("by_name.a").set(new).by_name["a"] == new
    assert tower.at("shifts.1").set(jnp.full(4, 7.0)).shifts[1][0] == 7
    assert tower.at("blocks.1.gate.left").set(new).blocks[1].gate == Pair(new, squashed)
    assert tower.at("blocks.1.rate").set(0.1).blocks[1].rate == 0.1
    assert tower.at("config.width").set(9).config == {"width": 9, "names": ["x"]}
    assert tower.config["width"] == 4
    assert len(tower.at("blocks").replace(lambda old: old[:1]).blocks) == 1
    assert tower.at("").set(new) is new
    assert tower.at("head").set(None).head is None


def test_set_of_what_get_gave_changes_nothing(tower):
    for what in ("head", "*", "**", pax.Linear, "blocks", "config", "shifts.*", ...):
        selection = tower.at(what)
        assert selection.set(selection.get()) == tower, what


def test_set_values_can_be_read_back(tower):
    values = [jnp.full_like(x, n) for n, x in enumerate(tower.at("*.bias").get())]
    assert all(a is b for a, b in zip(tower.at("*.bias").set(values).at("*.bias").get(), values))
    zeros = tower.at("shifts.*").set(jnp.zeros(4))
    assert_close(np.stack(zeros.shifts), np.zeros((2, 4)))


def test_it_agrees_with_replace_in_leaves_and_treedef(tower):
    new = pax.Linear(4, 3)
    for name, value in {"head": new, "scale": None, "steps": 3, "config": {}}.items():
        a, b = tower.at(name).set(value), tower.replace(**{name: value})
        assert tree_structure(a) == tree_structure(b), name
        assert all(x is y for x, y in zip(tree_leaves(a), tree_leaves(b)))


def test_equal_edits_give_equal_treedefs_and_one_trace(tower):
    traces = []

    @jax.jit
    def call(net, x):
        traces.append(x)
        return net(x)

    for _ in range(2):
        net = Tower().at("blocks.*.norm").replace(lambda old: pax.LayerNorm(4, -1))
        net = net.at("blocks.0").freeze().at("head.bias").freeze().at("blocks.1.rate").set(0.2)
        call(net.at("blocks.1").eval(), jnp.ones((2, 4)))
    assert len(traces) == 1


def test_the_net_stays_as_it_is_and_shares_no_container(tower):
    before = tree_leaves(tower)
    new = tower.at("head").set(pax.Linear(4, 2))
    assert new.blocks is not tower.blocks and new.by_name is not tower.by_name
    assert new.config is not tower.config
    assert all(a is b for a, b in zip(before, tree_leaves(tower)))


class InNumpy(pax.ParameterModule):
    """Weights as a loader of files leaves them: they can be changed in place."""

    def __init__(self):
        super().__init__()
        self.weight, self.history, self.options = np.ones(2), [1], {"names": ["x"]}


def spoiled(part):
    if isinstance(part, np.ndarray):
        part += 1
    if isinstance(part, list):
        part.append(2)
    return part


@pytest.mark.parametrize(
    "edit",
    [
        lambda net: net.at("").replace(spoiled),
        lambda net: net.at("").replace(lambda path, part: spoiled(part)),
        lambda net: net.at(...).apply(spoiled),
        lambda net: net.at("weight").replace(spoiled),
        lambda net: net.at("weight").apply(spoiled),
        lambda net: net.at("history").replace(spoiled),
        lambda net: net.at("weight").map(spoiled),
        lambda net: net.map(spoiled),
        lambda net: pax.Sequential(net).at("modules.0").replace(spoiled),
        lambda net: pax.Sequential(net).at("modules.0").map(spoiled),
    ],
)
def test_a_function_that_changes_what_it_is_given_does_not_change_the_net(edit):
    net = InNumpy()
    new = edit(net)
    assert net.weight.tolist() == [1, 1] and net.history == [1] and net.options == {"names": ["x"]}
    assert new is not net
    kept = net.map(lambda x: x).at("weight").apply(lambda x: x).at("weight").map(lambda x: x)
    assert kept.weight is net.weight


def test_a_selection_does_not_change_and_can_be_copied(tower):
    chosen = tower.at("head")
    for change in (lambda: setattr(chosen, "root", 1), lambda: delattr(chosen, "paths")):
        with refused(AttributeError, "selection"):
            change()
    for again in (copy.copy(chosen), copy.deepcopy(chosen), pickle.loads(pickle.dumps(chosen))):
        assert again == chosen and again.get().weight.shape == (4, 2)


def test_replace_sees_the_inner_parts_replaced(tower):
    seen = []

    def note(path, old):
        seen.append(path)
        return old

    tower.at(["blocks.0", "blocks.0.norm", ""]).replace(note)
    assert seen == ["blocks.0.norm", "blocks.0", ""]
    net = tower.at([pax.Linear, Mixer]).replace(
        lambda old: old.replace(in_dim=-1) if isinstance(old, pax.Linear) else old
    )
    assert net.blocks[0].token.in_dim == -1 == net.blocks[2].gate.left.in_dim == net.head.in_dim


def test_apply_goes_to_modules_children_first_and_to_arrays(tower):
    names = []
    tower.at("blocks.0").apply(lambda m: names.append(type(m).__name__) or m)
    assert names[-1] == "Mixer" and names.count("Linear") == 2
    doubled = tower.at(["scale", "shifts"]).apply(lambda x: 2 * x)
    assert_close(doubled.scale, 2 * tower.scale)
    assert_close(doubled.shifts[1], 2 * tower.shifts[1])
    mapped = tower.at("by_name").map(jnp.zeros_like)
    assert float(abs(mapped.by_name["a"].weight).max()) == 0
    assert mapped.head == tower.head


@pytest.mark.parametrize(
    ("what", "write"),
    [
        ("had", "head"),
        ("norm", "'**.norm', which fits blocks.0.norm, blocks.1.norm, blocks.2.norm; or one"),
        ("blocks.1.rat", "blocks.1.rate"),
        (pax.Conv2D, "a selector of some of these: (the root), "),
        (lambda module: False, "a selector of some of these: (the root), "),
    ],
)
def test_no_match_proposes_existing_names(tower, what, write):
    with refused(InvalidArgumentError, where="Tower") as error:
        tower.at(what)
    assert str(error.value.write).startswith(write), error.value.write


@pytest.mark.parametrize("what", [3, None, int, 2.5])
def test_other_types_are_refused(tower, what):
    with pytest.raises(InvalidArgumentTypeError):
        tower.at(what)


def test_sharing_an_array_is_refused(tower):
    with pytest.raises(SharedNodeError):
        tower.at("shifts.0").set(tower.scale)


# --- how it behaves -----------------------------------------------------------------


def loss(net, x):
    return jnp.mean(net(x) ** 2)


def test_frozen_parts_are_out_of_parameters_gradients_and_optimizers(tower):
    net = (~tower.at("head")).freeze()
    assert parameters_of(net) == {"head.weight", "head.bias"}
    grads = T.grad(loss)(net.eval(), jnp.ones((2, 4)))
    assert {name for name, _ in named_leaves(grads)} == {"head.weight", "head.bias"}
    state = pax.optim.from_optax(optax.adam(1e-3))(net.parameters())
    assert sum(x.size for x in tree_leaves(state)) <= 2 * (4 * 2 + 2) + 1


def test_single_arrays_are_frozen_in_any_container(tower):
    every = parameters_of(tower)
    for name in sorted(every):
        net = tower.at(name).freeze()
        assert parameters_of(net) == every - {name}, name
        assert net.at(name).unfreeze() == tower
    net = tower.at("*.bias").freeze()
    assert parameters_of(net) == {name for name in every if not name.endswith("bias")}
    assert net.at("blocks").unfreeze().at("*").unfreeze() == tower


class Own(pax.Module):
    """Says by code of its own what is trained."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = jnp.ones(2), [jnp.zeros(2), jnp.ones(2)], pax.Linear(2, 2)

    def parameters(self):
        return self.replace(a=pax.EmptyNode(), c=self.c.parameters())


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (
            lambda net: net.at("by_name.*").set(net.head),
            fields(where="by_name.a, by_name.b", got="Linear(in_dim=4, out_dim=2, with_bias=True)"),
        ),
        (
            lambda net: net.at("by_name.*").set([1, 2, 3]),
            fields(where="by_name.a, by_name.b", got="3 values for 2 parts"),
        ),
        (lambda net: net.at(["head", "head.bias"]).set(0), fields(got="head, head.bias")),
        (lambda net: net.at("scale").train(), fields(where="scale")),
        (lambda net: net.at("scale").cast(jnp.int8), fields(got="<class 'jax.numpy.int8'>")),
        (lambda net: net.at("scale").cast(None), fields(got="None")),
        (lambda net: net.at("scale").init(3, jnp.ones), fields(where="init: key", got="int: 3")),
        (
            lambda net: net.at("scale").init(jax.random.key(0), lambda key, shape: 1.0),
            fields(where="scale", got="() where the net has (4,)"),
        ),
        (lambda net: net.at("config").freeze(), fields(got="config")),
        (lambda net: ~net.at(...), fields(where="Tower", got="all but the whole net")),
        (lambda net: net.at("head").policy("no policy"), fields(got="'no policy'")),
        (
            lambda net: net.at(["scale", "shifts"]).init(jax.random.key(0)),
            fields(where="scale, shifts.0, shifts.1"),
        ),
        (
            lambda net: net.at("head").freeze().at("head").init(jax.random.key(0)),
            fields(where="head"),
        ),
    ],
)
def test_invalid_edits_are_refused(tower, edit, expected):
    with pytest.raises((InvalidArgumentError, InvalidArgumentTypeError)) as error:
        edit(tower)
    assert error.value == expected


def test_an_array_of_a_class_with_its_own_parameters_is_frozen():
    net = Own()
    assert parameters_of(net) == {"b.0", "b.1", "c.weight", "c.bias"}
    frozen = net.at("b.1").freeze()
    assert parameters_of(frozen) == {"b.0", "c.weight", "c.bias"}
    assert frozen.at("b.1").unfreeze() == net
    assert parameters_of(net.at("c").freeze()) == {"b.0", "b.1"}


def test_part_of_a_frozen_module_can_be_unfrozen(tower):
    net = tower.at("blocks").freeze().at("blocks.1.token").unfreeze()
    inside = {name for name in parameters_of(net) if name.startswith("blocks")}
    assert inside == {"blocks.1.token.weight", "blocks.1.token.bias"}
    net = tower.at("head").freeze().at("head.bias").unfreeze()
    assert "head.bias" in parameters_of(net) and "head.weight" not in parameters_of(net)


def test_statistics_stay_where_they_are_frozen_too(tower):
    x = jnp.arange(8.0).reshape(2, 4)
    frozen = tower.at("blocks.0").freeze(statistics=True).train()
    after, _ = frozen % x
    assert after.blocks[0] == frozen.blocks[0]
    assert after.blocks[1].norm.ema_mean != frozen.blocks[1].norm.ema_mean
    assert not frozen.blocks[0].norm.training and frozen.blocks[1].norm.training
    again = after.at("blocks.0").unfreeze()
    assert again.blocks[0].norm.training
    assert tree_structure(again) == tree_structure(tower)
    frozen = again.eval().at("blocks.0").freeze(statistics=True)
    assert frozen.at("blocks.0").unfreeze().blocks[0].norm.training is False


def test_unfreezing_after_the_head_was_changed_keeps_every_array(tower):
    net = tower.at(...).freeze().at("head").replace(pax.Linear(4, 10))
    assert parameters_of(net) == {"head.weight", "head.bias"}
    again = net.at(...).unfreeze()
    assert again.head.weight.shape == (4, 10)
    assert all(a is b for a, b in zip(tree_leaves(again), tree_leaves(net)))
    assert parameters_of(again) == parameters_of(tower)


@pytest.mark.parametrize("states", [False, True])
def test_freeze_parameters_freezes_the_whole_net(tower, states):
    assert pax.freeze_parameters(tower, states=states) == tower.at(...).freeze(statistics=states)


def test_modes_dtypes_and_policies_of_parts(tower):
    net = tower.at("blocks.1").eval()
    assert [block.norm.training for block in net.blocks] == [True, False, True]
    assert net.at("blocks.1").train() == tower
    half = tower.at(["blocks.0", "scale", "steps"]).cast(jnp.float16)
    assert half.blocks[0].token.weight.dtype == half.scale.dtype == jnp.float16
    assert half.steps.dtype == jnp.int32 and half.head.weight.dtype == jnp.float32
    under = tower.at("blocks.*").policy("p=f32,c=f16,o=f32")
    assert pax.precision.policy_of(under.blocks[2].gate.left) is not None
    assert pax.precision.policy_of(under) is pax.precision.policy_of(under.head) is None
    assert under.at("blocks").policy(None) == tower


def test_init_makes_new_values_for_trainable_leaves(tower):
    key = jax.random.key(1)
    net = tower.at("blocks").init(key)
    assert tree_structure(net) == tree_structure(tower)
    assert net.head == tower.head
    for block, old in zip(net.blocks, tower.blocks):
        assert (block.token.weight != old.token.weight).any()
        assert block.norm.ema_mean == old.norm.ema_mean
    assert_close(net.at("*.bias").get()[0], tower.at("blocks").init(key).at("*.bias").get()[0])
    wide = pax.Sequential(pax.Linear(400, 300), pax.Conv1D(4, 500, 3), pax.Embed(500, 200))
    for layer, old in zip(wide.at(...).init(key).modules, wide.modules):
        assert_close(layer.weight.std(), old.weight.std(), rtol=0.05)
    ones = tower.at("*.weight").init(key, lambda key, shape: jnp.ones(shape))
    assert_close(ones.head.weight, jnp.ones((4, 2)))


# --- where it is used ---------------------------------------------------------------


def test_under_jit_vmap_and_grad(tower):
    @jax.jit
    def halved(net):
        net = net.at("*.bias").apply(jnp.zeros_like)
        return net.at("head").replace(lambda head: head.map(lambda x: x / 2))

    new = halved(tower)
    assert_close(new.head.weight, tower.head.weight / 2)
    assert float(new.blocks[0].token.bias.sum()) == 0
    assert tree_structure(new) == tree_structure(tower)
    grad = jax.grad(lambda x: tower.at("scale").set(x).at("scale").get().sum())(jnp.ones(4))
    assert_close(grad, jnp.ones(4))


def test_inside_pure_and_mutable(tower):
    @pax.pure
    def change(net):
        net.head = net.at("head").map(jnp.ones_like).head
        new = net.at("blocks.0").freeze()
        net.scale = jnp.full(4, 3.0)
        return net, new

    net, new = change(tower)
    assert float(net.scale[0]) == 3 and float(new.scale[0]) == 1
    assert float(net.head.bias[0]) == float(new.head.bias[0]) == 1
    with pax.experimental.mutable(tower) as net:
        net.head = pax.Linear(4, 4)
        assert net.at("head").get() is net.head
        net.blocks.append(Mixer(4))
        assert len(net.at("blocks.*")) == 4


def test_lazy_and_graph_modules():
    @dataclasses.dataclass
    class Lazy(pax.experimental.LazyModule):
        width: int

        def __call__(self, x):
            return self.get_or_create("fc", lambda: pax.Linear(x.shape[-1], self.width))(x)

    lazy = Lazy(3)
    with pytest.raises(InvalidArgumentError):
        lazy.at("fc")
    assert lazy.at("width").set(5).width == 5
    made, _ = lazy % jnp.ones((1, 2))
    frozen, _ = lazy.at(...).freeze() % jnp.ones((1, 2))
    assert parameters_of(frozen) == set() and frozen.fc.weight.shape == (2, 3)
    assert parameters_of(made.at("fc.bias").freeze()) == {"fc.weight"}
    x = pax.experimental.graph.InputNode(jnp.zeros((1, 4)))
    net = pax.experimental.graph.GraphModule((x,), x >> pax.Linear(4, 4) >> jax.nn.relu)
    wide = net.at(pax.Linear).replace(lambda old: pax.Linear(4, 6))
    assert wide(jnp.ones((2, 4))).shape == (2, 6)


def test_pickles_of_nets_with_single_arrays_frozen(tower):
    net = tower.at(["head.bias", "blocks.0"]).freeze()
    again = pickle.loads(pickle.dumps(net))
    assert tree_structure(again) == tree_structure(net)
    assert parameters_of(again) == parameters_of(net)


# --- a user's own `at` ----------------------------------------------------------------


class Placed(pax.Module):
    def __init__(self):
        super().__init__()
        self.at, self.fc = jnp.arange(3.0), pax.Linear(3, 3)


def test_an_attribute_called_at_is_that_of_the_instance():
    net = Placed()
    rebuilt = jax.tree_util.tree_map(lambda x: x + 1, net)
    assert_close(rebuilt.at, net.at + 1)  # of a module that nobody has looked at
    assert_close(jax.jit(lambda net: net.at * 2)(net), net.at * 2)


def test_shadowed_names_can_be_selected():
    net = Placed()
    assert pax.Selection.of(net, "at").get() is net.at
    frozen = pax.Selection.of(net, "fc").freeze()
    assert parameters_of(frozen) == set()
