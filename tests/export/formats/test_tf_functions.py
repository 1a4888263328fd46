"""Signatures as TensorFlow functions, without any writer."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pax_export.export import spec
from pax_export.export.formats.tf_functions import call_signature, make_function, make_variables
from pax_export.export.lowering import lowered_model
from pax_export.export.tracing.exportable import make_exportable
from pax_export.export.tracing.programs import trace_all
from tests.closeness import assert_close
from tests.export.models import Counter, affine, affine_params, random


def plan_of(model, inputs, state="frozen", trainable=False):
    chosen = make_exportable(model, None)
    traced = trace_all(chosen, inputs, None, (), False)
    return lowered_model.lower_model(chosen, traced, state, trainable, ("cpu",))


@pytest.fixture
def tf():
    return pytest.importorskip("tensorflow")


def test_a_function_takes_the_inputs_of_its_signature(tf):
    plan = plan_of((affine_params(), affine), spec("n, 3"))
    function = make_function(plan.signatures[0], make_variables(plan.store))
    (given,) = function.get_concrete_function().structured_input_signature[0]
    assert (given.name, given.shape.as_list(), given.dtype) == ("x", [None, 3], tf.float32)
    x = random(4, 3)
    assert_close(function(x)["output"], affine(affine_params(), x), atol=1e-6)


def test_a_signature_can_be_a_part_of_another_function_and_keeps_its_gradient(tf):
    plan = plan_of((affine_params(), affine), spec("n, 3"), trainable=True)
    variables = make_variables(plan.store)

    @tf.function(autograph=False)
    def loss(x):
        return tf.reduce_sum(call_signature(plan.signatures[0], variables, [2 * x])["output"] ** 2)

    x = random(4, 3)
    with tf.GradientTape() as tape:
        value = loss(tf.constant(x))
    named = dict(zip((each.name for each in plan.store.variables), variables))
    expected = jax.grad(lambda params: (affine(params, 2 * x) ** 2).sum())(affine_params())
    assert float(value) > 0
    for name, gradient in tape.gradient(value, named).items():
        assert_close(gradient, expected[name], rtol=1e-4)


def test_new_state_is_assigned(tf):
    plan = plan_of(Counter(), spec("n"), state="update")
    (steps,) = variables = make_variables(plan.store)
    function = make_function(plan.signatures[0], variables)
    for _ in range(3):
        function(np.zeros(2, np.float32))
    assert int(steps) == 3
