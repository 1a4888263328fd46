"""jax's convolution is its own again when the last block that changes it has ended."""

from __future__ import annotations

import threading

import jax
import pytest

from pax_export._jax import symbolic_rules
from pax_export._jax._convolutions import _home

NAME = "conv_general_dilated"


def test_blocks_that_overlap_leave_it_as_it_was():
    own = _home[NAME]
    assert own is jax.lax.conv_general_dilated
    inside, leave = threading.Event(), threading.Event()

    def other():
        with symbolic_rules():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with symbolic_rules():
        thread.start()
        assert inside.wait(30)
    assert _home[NAME] is not own  # the other block is still there
    leave.set()
    thread.join()
    assert _home[NAME] is own


def test_an_error_in_a_block_leaves_it_as_it_was():
    own = _home[NAME]
    with pytest.raises(ZeroDivisionError), symbolic_rules(), symbolic_rules():
        raise ZeroDivisionError
    assert _home[NAME] is own
