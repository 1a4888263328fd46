"""Validation by orbax's names: every element is compared."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from pax_export.export.orbax import ExportManager, ServingConfig
from pax_export.export.orbax.validate import (
    ValidationJob,
    ValidationManager,
    ValidationReport,
    ValidationReportOption,
)
from pax_export.export.orbax.validate.validation_job import ValidationSingleJobResult
from pax_export.export.orbax.validate.validation_utils import (
    EnhancedJSONEncoder,
    Status,
    get_latency_stat,
)
from tests.closeness import assert_close
from tests.export.orbax.models import X, linear, module, params, x_spec
from tests.refusals import refused


def result(*outputs):
    return ValidationSingleJobResult([0.1] * len(outputs), list(outputs), "N/A", {"of": "test"})


def report(expected, got, **options):
    return ValidationReport(
        result({"y": expected}), result({"y": got}), ValidationReportOption(**options)
    )


ALIKE = {
    "floats": ([1.0, 2.0], [1.0, 2.0]),
    "nan and infinity": ([np.nan, np.inf, -np.inf], [np.nan, np.inf, -np.inf]),
    "complex": ([1 + 2j], [1 + 2j]),
    "integers": ([1, 2], [1, 2]),
    "text": (np.array([b"a", b"bb"], object), np.array([b"a", b"bb"], object)),
    "bfloat16": (jnp.ones(2, jnp.bfloat16), tf.ones(2, tf.bfloat16)),
    "numbers of Python": (np.asarray(1.5), 1.5),
    "nothing": (np.zeros((0, 3)), np.zeros((0, 3))),
    "floats that jax narrows": (jnp.float32([0.1, 1e9]), np.array([0.1, 1e9])),
    "integers that jax narrows": (jnp.arange(3), np.arange(3, dtype=np.int64)),
    "complex numbers that jax narrows": (jnp.ones(2, complex), np.ones(2, np.complex128)),
}
DIFFERENT = {
    "3 of 4 integers": (np.array([1, 2, 3, 4]), np.array([1, 0, 0, 0])),
    "1 of 4 integers": (np.array([1, 2, 3, 4]), np.array([1, 2, 3, 0])),
    "a shape that broadcasts": (np.ones((1, 4)), np.ones((4, 1))),
    "integers of a shape that broadcasts": (np.ones((1, 4), int), np.ones(4, int)),
    "another dtype": (np.ones(2, np.float16), np.ones(2, np.float32)),
    "other bits": (np.ones(2, np.int16), np.ones(2, np.int64)),
    "signs": (np.ones(2, np.uint32), np.ones(2, np.int64)),
    "an integer that does not fit": (jnp.int32([0]), np.array([2**32])),
    "a difference beside the narrowing": (jnp.float32([0.1]), np.array([0.1001])),
    "complex": (np.array([1 + 1j]), np.array([1 - 1j])),
    "nan on one side": (np.array([np.nan]), np.array([1.0])),
    "nan on the other side": (np.array([1.0]), np.array([np.nan])),
    "infinities": (np.array([np.inf]), np.array([-np.inf])),
    "text": (np.array([b"a", b"bb"], object), np.array([b"a", b"cc"], object)),
    "bfloat16": (jnp.ones(2, jnp.bfloat16), tf.constant([1, 2], tf.bfloat16)),
}


@pytest.mark.parametrize(("expected", "got"), ALIKE.values(), ids=ALIKE)
def test_what_passes(expected, got):
    assert report(expected, got).status is Status.Pass


@pytest.mark.parametrize(("expected", "got"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_fails(expected, got):
    found = report(expected, got)
    assert found.status is Status.Fail
    assert "Fail" in str(found) and "0.y" in str(found)


def test_64_bits_are_not_32_where_jax_has_both():
    with jax.enable_x64(True):
        assert report(np.ones(2, np.float32), np.ones(2)).status is Status.Fail


def test_tolerances():
    expected, got = np.array([1.0, 100.0]), np.array([1.05, 101.0])
    assert report(expected, got, floating_atol=0.06).status is Status.Fail
    assert report(expected, got, floating_rtol=0.02).status is Status.Fail
    assert report(expected, got, floating_rtol=0.01, floating_atol=0.05).status is Status.Pass
    assert report([1, 2], [1, 3], max_non_floating_mismatch_ratio=1.0).status is Status.Pass
    for name in ("floating_atol", "floating_rtol"):
        with refused(OverflowError, name):
            ValidationReportOption(**{name: -1.0})


def test_validation_report():
    one = result({"a": np.array([1.0, 2.0]), "b": np.array([1, 2])})
    two = result({"a": np.array([1.0, 2.5]), "b": np.array([1, 3])})
    found = ValidationReport(one, two)
    floats = found.outputs["FloatingPointDiffReport"]
    assert (floats.total, floats.max_diff, floats.max_rel_diff) == (2, 0.5, 0.25)
    assert not floats.all_close
    others = found.outputs["NonFloatingPointDiffReport"]
    assert (others.total_flattened_tensors, others.mismatches, others.mismatch_ratio) == (1, 1, 1)
    assert found.latency["candidate"].num_batches == 1
    assert [each.reason for each in found.differences] == ["1 of 2 elements differ"] * 2


def test_a_report_is_written_as_json_text_and_picture(tmp_path):
    path = tmp_path / "report.json"
    found = report(np.ones(3), np.ones(3), output_report_path=path)
    written = json.loads(path.read_text())
    assert written == json.loads(found.to_json()) == found.to_dict()
    assert written["status"] == "Pass"
    assert written["metadata"]["baseline"] == {"of": "test"}
    assert "90 %" in str(found)
    for name in ("report.png", "report.svg"):
        found.to_picture(tmp_path / name)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "report.svg").read_text()


def test_results_of_another_structure_are_refused():
    for make in (
        lambda: ValidationReport(result({"a": 1.0}), result({"b": 1.0})),
        lambda: report(np.ones(3), np.ones(4)),
        lambda: ValidationSingleJobResult([], 3, "", {}),
        lambda: ValidationJob(abs, abs, []),
    ):
        with pytest.raises(ValueError):
            make()


def test_a_job_waits_for_what_it_measures():
    calls = []

    def slow(x):
        calls.append(x)
        return {"y": jnp.ones(2) * x}

    job = ValidationJob(slow, slow, [1, 2, 3])
    found = job.calc_baseline_result()
    assert calls == [1, 1, 2, 3]  # once to compile
    assert len(found.latencies) == len(found.outputs) == 3
    assert min(found.latencies) > 0


def test_the_parts_of_a_report():
    count, mean, *late = get_latency_stat([0.1, 0.3])
    assert (count, mean) == (2, 200.0)
    assert_close(late, [280, 298])
    text = json.dumps([tf.constant(1), b"\xff", Status.Fail], cls=EnhancedJSONEncoder)
    assert json.loads(text) == [1, "\\xff", "Fail"]
    with pytest.raises(TypeError):
        json.dumps(object(), cls=EnhancedJSONEncoder)


def served(tmp_path, made, configs):
    manager = ExportManager(made, configs)
    manager.save(tmp_path / "model")
    return manager.load(tmp_path / "model")


def test_a_saved_model_is_validated(tmp_path):
    configs = [
        ServingConfig(["a", "b"], [x_spec()], lambda x: x + 1, lambda y: {"y": 2 * y}),
        ServingConfig("bare", [x_spec()]),
        ServingConfig("dict", [{"u": x_spec(name="u")}], lambda each: each["u"]),
        ServingConfig("two", [x_spec(), x_spec(name="z")], lambda x, z: x + z),
    ]
    made = module()
    loaded = served(tmp_path, made, configs)
    inputs = {
        **{key: [X, tf.constant(X[:1])] for key in ("a", "b", "bare")},
        "dict": [{"u": X}],
        "two": [[X, X], {"x": X, "z": X}],
    }
    found = ValidationManager(made, configs, inputs).validate(loaded)
    assert {key: each.status.name for key, each in found.items()} == dict.fromkeys(inputs, "Pass")
    made.update_variables({"w": jnp.zeros((3, 2)), "b": jnp.ones(2)})
    found = ValidationManager(made, configs, inputs).validate(loaded)
    assert {each.status.name for each in found.values()} == {"Fail"}


def test_nested_outputs_are_validated(tmp_path):
    made = module(lambda p, x: {"a": (linear(p, x), [x.sum(-1)])})
    configs = [ServingConfig("s", [x_spec()])]
    (found,) = (
        ValidationManager(made, configs, [X]).validate(served(tmp_path, made, configs)).values()
    )
    assert found.status is Status.Pass
    assert [each.name for each in found.differences] == ["0.a.0", "0.a.1.0"]


def test_functions_instead_of_a_module(tmp_path):
    made = module()
    configs = [ServingConfig("s", [x_spec()])]
    loaded = served(tmp_path, made, configs)
    methods = {"any": lambda x: linear(params(), x)}
    assert ValidationManager(methods, configs, [X]).validate(loaded)["s"].status is Status.Pass
    with refused(ValueError, "'s'"):
        ValidationManager(made, configs, {"t": [X]}).validate(loaded)


def test_inputs_and_outputs_are_checked(caplog):
    with pytest.raises(ValueError):
        ValidationManager.check_input(3)
    ValidationManager.check_input([{"x": X}])
    assert not caplog.records
    ValidationManager.check_input([X])
    assert "flat dict or list" in caplog.text
    # orbax's own words, which programs match
    with refused(ValueError, "only accept  flat dict outputs.  But we got <class 'lis"):
        ValidationManager.check_output(result([[1]]), result([[1]]))
    with refused(ValueError, "length.len(baseline) = 1,len(candidate) = 2."):
        ValidationManager.check_output(result({"a": 1}), result({"a": 1, "b": 2}))


def test_the_report_of_a_failure_is_logged(caplog):
    report(np.array([1]), np.array([2]), print_debug_info=True)
    assert "1 of 1 elements differ" in caplog.text
    assert "baseline [1], candidate [2]" in caplog.text
