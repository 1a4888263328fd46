"""Some models of the battery, and what holds for all of it; `tox -e models` tries them all."""

from __future__ import annotations

import json

import numpy as np
import pytest

import pax_export
from tests.models import page
from tests.models.__main__ import untried
from tests.models.formats import FORMATS, OTHERS
from tests.models.registry import FRAMEWORKS, ODD, all_models, dims, names_in
from tests.models.trial import BAD, DEAD, REFUSED, RIGHT, Outcome, attempt, tidy

MODELS = all_models()

# One or two of every format.
QUICK = {
    "saved_model": ("crf_likelihood", "careful_with_nan"),
    "gradients": ("tied_autoencoder", "custom_gradient"),
    "bundle": ("gpt_step_with_cache", "boosted_trees"),
    "tflite": ("mobilenet",),
}


@pytest.mark.parametrize(
    ("form", "name"), [(form, name) for form, names in QUICK.items() for name in names]
)
def test_a_model_is_served_right(form, name):
    found = attempt(MODELS[name], form, static_too=False, validate=False)
    assert found.outcome == RIGHT, found


def test_runtimes_are_given_the_same_onnx_file(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    wrote, to_onnx = [], pax_export.export.to_onnx
    monkeypatch.setattr(
        pax_export.export,
        "to_onnx",
        lambda *x, **options: wrote.append(x) or to_onnx(*x, **options),
    )
    for _ in range(2):
        found = attempt(MODELS["branches"], "onnx", False, False, kept=tmp_path)
        assert found.outcome == RIGHT, found
    assert len(wrote) == 1


def test_there_is_some_of_everything():
    assert len(MODELS) >= 74
    assert {model.framework for model in MODELS.values()} == set(FRAMEWORKS)
    assert {kind for model in MODELS.values() for kind in model.odd} == set(ODD)
    assert sum(model.differentiable for model in MODELS.values()) >= 34


@pytest.mark.parametrize("name", MODELS)
def test_calls_have_the_sizes_that_they_say(name):
    model = MODELS[name]
    calls = model.calls()
    assert len({kind for kind, _ in calls}) == len(calls)
    for kind, arrays in calls[:2]:
        sizes = model.sizes[int(kind.removeprefix("call "))]
        assert [a.shape for a in arrays] == [dims(each.shape, sizes) for each in model.inputs]
    assert [a.shape for a in model.calls(static=True)[1][1]] == [a.shape for a in calls[0][1]]


def test_sizes_are_read_and_put_in():
    assert names_in("batch, 2*pairs, 3") == ["batch", "pairs"]
    assert dims("batch, 2*pairs, 3", {"batch": 4, "pairs": 5}) == (4, 10, 3)
    assert dims("", {}) == ()


def test_the_page_shows_the_results_that_are_stored():
    assert page.PAGE.read_text(encoding="utf-8") == page.render(page.read(page.RESULTS))


def test_results_are_those_of_the_models_that_there_are():
    results = page.read(page.RESULTS)
    assert results["models"].keys() == MODELS.keys()
    for form, found in results["outcomes"].items():
        assert form in FORMATS
        wanted = {n for n, m in MODELS.items() if form != "gradients" or m.differentiable}
        assert found.keys() <= wanted


@pytest.fixture
def results():
    return {
        "versions": {"jax": "1.2"},
        "models": {"a": {"framework": "jax", "field": "x"}},
        "outcomes": {
            "onnx": {
                "a": Outcome(REFUSED, "No `rule` | here.", "m.py:3").as_dict(),
                "b": Outcome(DEAD, "killed by SIGSEGV").as_dict(),
                "c": Outcome(RIGHT, seconds=1.5).as_dict(),
            },
            "jax2onnx": {"a": Outcome(RIGHT).as_dict()},
        },
    }


def test_a_table_counts_outcomes(results):
    assert page.counts(results, "onnx") == (3, 1, 0, 1, 1)
    assert page.table(results, ["onnx", "jax2onnx"]).splitlines()[2:] == [
        "| ONNX (3) | 1 (33 %) | 0 | 1 | 1 |",
        "| plain jax2onnx (1) | 1 (100 %) | – | 0 | 0 |",
    ]
    assert page.any_bad(results, ["onnx"])
    assert not page.any_bad(results, ["jax2onnx", *OTHERS])


def test_the_page_says_what_was_refused_and_why(results):
    text = page.render(results)
    assert "| a | refused | `No 'rule' / here.`, at `m.py:3` |" in text
    assert "| b | dead | `killed by SIGSEGV` |" in text
    assert "| c |" not in text


def test_stored_results_are_the_same_after_reading(results, tmp_path):
    page.write(results, tmp_path / "results.json")
    assert page.read(tmp_path / "results.json") == json.loads(json.dumps(results))


def test_a_run_goes_on_where_it_was_stopped(results):
    outcomes = results["outcomes"]
    models = [MODELS["branches"], MODELS["gpt"]]
    pairs = [("onnx", model) for model in models]
    outcomes["onnx"] |= {model.name: {"outcome": RIGHT} for model in models}
    assert untried(pairs, outcomes, resume=True) == []
    assert untried(pairs, outcomes, resume=False) == pairs  # earlier outcomes count no longer
    outcomes["onnx"]["gpt"] = {"outcome": RIGHT}
    assert untried(pairs, outcomes, resume=True) == pairs[:1]
    assert set(outcomes["onnx"]) == {"a", "b", "c", "gpt"}


def test_nothing_of_the_machine_is_kept():
    text = (
        "'/home/me/venv/lib/python3.11/site-packages/jax/a.py:3' at 0x7f12345678 /tmp/x1/model.onnx"
    )
    assert tidy(text) == "'jax/a.py:3' at 0x… model.onnx"


def test_a_bad_outcome_is_none_of_the_others():
    assert not {RIGHT, REFUSED} & set(BAD)
    assert np.isnan(MODELS["nms"].calls()[-2][1][0]).any()
