"""Results that jump where an input moves by its last bit: what jax does there, an export may."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pax_export.errors import GradientMismatchError, ValidationError
from pax_export.export import spec, to_saved_model
from pax_export.export.formats.saved_model import SAVED_MODEL
from pax_export.export.lowering.lowered_model import lower_model
from pax_export.export.tracing.models import make_exportable
from pax_export.export.tracing.programs import trace_all
from pax_export.export.validation.model_cases import model_cases
from pax_export.export.validation.validate import validate
from tests.closeness import is_close
from tests.export.models import random
from tests.refusals import refused


def cases(function, inputs, params=None, **options):
    model = make_exportable((params or {}, function), None)
    programs = trace_all(model, inputs, None, (), False)
    return list(model_cases(lower_model(model, programs, "frozen", False, ("cpu",), **options)))


def judged(calls, change):
    """What a test says of a runtime that gives jax's results, but for some change."""

    def run(path, given):
        return [change({**case.expected}) for case, _ in zip(calls, given)]

    return validate(SAVED_MODEL, None, calls, separate=False, here=run)


#: The second term is the first but for rounding, so that its sign is rounding, too.
def at_a_kink(params, x):
    y = jnp.sum(x * params["w"], axis=-1)
    again = jnp.sum(x[..., ::-1] * params["w"][::-1], axis=-1)
    near_zero = y - jax.lax.stop_gradient(again)
    return jax.nn.leaky_relu(near_zero, 0.2) + y**2


def test_a_gradient_may_be_that_of_the_other_side(tmp_path):
    params = {"w": random(300)}
    calls = cases(at_a_kink, spec("2, 300"), params)
    forward, with_gradient = calls
    assert not forward.cotangents
    x = forward.inputs["x"]
    back = jax.vjp(lambda x: at_a_kink(params, x), x)[1]
    given = jax.vjp(lambda x: jnp.sum(x * params["w"], -1) ** 2, x)[1]
    cotangent = with_gradient.cotangents["output"]
    straight, curved = back(cotangent)[0], given(cotangent)[0]

    def other_side(results):
        # The slope of the leaky relu is 1 on one side and 0.2 on the other.
        other = np.asarray(curved + np.where(one_sided, 0.2, 5.0) * (straight - curved))
        return {**results, "gradient:x": other} if "gradient:x" in results else results

    slope = (straight - curved) / params["w"] / cotangent[:, None]
    one_sided = np.median(np.asarray(slope), axis=1, keepdims=True) > 0.5
    assert is_close(np.where(one_sided, 1.0, 0.2), np.median(slope, 1, keepdims=True), rtol=1e-3)
    assert judged(calls, other_side)

    def larger(results):
        return {n: 1.3 * x if n == "gradient:x" else x for n, x in results.items()}

    with refused(GradientMismatchError, "model's"):
        judged(calls, larger)


def test_a_smooth_gradient_is_judged_as_before():
    calls = cases(lambda p, x: jnp.sin(x) * p["w"], spec("n, 3"), {"w": random(3)})
    name = "gradient:x"
    with refused(GradientMismatchError, where="serving_default (n=2): gradient:x"):
        judged(calls, lambda r: {**r, name: r[name] * 1.002} if name in r else r)


def largest(params, x):
    """Two sums of the same numbers: which is larger is rounding alone."""
    sums = jnp.stack([x.sum(-1), x[..., ::-1].sum(-1), jnp.full(x.shape[:-1], -1e6)], -1)
    return jnp.argmax(sums, -1)


def test_the_place_of_a_maximum_may_be_the_other_of_two_equal_ones():
    calls = cases(largest, spec("40, 1000"))

    assert judged(calls, lambda results: results)["serving_default: output"] == 0
    moved = next(iter(calls[0].alternatives()))[1]["output"]
    assert moved.any()
    assert judged(calls, lambda r: {"output": np.where(moved, 1 - r["output"], r["output"])})
    with refused(ValidationError, "elements differ"):
        judged(calls, lambda results: {"output": np.full_like(results["output"], 2)})


def test_nonfinite_random_inputs_ask_for_examples(tmp_path):
    calls = cases(lambda p, x: jnp.linalg.cholesky(x), spec("n, 4, 4"), vjp_order=0)
    with refused(ValidationError, "fix: examples=[...]", "jax itself gives"):
        judged(calls, lambda r: {"output": np.ones_like(r["output"])})

    def broken(path, given):
        next(given)
        raise RuntimeError("index 3 is not in the vocabulary")

    with refused(ValidationError, "examples="):
        validate(SAVED_MODEL, None, calls, separate=False, here=broken)


def test_examples_are_not_advised_where_they_were_given(tmp_path):
    def damaged(params, x):
        return x @ params["w"]

    calls = cases(damaged, spec("n, 3"), {"w": random(3, 2)}, vjp_order=0)
    assert all("examples=" in each.advice for each in calls)
    report = to_saved_model(
        ({"w": random(3, 2)}, damaged), tmp_path / "m", spec("n, 3"), examples=[random(2, 3)]
    )
    assert report.validated == "here"


def in_halves(params, x, dtype=jnp.bfloat16):
    return ((x.astype(dtype) * 3 + 1) @ params["w"].astype(dtype)).astype(jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_rounding_to_fewer_bits_may_be_left_out(dtype):
    """As XLA does where it optimises, and other runtimes do not."""
    params = {"w": random(4, 2)}
    calls = cases(lambda p, x: in_halves(p, x, dtype), spec("3, 4"), params, vjp_order=0)
    bit = float(jnp.finfo(dtype).eps)
    unrounded = {"output": np.asarray(in_halves(params, calls[0].inputs["x"], jnp.float32))}

    assert 0.1 * bit < judged(calls, lambda r: unrounded)["serving_default: output"] < 20 * bit
    with refused(ValidationError, "elements differ"):
        judged(calls, lambda r: {"output": r["output"] * (1 + 30 * bit)})


def test_without_such_a_rounding_it_may_not():
    params = {"w": random(4, 2)}
    calls = cases(lambda p, x: in_halves(p, x, jnp.float32), spec("3, 4"), params, vjp_order=0)
    rounded = {"output": np.asarray(in_halves(params, calls[0].inputs["x"]))}
    with refused(ValidationError, "elements differ"):
        judged(calls, lambda r: rounded)
