"""Functions of modules that are given something else."""

import pytest

import pax_export as pax
from tests.refusals import refused

CALLS = {
    "select_parameters": lambda: pax.select_parameters(3),
    "update_parameters": lambda: pax.update_parameters(3, params=3),
    "freeze_parameters": lambda: pax.freeze_parameters(3),
    "unfreeze_parameters": lambda: pax.unfreeze_parameters(3, origin=3),
    "enable_train_mode": lambda: pax.enable_train_mode(3),
    "enable_eval_mode": lambda: pax.enable_eval_mode(3),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_number_is_refused_by_name(name):
    with refused(TypeError, name, got="int: 3") as error:
        CALLS[name]()
    assert isinstance(error.value, pax.errors.PaxError)
