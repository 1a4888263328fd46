"""What newcomers type first, and what they are told."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import pax_export as pax
from pax_export.errors import InvalidArgumentError, InvalidArgumentTypeError, NonFiniteError
from tests.refusals import refused


class Forward(pax.Module):
    def __init__(self):
        super().__init__()
        self.layer = pax.Linear(2, 3)

    def forward(self, x):
        return self.layer(x)


class Called(Forward):
    def __call__(self, x):
        return self.forward(x)


def test_forward_instead_of_call(tmp_path):
    x = np.ones((1, 2), np.float32)
    with refused(InvalidArgumentTypeError, "not by forward", where="Forward"):
        Forward()(x)
    with refused(InvalidArgumentTypeError, "not by forward"):
        pax.export.to_onnx(Forward(), tmp_path / "net.onnx", pax.export.spec("batch, 2"))
    assert Called()(x).shape == (1, 3)


def test_a_recipe_in_place_of_an_optimizer():
    recipe = pax.optim.from_optax(optax.sgd(1.0))
    with refused(InvalidArgumentTypeError, "is none yet"):
        jax.jit(lambda optimizer: 0)(recipe)


def test_a_layer_in_place_of_an_optimizer():
    net = pax.Linear(2, 3)
    with refused(InvalidArgumentTypeError, "called with gradients and parameters"):
        pax.optim.apply_gradients(net, pax.Linear(2, 3), net.parameters())


def test_images_with_channels_on_another_axis():
    with refused(InvalidArgumentError, "data_format='NCHW'"):
        pax.Conv2D(3, 8, 3)(np.ones((1, 3, 28, 28)))
    with refused(InvalidArgumentError, "data_format='NWC'"):
        pax.Conv1D(3, 8, 3, data_format="NCW")(np.ones((1, 28, 3)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ReLU", "jax.nn.relu"),
        ("LeakyReLU", "leaky_relu"),
        ("Parameter", "pax.ParameterModule"),
        ("adopt", "pax_export.weights.adopt"),
        ("GraphModule", "experimental.graph.GraphModule"),
    ],
)
def test_names_of_other_libraries(name, text):
    with pytest.raises(AttributeError, match=text):
        getattr(pax, name)


def test_an_infinite_gradient_has_a_line():
    with pytest.raises(NonFiniteError) as caught:
        pax.debug.nans(jax.grad(lambda v: jnp.linalg.norm(v)))(jnp.zeros(3))
    assert "test_first_mistakes.py" in str(caught.value.where)


@pytest.mark.parametrize(("names", "warns"), [(["hiden"], 1), (["other"], 1), (["hidden", "k"], 0)])
def test_a_policy_for_a_name_that_the_function_does_not_have(names, warns):
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    loss = pax.transforms.remat(
        lambda net, x: checkpoint_name(net(x), "hidden").sum(), policy=policy
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.grad(lambda x: loss(pax.Linear(2, 3), x))(jnp.ones((1, 2)))
    assert [each.category.__name__ for each in caught] == ["NearNameWarning"] * warns
    assert all("the function has hidden" in str(each.message) for each in caught)
