"""What the transforms say about mistakes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export import transforms as T
from tests.transforms.models import Block, batch

two, three = jnp.ones(2), jnp.ones(3)


def both(a, b):
    return a, b


CALLS = {
    "one entry for two arguments": (
        lambda: T.vmap(both, in_axes=(0,))(two, two),
        "vmap: in_axes has 1 entry for 2 arguments.\n"
        "  got: in_axes=(0,)\n"
        "  write: one entry for each positional argument, or one integer for all",
    ),
    "inconsistent lengths": (
        lambda: T.vmap(both)(two, three),
        "vmap: inconsistent lengths of the mapped axes.\n"
        "  where: argument 0 and argument 1\n"
        "  got: 2 and 3\n"
        "  write: None in in_axes, or in state_axes, for what is not mapped",
    ),
    "lengths of state and keyword": (
        lambda: T.vmap(lambda net, x: net(x))(pax.Linear(3, 4), x=jnp.ones((2, 3))),
        "vmap: inconsistent lengths of the mapped axes.\n"
        "  where: weight and bias\n"
        "  got: 3 and 4\n"
        "  write: None in in_axes, or in state_axes, for what is not mapped",
    ),
    "nothing to infer from": (
        lambda: T.vmap(both, in_axes=None)(two, two),
        "vmap: cannot infer how many calls to make: nothing is mapped.\n"
        "  write: pass axis_size=...",
    ),
    "another size": (
        lambda: T.vmap(both, axis_size=4)(three, three),
        "vmap: given axis_size 4 but inferred 3.\n"
        "  where: argument 0\n"
        "  write: axis_size=3, or none at all",
    ),
    "a scalar": (
        lambda: T.vmap(both)(two, {"rate": 0.5}),
        "vmap: a scalar cannot be mapped.\n"
        "  where: argument 1, rate\n"
        "  got: float and axis 0\n"
        "  write: None in in_axes for it",
    ),
    "axis out of bounds": (
        lambda: T.vmap(both, in_axes=(0, -3))(two, jnp.ones((2, 2))),
        "vmap: axis out of bounds.\n"
        "  where: argument 1\n"
        "  got: axis -3 for shape (2, 2)\n"
        "  write: an axis from -2 to 1",
    ),
    "no prefix": (
        lambda: T.vmap(both, in_axes=(0, {"a": 0}))(two, {"b": two}),
        "Axes must be an integer, None, StateAxes, or a tree of these that follows the argument.\n"
        "  where: in_axes[1]\n"
        "  got: {'a': 0} for dict\n"
        "  write: one axis for the whole argument, or one for each of its parts",
    ),
    "state that is not covered": (
        lambda: T.vmap(lambda m, x: (m(x), m)[1], state_axes={T.RngState: 0})(
            Block(2), batch(2, 3, 2)
        ),
        "vmap: bn.ema_mean.averages is not covered by state_axes and may differ between calls.\n"
        "  where: bn.ema_mean.averages\n"
        "  write: state_axes={..., 'averages': 0} to stack it, or make it the same in all calls "
        "(jax.lax.pmean)",
    ),
    "weights that are not covered": (
        lambda: T.Vmap(pax.Linear, axis_size=2, state_axes={"weight": 0})(2, 2),
        "vmap: bias is not covered by state_axes and may differ between calls.\n"
        "  where: bias\n"
        "  write: state_axes={..., 'bias': 0} to stack it, or make it the same in all calls "
        "(jax.lax.pmean)",
    ),
    "an output that differs": (
        lambda: T.vmap(both, out_axes=(0, None))(two, two),
        "vmap: output.1 differs from call to call, but its axis is None.\n"
        "  where: out_axes\n"
        "  write: an axis to stack it along",
    ),
    "state that is not covered, where the axis has a name": (
        lambda: T.vmap(
            lambda m, x: (jax.lax.pmean(m(x), "batch"), m)[1],
            state_axes={T.RngState: 0},
            axis_name="batch",
        )(Block(2), batch(2, 3, 2)),
        "vmap: bn.ema_mean.averages is not covered by state_axes and may differ between calls.\n"
        "  where: bn.ema_mean.averages\n"
        "  write: state_axes={..., 'averages': 0} to stack it, or make it the same in all calls "
        "(jax.lax.pmean)",
    ),
    "an output that differs, where the axis has a name": (
        lambda: T.vmap(both, out_axes=(0, None), axis_name="batch")(two, two),
        "vmap: output.1 differs from call to call, but its axis is None.\n"
        "  where: out_axes\n"
        "  write: an axis to stack it along",
    ),
    "a loss without what has_aux asks for": (
        lambda: T.grad(lambda net: net.weight.sum(), has_aux=True)(pax.Linear(2, 2)),
        "With has_aux=True the function must return a pair: the loss, and what else to return.\n"
        "  got: float32[] alone\n"
        "  write: return loss, aux",
    ),
    "a loss with something that nobody asked for": (
        lambda: T.grad(lambda net: (net.weight.sum(), net))(pax.Linear(2, 2)),
        "A gradient needs one number: the function must return a scalar loss.\n"
        "  got: tuple of 2\n"
        "  write: return loss; or has_aux=True to return loss, aux",
    ),
    "no loss": (
        lambda: T.value_and_grad(lambda net: None)(pax.Linear(2, 2)),
        "A gradient needs one number: the function must return a scalar loss.\n"
        "  got: NoneType\n"
        "  write: return loss; or has_aux=True to return loss, aux",
    ),
    "a loss for each example": (
        lambda: T.value_and_grad(lambda net: net.bias)(pax.Linear(2, 2)),
        "A gradient needs one number: the function must return a scalar loss.\n"
        "  got: float32[2]\n"
        "  write: return loss.mean()",
    ),
    "too few arguments for the carry": (
        lambda: T.scan(both, carry_argnum=1)(two),
        "scan: the function was called with fewer positional arguments than the carry needs.\n"
        "  got: carry_argnum=1 and 1 positional arguments\n"
        "  write: the carry by position, not by keyword",
    ),
    "no pair": (
        lambda: T.scan(lambda c, x: c)(1.0, two),
        "scan: the function must return a pair: the carry, and what to stack.\n"
        "  got: float32[] alone\n"
        "  write: return carry, y (or carry, None), or scan_output=False",
    ),
    "another carry": (
        lambda: T.scan(lambda c, x: ({"s": c["s"][None]}, x))({"s": two}, two),
        "scan: the carry changed its structure, so the next step could not take it.\n"
        "  got: s: float32[2] against float32[1,2]\n"
        "  write: a carry of the classes, shapes and dtypes of the one given",
    ),
    "a carry of another class": (
        lambda: T.scan(lambda c, x: ((c, c), x))(two, two),
        "scan: the carry changed its structure, so the next step could not take it.\n"
        "  got: (the root): an array against tuple of 2\n"
        "  write: a carry of the classes, shapes and dtypes of the one given",
    ),
    "a float that is scanned": (
        lambda: T.scan(both)(two, 0.5),
        "scan: a scalar cannot be mapped.\n"
        "  where: argument 1\n"
        "  got: float and axis 0\n"
        "  write: None in in_axes for it",
    ),
    "no length": (
        lambda: T.scan(lambda c: (c, None))(two),
        "scan: cannot infer how many calls to make: nothing is mapped.\n  write: pass length=...",
    ),
    "None in out_axes": (
        lambda: T.scan(both, out_axes=(0, None)),
        "scan: None in out_axes: what a loop gives at each step must be stacked.\n"
        "  got: out_axes=(0, None)\n"
        "  write: an axis, or return it as part of the carry",
    ),
    "a module that becomes another": (
        lambda: T.scan(grow, in_axes=(None, None), length=2)(two, pax.Linear(2, 2)),
        "scan: a module changed its structure, so the next step could not take it.\n"
        "  got: extra: missing in the first tree\n"
        "  write: a function that changes arrays and nothing else",
    ),
    "a new module in y": (
        lambda: T.scan(lambda c, x: (c, pax.Linear(2, 2)), state_axes={"weight": 0})(two, two),
        "scan: bias is not covered by state_axes and may differ between calls.\n"
        "  where: bias\n"
        "  write: state_axes={..., 'bias': 0} to stack it",
    ),
    "Scan without length": (
        lambda: T.Scan(pax.Linear),
        "Scan needs a length: the number of layers to build.\n  write: Scan(Linear, length=...)",
    ),
    "no constructor": (
        lambda: T.Remat(pax.Lambda(jnp.sin).name),
        "Remat needs a constructor of modules.\n"
        "  got: NoneType: None\n"
        "  write: Remat(pax.Linear, ...)(in_dim, out_dim)",
    ),
    "layers that differ": (
        lambda: T.stack_layers([pax.Linear(2, 2), pax.Linear(2, 2).eval()]),
        "Only equal layers can be stacked.\n"
        "  where: layer 1\n"
        "  got: training: True against False\n"
        "  write: layers of one recipe, in one mode (train or eval)",
    ),
    "no layers": (
        lambda: T.stack_layers([]),
        "stack_layers needs at least one layer.\n  got: an empty list\n  write: a list of modules",
    ),
    "no axis of layers": (
        lambda: T.unstack_layers(pax.Linear(2, 3)),
        "A module can be split into layers only if every leaf has an axis of layers.\n"
        "  where: weight and bias\n"
        "  got: lengths 2, 3 on axis 0\n"
        "  write: a module whose leaves all are stacked; one with shared state is not",
    ),
    "a spec without attribute": (
        lambda: pax.Linear(2, 2).with_sharding(kernel=("x",)),
        "with_sharding needs the name of an attribute of the module that holds an array.\n"
        "  where: Linear.kernel\n"
        "  got: the attributes weight, bias\n"
        "  write: module.replace(layer=module.layer.with_sharding(...)) for one inside",
    ),
    "a spec that is too long": (
        lambda: pax.Linear(2, 2).with_sharding(bias=("x", None)),
        "A partition spec has at most one entry for each axis of the array.\n"
        "  where: Linear.bias\n"
        "  got: 2 entries for 1 axes\n"
        "  write: a tuple of 1",
    ),
    "state axes that are none": (
        lambda: T.vmap(both, state_axes=0),
        "StateAxes needs a mapping from filters to axes.\n  got: int: 0\n  write: {Param: 0}",
    ),
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
    assert str(error.value) == message


WRONG_KINDS = {
    "filter": lambda: T.grad(both, wrt=3.5),
    "filter in a list": lambda: T.grad(both, wrt=["a", 3.5]),
    "filter that is a class": lambda: T.All(int),
    "key of state_axes": lambda: T.vmap(both, state_axes={3.5: 0}),
    "axis": lambda: T.StateAxes({T.Param: "0"}),
    "split_rngs": lambda: T.scan(both, split_rngs=3.5),
    "in_axes": lambda: T.vmap(both, in_axes="0"),
    "in_axes_kwargs": lambda: T.vmap(both, in_axes_kwargs=(0,)),
    "spec": lambda: pax.Linear(2, 2).with_sharding(weight="x"),
    "loss and aux": lambda: T.grad(lambda m: m.weight.sum(), has_aux=True)(pax.Linear(2, 2)),
    "inner constructor": lambda: T.Vmap(lambda: 3, axis_size=2)(),
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_a_value_of_the_wrong_kind_is_a_type_error(name):
    with pytest.raises(TypeError) as error:
        WRONG_KINDS[name]()
    assert isinstance(error.value, pax._errors.PaxError)


def test_jit_warns_once_of_an_ambient_key():
    @T.jit
    def draw(x):
        return x + pax.next_rng_key()[0]

    with pytest.warns(UserWarning, match="next_rng_key.. was called while jit compiled") as caught:
        draw(jnp.ones(2)), draw(jnp.ones(2)), draw(jnp.ones(3))
    assert len(caught) == 1
    assert "Pass a key as an argument" in str(caught[0].message)


def test_jit_has_no_abstracted_axes():
    with pytest.raises(NotImplementedError, match="no longer has abstracted axes"):
        T.jit(both, abstracted_axes=("n",))
