"""Some of jax's own cases for its primitives: each is right in a format, or refused by its name."""

from __future__ import annotations

import pytest

from tests.oracles.primitives import GROUPS, outcome, spread

#: So many cases of a primitive at most in each format; `tests.oracles.primitives` tries all.
MOST = {"onnx": 20, "tflite": 20, "saved_model": 5}


@pytest.mark.parametrize("group", sorted(GROUPS))
@pytest.mark.parametrize("format", MOST)
def test_cases_of_jax(format, group, tmp_path):
    for number, harness in enumerate(spread(GROUPS[group], MOST[format])):
        try:
            outcome(format, harness, tmp_path / f"{number}.{format}")
        except Exception as error:
            raise AssertionError(f"{harness.fullname}: {error}") from error
