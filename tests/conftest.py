"""What holds for every test."""

import pytest

import pax_export as pax


@pytest.fixture(autouse=True)
def same_weights():
    """Layers draw the same weights whichever tests ran before."""
    pax.seed_rng_key(42)
