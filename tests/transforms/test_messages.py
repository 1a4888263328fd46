"""What the transforms say about mistakes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export import transforms as T
from tests.refusals import fields
from tests.transforms.models import Block, batch

two, three = jnp.ones(2), jnp.ones(3)


def both(a, b):
    return a, b


CALLS = {
    "one entry for two arguments": (
        lambda: T.vmap(both, in_axes=(0,))(two, two),
        fields(got="in_axes=(0,)"),
    ),
    "inconsistent lengths": (
        lambda: T.vmap(both)(two, three),
        fields(where="argument 0 and argument 1", got="2 and 3"),
    ),
    "lengths of state and keyword": (
        lambda: T.vmap(lambda net, x: net(x))(pax.Linear(3, 4), x=jnp.ones((2, 3))),
        fields(where="weight and bias", got="3 and 4"),
    ),
    "nothing to infer from": (
        lambda: T.vmap(both, in_axes=None)(two, two),
        fields(write="pass axis_size=..."),
    ),
    "another size": (lambda: T.vmap(both, axis_size=4)(three, three), fields(where="argument 0")),
    "a scalar": (
        lambda: T.vmap(both)(two, {"rate": 0.5}),
        fields(where="argument 1, rate", got="float and axis 0"),
    ),
    "axis out of bounds": (
        lambda: T.vmap(both, in_axes=(0, -3))(two, jnp.ones((2, 2))),
        fields(where="argument 1", got="axis -3 for shape (2, 2)"),
    ),
    "no prefix": (
        lambda: T.vmap(both, in_axes=(0, {"a": 0}))(two, {"b": two}),
        fields(where="in_axes[1]", got="{'a': 0} for dict"),
    ),
    "state that is not covered": (
        lambda: T.vmap(lambda m, x: (m(x), m)[1], state_axes={T.RngState: 0})(
            Block(2), batch(2, 3, 2)
        ),
        fields(where="bn.ema_mean.averages"),
    ),
    "weights that are not covered": (
        lambda: T.Vmap(pax.Linear, axis_size=2, state_axes={"weight": 0})(2, 2),
        fields(where="bias"),
    ),
    "an output that differs": (
        lambda: T.vmap(both, out_axes=(0, None))(two, two),
        fields(where="out_axes"),
    ),
    "state that is not covered, where the axis has a name": (
        lambda: T.vmap(
            lambda m, x: (jax.lax.pmean(m(x), "batch"), m)[1],
            state_axes={T.RngState: 0},
            axis_name="batch",
        )(Block(2), batch(2, 3, 2)),
        fields(where="bn.ema_mean.averages"),
    ),
    "an output that differs, where the axis has a name": (
        lambda: T.vmap(both, out_axes=(0, None), axis_name="batch")(two, two),
        fields(where="out_axes"),
    ),
    "a loss without what has_aux asks for": (
        lambda: T.grad(lambda net: net.weight.sum(), has_aux=True)(pax.Linear(2, 2)),
        fields(got="float32[] alone"),
    ),
    "a loss with something that nobody asked for": (
        lambda: T.grad(lambda net: (net.weight.sum(), net))(pax.Linear(2, 2)),
        fields(got="tuple of 2"),
    ),
    "no loss": (
        lambda: T.value_and_grad(lambda net: None)(pax.Linear(2, 2)),
        fields(got="NoneType"),
    ),
    "a loss for each example": (
        lambda: T.value_and_grad(lambda net: net.bias)(pax.Linear(2, 2)),
        fields(got="float32[2]"),
    ),
    "too few arguments for the carry": (
        lambda: T.scan(both, carry_argnum=1)(two),
        fields(got="carry_argnum=1 and 1 positional arguments"),
    ),
    "no pair": (lambda: T.scan(lambda c, x: c)(1.0, two), fields(got="float32[] alone")),
    "another carry": (
        lambda: T.scan(lambda c, x: ({"s": c["s"][None]}, x))({"s": two}, two),
        fields(got="s: float32[2] against float32[1,2]"),
    ),
    "a carry of another class": (
        lambda: T.scan(lambda c, x: ((c, c), x))(two, two),
        fields(got="(the root): an array against tuple of 2"),
    ),
    "a float that is scanned": (
        lambda: T.scan(both)(two, 0.5),
        fields(where="argument 1", got="float and axis 0"),
    ),
    "no length": (lambda: T.scan(lambda c: (c, None))(two), fields(write="pass length=...")),
    "None in out_axes": (
        lambda: T.scan(both, out_axes=(0, None)),
        fields(got="out_axes=(0, None)"),
    ),
    "a module that becomes another": (
        lambda: T.scan(grow, in_axes=(None, None), length=2)(two, pax.Linear(2, 2)),
        fields(got="extra: missing in the first tree"),
    ),
    "a new module in y": (
        lambda: T.scan(lambda c, x: (c, pax.Linear(2, 2)), state_axes={"weight": 0})(two, two),
        fields(where="bias"),
    ),
    "Scan without length": (lambda: T.Scan(pax.Linear), fields(write="Scan(Linear, length=...)")),
    "no constructor": (lambda: T.Remat(pax.Lambda(jnp.sin).name), fields(got="NoneType: None")),
    "layers that differ": (
        lambda: T.stack_layers([pax.Linear(2, 2), pax.Linear(2, 2).eval()]),
        fields(where="layer 1", got="training: True against False"),
    ),
    "no layers": (lambda: T.stack_layers([]), fields(got="an empty list")),
    "no axis of layers": (
        lambda: T.unstack_layers(pax.Linear(2, 3)),
        fields(where="weight and bias", got="lengths 2, 3 on axis 0"),
    ),
    "a spec without attribute": (
        lambda: pax.Linear(2, 2).with_sharding(kernel=("x",)),
        fields(where="Linear.kernel", got="the attributes weight, bias"),
    ),
    "a negative axis_size": (
        lambda: T.vmap(both, axis_size=-2),
        fields(where="vmap.axis_size", got="-2"),
    ),
    "a negative length": (
        lambda: T.scan(both, length=-2),
        fields(where="scan.length", got="-2"),
    ),
    "a negative unroll": (lambda: T.scan(both, unroll=-1), fields(where="scan.unroll", got="-1")),
    "out_axes out of bounds": (
        lambda: T.vmap(lambda x: {"y": x}, out_axes=1)(two),
        fields(where="output.y", got="axis 1 for shape ()"),
    ),
    "out_axes of scan out of bounds": (
        lambda: T.scan(both, out_axes=-3)(0.0, jnp.ones((2, 4))),
        fields(where="output", got="axis -3 for shape (4,)", write="an axis from -2 to 1"),
    ),
    "text among the results": (
        lambda: T.vmap(lambda x: {"y": "text"})(two),
        fields(where="output.y", got="str: 'text'"),
    ),
    "text among the results of scan": (
        lambda: T.scan(lambda c, x: (c, "text"))(0.0, two),
        fields(where="output", got="str: 'text'"),
    ),
    "text among the results of jit": (
        lambda: T.jit(lambda x: {"y": "text"})(two),
        fields(where="output.y", got="str: 'text'"),
    ),
    "text among the results of remat": (
        lambda: T.remat(lambda x: "text")(two),
        fields(where="output", got="str: 'text'"),
    ),
    "text among the arguments of remat": (
        lambda: T.remat(both, static_argnums=0)("mode", {"b": "text"}),
        fields(where="argument 1, b", got="str: 'text'"),
    ),
    "an axis that stacked layers cannot have": (
        lambda: T.stack_layers([pax.Linear(2, 2)] * 2, axis=2),
        fields(where="bias", got="axis 2 for shape (2,)"),
    ),
    "text as a carry": (
        lambda: T.scan(lambda c, x: (c, x))({"mode": "text"}, two),
        fields(where="argument 0, mode", got="str: 'text'"),
    ),
    "an axis of a keyword argument that is not there": (
        lambda: T.vmap(lambda x, *, y=0: x + y, in_axes_kwargs={"y": 0, "typo": 0})(two, y=two),
        fields(where="typo", got="in_axes_kwargs={'y': 0, 'typo': 0}"),
    ),
    "a static argument that is not there": (
        lambda: T.remat(both, static_argnums=(0, 7))(two, two),
        fields(got="static_argnums=0, 7 and 2 positional arguments"),
    ),
    "no axis for a keyword": (
        lambda: T.vmap(lambda x, *, y, z=0: x, in_axes_kwargs={"z": 0})(two, y=two),
        fields(where="y", got="in_axes_kwargs={'z': 0}"),
    ),
    "an index beyond uint32": (
        lambda: T.rng_fold(2**32),
        fields(where="rng_fold.index", got="int: 4294967296"),
    ),
    "a negative index": (lambda: T.rng_fold(-1), fields(got="int: -1")),
}


def grow(carry, layer):
    layer.extra = jnp.ones(())
    return carry, None


def called(name):
    """A mistake under the transforms that it calls, so that `-k` finds it by them."""
    names = set(T.__all__).intersection(CALLS[name][0].__code__.co_names)
    return f"{' '.join(sorted(names))}: {name}"


@pytest.mark.parametrize("name", CALLS, ids=called)
def test_message(name):
    call, message = CALLS[name]
    with pytest.raises(ValueError) as error:
        call()
    assert error.value == message and error.value.write


def gradients(wrt):
    return T.grad(lambda net: net(jnp.ones((1, 2))).sum(), wrt=wrt)(Block(2).eval())


WRONG_NAMES = {
    "wrt": (lambda: gradients("linaer"), "'linaer'", "linear"),
    "wrt in a list": (lambda: gradients(["linear", "biass"]), "'biass'", "bias"),
    "wrt in All and Not": (
        lambda: gradients(T.All(T.Param, T.Not("linaer"))),
        "'linaer'",
        "linear",
    ),
    "wrt in Any": (lambda: gradients(T.Any("linear", "biass")), "'biass'", "bias"),
    "wrt in PathIn": (
        lambda: gradients(T.PathIn(("linear", "bias"), ("linear", "wieght"))),
        "PathIn(('linear', 'wieght'))",
        "linear.weight",
    ),
    "wrt in PathContains": (
        lambda: gradients(T.PathContains("linaer")),
        "PathContains(key='linaer')",
        "linear",
    ),
    "wrt, a class": (lambda: gradients(pax.LayerNorm), repr(pax.LayerNorm), "linear.weight"),
    "wrt that has nothing in common": (
        lambda: gradients(T.All("linear", "dropout")),
        "All('linear', 'dropout')",
        "linear.weight",
    ),
    "state_axes of vmap": (
        lambda: T.vmap(call, state_axes={"wieght": 0})(pax.Linear(2, 2), batch(3, 1, 2)),
        "'wieght'",
        "weight",
    ),
    "state_axes of vmap without another axis": (
        lambda: T.vmap(call, in_axes=None, state_axes={"wieght": 0})(pax.Linear(2, 2), two),
        "'wieght'",
        "weight",
    ),
    "state_axes of Vmap": (
        lambda: T.Vmap(pax.Linear, axis_size=2, state_axes={"biass": None, ...: 0})(2, 2),
        "'biass'",
        "bias",
    ),
    "state_axes of scan": (
        lambda: T.scan(
            lambda x, net: (net(x), None), in_axes=(0, None), length=2, state_axes={"typo": 0}
        )(jnp.ones((1, 2)), pax.Linear(2, 2)),
        "'typo'",
        "weight",
    ),
    "StateAxes of one argument": (
        lambda: T.vmap(call, in_axes=(T.StateAxes({"wieght": 0}), 0))(
            pax.Linear(2, 2), batch(3, 1, 2)
        ),
        "'wieght'",
        "weight",
    ),
    "StateAxes of out_axes": (
        lambda: T.vmap(
            lambda: pax.Linear(2, 2), axis_size=2, out_axes=T.StateAxes({"biass": None, ...: 0})
        )(),
        "'biass'",
        "bias",
    ),
    "a filter after those that select all its leaves": (
        lambda: T.Vmap(pax.Linear, axis_size=2, state_axes={...: 0, "bias": None})(2, 2),
        "StateAxes({Ellipsis: 0, 'bias': None})",
        "'bias' before them",
    ),
    "split_rngs of vmap": (
        lambda: T.vmap(lambda net: net(two), in_axes=None, axis_size=2, split_rngs="dropuot")(
            pax.Dropout(0.5)
        ),
        "'dropuot'",
        "params",
    ),
    "split_rngs of scan": (
        lambda: T.scan(lambda x: (x, None), length=2, split_rngs=["dropout"])(two),
        "'dropout'",
        "params",
    ),
    "split_rngs of Vmap, which selects no key": (
        lambda: T.Vmap(Block, axis_size=2, split_rngs="linear")(2),
        "'linear'",
        "dropout",
    ),
    "at": (lambda: pax.Linear(2, 2).at(T.Any("bias", "wieght")), "'wieght'", "weight"),
    "transform_metadata": (
        lambda: T.Scan(pax.Linear, length=2, transform_metadata={"partition": "layers"}),
        "'partition'",
        "PARTITION_NAME",
    ),
}


def call(net, x):
    return net(x)


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_a_name_that_selects_nothing_is_an_error(name):
    use, got, write = WRONG_NAMES[name]
    with pytest.raises(pax.errors.InvalidArgumentError) as error:
        use()
    assert error.value.got == got and write in error.value.write and error.value.where


def test_filters_that_name_nothing_may_select_nothing():
    net = pax.Linear(2, 2)
    nothing = [], None, T.State, T.RngState, [pax.LayerNorm], lambda path, leaf: False, T.Not(...)
    for wrt in nothing:
        grads = T.grad(lambda net: net.weight.sum(), wrt=wrt)(net)
        assert not jax.tree.leaves(grads)
    axes = {T.RngState: 0, pax.LayerNorm: 0, (lambda path, leaf: False): 0}
    for split in (T.RngState, ["params", "dropout"]):
        assert T.vmap(call, state_axes=axes, split_rngs=split)(net, batch(3, 1, 2)).shape[0] == 3


def test_a_name_of_one_of_several_modules_is_enough():
    nets = pax.Linear(2, 2), Block(2).eval()
    grads = T.grad(lambda a, b: a.weight.sum() + b.bn.scale.sum(), (0, 1), wrt=["bn", "weight"])
    assert len(jax.tree.leaves(grads(*nets))) == 8  # two weights, all leaves of bn
    axes = {"bn": None, "weight": None, "no_leaves": None, ...: None}
    nets = nets[0], nets[1].set_attribute("no_leaves", pax.Lambda(jnp.sin))
    mapped = T.vmap(lambda a, b, x: a(x), state_axes=axes)
    assert mapped(*nets, batch(3, 1, 2)).shape == (3, 1, 2)


def test_an_updated_module_may_be_named_by_what_it_gets():
    def grow(net):
        net.scale = jnp.ones(3)
        return net

    new = T.vmap(grow, axis_size=2, state_axes={"scale": 0, ...: None})(pax.Linear(2, 2))
    assert new.scale.shape == (2, 3) and new.bias.shape == (2,)


WRONG_KINDS = {
    "filter": lambda: T.grad(both, wrt=3.5),
    "filter in a list": lambda: T.grad(both, wrt=["a", 3.5]),
    "filter that is a class": lambda: T.All(int),
    "key of state_axes": lambda: T.vmap(both, state_axes={3.5: 0}),
    "split_rngs": lambda: T.scan(both, split_rngs=3.5),
    "loss and aux": lambda: T.grad(lambda m: m.weight.sum(), has_aux=True)(pax.Linear(2, 2)),
    "inner constructor": lambda: T.Vmap(lambda: 3, axis_size=2)(),
    "inner module": lambda: T.Vmap(pax.Linear(2, 2), axis_size=2),
    "text to differentiate": lambda: T.grad(lambda net, x: net.weight.sum(), argnums=(0, 1))(
        pax.Linear(2, 2), "text"
    ),
    "axis of layers": lambda: T.stack_layers([pax.Linear(2, 2)], axis="0"),
    "axis of layers to unstack": lambda: T.unstack_layers(pax.Linear(2, 2), axis=0.5),
    "axis_size": lambda: T.vmap(both, axis_size="3"),
    "axis_size that is a float": lambda: T.vmap(both, axis_size=2.0),
    "axis_size that is a bool": lambda: T.vmap(both, axis_size=True),
    "length": lambda: T.scan(both, length=3.0),
    "unroll": lambda: T.scan(both, unroll="2"),
    "carry_argnum": lambda: T.scan(both, carry_argnum="c"),
    "index": lambda: T.rng_fold("a"),
    "index that is a float": lambda: T.rng_fold(1.5),
    "index with axes": lambda: T.rng_fold(jnp.arange(2)),
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_a_value_of_the_wrong_kind_is_a_type_error(name):
    with pytest.raises(TypeError) as error:
        WRONG_KINDS[name]()
    assert isinstance(error.value, pax.errors.PaxError)


def test_jit_warns_once_of_an_ambient_key():
    @T.jit
    def draw(x):
        return x + pax.next_rng_key()[0]

    with pytest.warns(UserWarning, match="next_rng_key") as caught:
        draw(jnp.ones(2)), draw(jnp.ones(2)), draw(jnp.ones(3))
    assert len(caught) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnames": "c"},
        {"static_argnums": (0, 2)},
        {"donate_argnames": ["a", "c"]},
        {"donate_argnums": -3},
    ],
)
def test_jax_refuses_arguments_that_the_function_lacks(options):
    with pytest.raises(ValueError, match="Jitted function has"):
        T.jit(both, **options)
