"""Arguments that layers refuse."""

import pytest

import pax_export as pax
from tests.refusals import refused

NORM = pax.GroupNorm(1, 1)


@pytest.mark.parametrize(
    ("where", "got", "call"),
    [
        ("Conv2D.data_format", "'NCWH'", lambda: pax.Conv2D(1, 1, 3, data_format="NCWH")),
        ("Conv2D.stride", "(1, 2, 3)", lambda: pax.Conv2D(1, 1, 3, stride=(1, 2, 3))),
        ("Conv1D.kernel_shape", "0", lambda: pax.Conv1D(1, 1, 0)),
        ("Conv2DTranspose.padding", "[1, 2]", lambda: pax.Conv2DTranspose(1, 1, 3, padding=[1, 2])),
        ("Conv1D.padding", "a tuple, ((1, 1),)", lambda: pax.Conv1D(1, 1, 3, padding=((1, 1),))),
        (
            "Conv2D.feature_group_count",
            "2 groups for 4 -> 3 features",
            lambda: pax.Conv2D(4, 3, 3, feature_group_count=2),
        ),
        (
            "max_pool.channel_axis",
            "2 for shape (1, 1)",
            lambda: pax.max_pool([[1.0]], (1,), (1,), "SAME", 2),
        ),
        (
            "avg_pool.strides",
            "(1, 1, 1) for shape (1, 1)",
            lambda: pax.avg_pool([[1.0]], (1,), (1, 1, 1), "SAME"),
        ),
        (repr(NORM), "shape ()", lambda: NORM(1.0)),
    ],
)
def test_invalid_arguments_are_refused(where, got, call):
    with refused(ValueError, where=where, got=got) as error:
        call()
    assert isinstance(error.value, AssertionError)
