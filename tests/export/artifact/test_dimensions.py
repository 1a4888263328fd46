"""Symbolic dimensions read from text, held against jax's own arithmetic."""

import itertools
import re

import jax
import pytest

from pax_export.export.artifact import dimensions
from tests.refusals import refused

TEXTS = [
    "n", "2*n + 3", "m*floordiv(n, 2) + mod(n, 3) + n^2 - m", "- n + 20", "max(n, m)", "min(n, 5)",
    "floordiv(3*n, 2) - 7", "n*m*n",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_as_jax_reads_it(text):
    (dimension,) = jax.export.symbolic_shape(text)
    for each in (text, str(dimension)):  # as a user writes it, and as a report has it
        assert set(dimensions.names(each)) == set(re.findall(r"\b[nm]\b", str(dimension)))
        for n, m in itertools.product((1, 2, 5, 24), repeat=2):
            expected = dimension._evaluate({"n": n, "m": m})
            assert dimensions.value(each, {"n": n, "m": m}) == expected


def test_numbers_are_dimensions():
    assert dimensions.shape((3, "n", "3"), {"n": 2}) == (3, 2, 3)
    assert dimensions.names(3) == ()


@pytest.mark.parametrize(
    "text",
    [
        "", "n n", "__import__('os')", "n.real", "n[0]", "lambda: 1", "n^n", "2^99999999", "n/2",
        "max(n)", "floordiv(n, 0)", "True", "9" * 999, "9*" * 499 + "9", "(" * 300, "-" * 999 + "n",
        "missing", "'a'", "a=1", "\0", "n" * 1001, "(n := 3)", "1.5",
    ],
)  # fmt: skip
def test_invalid_dimensions_are_refused_and_not_run(text):
    with refused(ValueError, "dimension"):
        dimensions.value(text, {"n": 2})


def test_constraints():
    assert dimensions.holds("n >= 20", {"n": 20})
    assert not dimensions.holds("n >= 20", {"n": 19})
    assert dimensions.holds("mod(n,2)==0", {"n": 4})
    assert not dimensions.holds("2*n <= m", {"n": 4, "m": 7})
    assert dimensions.holds("other <= 1", {"n": 4})  # of another signature
    for text in ("n", "n > 2", "n >= 2 >= 1", ">="):
        with refused(ValueError, "dimension"):
            dimensions.holds(text, {"n": 4})


def test_sizes_differ_where_they_may():
    assert dimensions.choose([(3,)]) == [{}]
    assert dimensions.choose([("n", 3), ("m", "n")]) == [
        {"n": 1, "m": 2}, {"n": 2, "m": 5}, {"n": 5, "m": 1},
    ]  # fmt: skip
    assert dimensions.choose([("n", "n - 2")]) == [{"n": 2}, {"n": 5}, {"n": 3}]
    assert dimensions.choose([("n",)], ("n >= 3000", "mod(n, 7) == 0", "n <= 7000")) == [
        {"n": 7000}
    ]
    assert dimensions.choose([("n",)], ("n >= 2", "n <= 1")) == []


def test_sizes_leave_something_of_an_output():
    outputs = [("batch", "max(samples - 4000, 0)")]
    chosen = dimensions.choose([("batch", "samples")], ["samples >= 256"], outputs)
    assert len(chosen) == 3
    assert all(each["samples"] > 4000 for each in chosen)
    assert dimensions.choose([("n",)], (), [(0,)]) == [{"n": 1}, {"n": 2}, {"n": 5}]


def test_a_constraint_moves_its_own_variables_only():
    """As ``t >= 80`` did of a batch beside it."""
    batch = [("batch", "t", 3)]
    assert dimensions.choose(batch, ("t >= 80",)) == [
        {"batch": 1, "t": 81}, {"batch": 2, "t": 128}, {"batch": 5, "t": 80},
    ]  # fmt: skip
    assert [each["batch"] for each in dimensions.choose([("batch", "t - 90")])] == [1, 2, 5]
    six = dimensions.choose([tuple("abcdef")], ("f >= 100", "a >= 100"))
    assert all(each["a"] >= 100 <= each["f"] for each in six)
    assert {each[name] for each in six for name in "bcde"} == {1, 2, 5}
    together = dimensions.choose(batch, ("t >= 2*batch", "mod(t, 8) == 0"))
    assert len(together) == 3
    assert all(each["t"] >= 2 * each["batch"] and each["t"] % 8 == 0 for each in together)
    assert min(each["batch"] for each in together) == 1
    assert dimensions.choose(batch, ("t == batch", "t >= 7"))[0] == {"batch": 7, "t": 7}


@pytest.mark.parametrize("size", ["mod(n, 8)", "min(n, 100)", "max(n, 3)", "n^2", "floordiv(n, 2)"])
def test_a_variable_is_not_solved_from_a_dimension_that_is_not_linear_everywhere(size):
    with pytest.raises(ValueError, match="the sizes"):
        dimensions.solve_each([(size, lambda: "x")], lambda *each: each)


def test_sizes_divide_by_sizes_that_may_be_0():
    assert dimensions.defined_value("floordiv(n, m - 1)", {"n": 3, "m": 1}) is None
    assert dimensions.choose([("n", "m")], (), [("floordiv(n, m - 1)",)])[0]["m"] > 1
    with refused(ValueError, "divides by 0"):
        dimensions.value("mod(n, m)", {"n": 3, "m": 0})
