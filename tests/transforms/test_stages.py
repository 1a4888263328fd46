"""The stages of a jitted function: traced, lowered, compiled and exported, all on modules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax
from pax_export import transforms as T


def with_output(net, x):
    return net, net(x)


x = np.ones((2, 3), np.float32)


def test_a_compiled_program_takes_and_returns_modules():
    net = pax.Linear(3, 4)
    compiled = T.jit(with_output).lower(net, x).compile()
    same, y = compiled(net, x)
    assert (same.weight == net.weight).all()
    assert np.array_equal(y, net(x))


def test_what_is_lowered_has_the_trees_of_the_function():
    net = pax.Linear(3, 4)
    lowered = T.jit(with_output).lower(net, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    assert lowered.in_tree == jax.tree.structure(((net, 0), {}))
    out, y = lowered.out_info
    assert isinstance(out, pax.Linear) and y.shape == (2, 4)
    assert T.jit(with_output).trace(net, x).out_info[0].weight.shape == (3, 4)
    assert T.jit(with_output).eval_shape(net, x)[0].weight.shape == (3, 4)


def test_an_exported_program_is_called_with_modules():
    net = pax.Linear(3, 4)
    exported = jax.export.export(T.jit(lambda net, x: net(x)))(net, x)
    assert np.array_equal(exported.call(net, x), net(x))


def test_a_compiled_program_without_its_static_arguments():
    net = pax.Linear(3, 4)
    scaled = T.jit(lambda net, x, scale: net(x) * scale, static_argnums=2)
    assert np.array_equal(scaled.lower(net, x, 2).compile()(net, x), 2 * net(x))


def test_donate_state_in_a_compiled_program():
    net = pax.Linear(3, 4)
    arrays = jnp.asarray(x)
    compiled = T.jit(with_output, donate_state=True).lower(net, arrays).compile()
    compiled(net, arrays)
    assert net.weight.is_deleted() and not arrays.is_deleted()


def test_shardings_of_a_compiled_program():
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    net = pax.Linear(3, 4).with_sharding(weight=(None, "model"))
    shardings = T.get_named_sharding(net, mesh)
    program = T.jit(lambda net: net, in_shardings=(shardings,), out_shardings=shardings)
    compiled = program.lower(net).compile()
    assert compiled(net).weight.sharding == shardings.weight == program(net).weight.sharding


def test_clear_cache_forgets_lowered_programs():
    traces = []

    @T.jit
    def double(x):
        traces.append(x)
        return 2 * x

    for _ in range(2):
        double.lower(x)
        double.clear_cache()
    assert len(traces) == 2
