"""Symbolic shapes in the forms that orbax's programs write them."""

import jax.numpy as jnp
import pytest
import tensorflow as tf

from pax_export.errors import InvalidArgumentError
from tests.export.orbax.models import KEY, X, call, module, x_spec
from tests.refusals import refused


def traced(function, shape, *specs, **arguments):
    made = module(function, input_polymorphic_shape=shape, **arguments)
    return made.methods[KEY].get_concrete_function(*specs).structured_outputs


def total(params, x):
    return x["u"] + x["v"]


PAIR = {"u": x_spec(), "v": x_spec()}


@pytest.mark.parametrize(
    ("function", "spec", "shapes"),
    [
        (lambda params, x: 2 * x, x_spec(), ["b, ...", "(b, ...)", "b, _", "b, 3", "b, 3,"]),
        (total, PAIR, ["b, ...", {"u": "b, ...", "v": "b, _"}, {"u": "(b, _)", "v": "b, 3"}]),
        (
            lambda params, x: x[0] + x[1],
            (x_spec(), x_spec()),
            [("b, ...", "b, ..."), ("b, _", "b, 3")],
        ),
    ],
    ids=["text", "for all or each", "tuples"],
)
def test_forms_of_shapes(function, spec, shapes):
    for shape in shapes:
        assert traced(function, shape, spec).shape.as_list() == [None, 3]


def test_sizes_that_tensorflow_knows_come_out_again():
    assert traced(lambda params, x: 2 * x, "b, ...", x_spec(4)).shape.as_list() == [4, 3]
    assert traced(lambda params, x: x.reshape(-1), "b, ...", x_spec(4)).shape.as_list() == [12]


def test_constraints_and_expressions():
    made = module(lambda params, x: x.reshape(-1, 2, 3), input_polymorphic_shape="2*b, ...")
    assert call(made, jnp.ones((4, 3))).shape == (2, 2, 3)
    options = {"polymorphic_constraints": ("b >= 3",)}
    first = traced(lambda params, x: x[:3], "b, ...", x_spec(), jax2tf_kwargs=options)
    assert first.shape.as_list() == [3, 3]


def test_equal_names_are_equal_sizes():
    function = module(total).methods[KEY].get_concrete_function(PAIR)
    with pytest.raises(tf.errors.InvalidArgumentError):
        function({"u": tf.ones((2, 3)), "v": tf.ones((4, 3))})


def test_sizes_without_a_name_are_refused():
    with refused(InvalidArgumentError, 'input_polymorphic_shape="b, 3"', where="x.u"):
        traced(total, None, PAIR)


@pytest.mark.parametrize("shape", ["b, 4", "b", "b, ..., ...", "3, ...", "b +, ...", "b b, ..."])
def test_text_that_does_not_describe_the_input(shape):
    with refused(ValueError, "syntax error"):  # jax2tf's words
        traced(lambda params, x: x, shape, x_spec())


def test_unreadable_constraints_are_refused():
    options = {"polymorphic_constraints": ("b ! 2",)}
    with pytest.raises(ValueError, match="Constraint parsing error"):  # jax's words
        traced(lambda params, x: x, "b, ...", x_spec(), jax2tf_kwargs=options)


def test_a_tree_of_shapes_for_another_input():
    with pytest.raises(ValueError, match="pytree") as caught:
        traced(total, {"u": "b, ..."}, PAIR)
    assert caught.value.__notes__ == ["The prefix is `input_polymorphic_shape`."]


def test_the_number_of_dimensions_must_be_known():
    with pytest.raises(ValueError, match="unknown TensorShape"):
        traced(lambda params, x: x, "b, ...", tf.TensorSpec(None, tf.float32))


def test_one_lowering_serves_all_sizes():
    seen = []

    def counted(params, x):
        seen.append(x.shape)
        return x

    made = module(counted)
    for size in (1, 2, 3):
        assert call(made, X[:1].repeat(size, 0)).shape == (size, 3)
    assert len(seen) == 1
