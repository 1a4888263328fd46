"""Tiny random nets of each family, in the files of others, against numpy in float64."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.nets import decoder_reference as reference

TOKENS = np.random.RandomState(1).randint(0, 31, (2, 9))
each_family = pytest.mark.parametrize("family", list(reference.CONFIGS))


def expected(family: str) -> np.ndarray:
    config = reference.CONFIGS[family]
    weights = reference.random_weights(config)
    return np.stack([reference.logits(config, weights, row) for row in TOKENS])


def loaded(family: str, folder, files: int = 1, **options) -> pax.nets.Decoder:
    config = reference.CONFIGS[family]
    weights = reference.random_weights(config)
    path = reference.write_folder(folder, config, weights, files)
    return pax.nets.Decoder.from_pretrained(path, **options)


@each_family
def test_a_folder_of_transformers_gives_the_numbers_of_its_model(family, tmp_path):
    lm = loaded(family, tmp_path)
    assert lm.is_scanned
    assert_close(jax.jit(lambda lm: lm(TOKENS))(lm), expected(family), rtol=5e-6)
