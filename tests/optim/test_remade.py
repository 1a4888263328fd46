"""A model that changes in the middle of training, and its optimizer."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pax_export as pax
from pax_export.errors import StructureMismatchError
from tests.optim.steps import kinds
from tests.refusals import refused

ADAM = pax.optim.from_optax(optax.adam(1e-2))
X = jnp.asarray(np.random.RandomState(0).standard_normal((8, 2)), jnp.float32)


def loss_fn(model, x):
    model, y = model % x
    loss = (y**2).mean()
    return loss, (loss, model)


def net():
    return pax.Sequential(pax.Linear(2, 3), pax.BatchNorm1D(3), pax.Linear(3, 4))


CHANGES = {
    "eval": (lambda model: model.eval(), "mode|training: "),
    "a part in eval mode": (lambda model: model.at("modules.1").eval(), "modules.1.training: "),
    "a part frozen": (
        lambda model: model.at("modules.2").freeze(), "modules.2.frozen: None against "
    ),
    "frozen": (pax.freeze_parameters, "frozen: None against "),
    "a static attribute": (lambda model: model.set_attribute("tag", 3), "tag: missing"),
    "more layers": (
        lambda model: pax.Sequential(*model.modules, pax.Linear(4, 4)), "modules: .* of 3"
    ),
}  # fmt: skip


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_another_model_is_named(change, jitted):
    changed, difference = CHANGES[change]
    update = pax.build_update_fn(loss_fn)
    update = jax.jit(update) if jitted else update
    model = net()
    model, optimizer, _ = update(model, ADAM(model.parameters()), X)
    model = changed(model)
    with refused(StructureMismatchError, "optimizer.state.0", "remade") as error:
        update(model, optimizer, X)
    assert re.search(difference, str(error.value)), str(error.value)


def test_remade_keeps_what_stays():
    make = pax.optim.from_optax(optax.adam(1e-2))
    update = jax.jit(pax.build_update_fn(loss_fn))
    model = net()
    optimizer = make(model.parameters())
    for _ in range(3):
        model, optimizer, _ = update(model, optimizer, X)
    changed = model.at("modules.2").set(pax.Linear(3, 5))
    params = changed.parameters()
    again = optimizer.remade(params)
    mu, before = again.state[0].mu, optimizer.state[0].mu
    assert int(again.state[0].count) == 3
    assert (mu.modules[0].weight == before.modules[0].weight).all()
    assert abs(before.modules[0].weight).max() > 0
    assert mu.modules[2].weight.shape == (3, 5) and not mu.modules[2].weight.any()
    first = kinds(again), jax.tree_util.tree_structure(again)
    changed, again, _ = update(changed, again, X)
    assert (kinds(again), jax.tree_util.tree_structure(again)) == first


def test_opax_is_named_too():
    model = net()
    optimizer = pax.opax.adam(1e-2)(model.parameters())
    model, optimizer, _ = pax.build_update_fn(loss_fn)(model, optimizer, X)
    with pytest.raises(StructureMismatchError):
        pax.build_update_fn(loss_fn)(model.eval(), optimizer, X)
