"""The results as they are stored, and docs/models.md, which is written from them.

`python -m tests.models.page` writes the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.models.formats import ELSEWHERE, OTHERS
from tests.models.registry import Model
from tests.models.trial import BAD, REFUSED, RIGHT, ROOT, STATIC, WRONG, tidy

RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "models.md"

Results = dict[str, Any]
_OURS = ("saved_model", "gradients", "bundle", "tflite", "onnx", "torch", "torch_gradients")
#: The columns of the matrix: formats, by the runtimes that serve them.
RUNTIMES = {
    "onnx": "onnxruntime",
    "openvino": "OpenVINO",
    "iree": "IREE",
    "web": "onnxruntime-web",
    "tflite": "LiteRT",
    "saved_model": "TensorFlow",
    "bundle": "jax",
    "torch": "torch",
    "torch_gradients": "torch.autograd",
}
_BESIDE = {"saved_model": "jax2tf", "onnx": "jax2onnx"}
_TITLES = {
    "saved_model": "SavedModel",
    "gradients": "its gradients",
    "bundle": "StableHLO bundle",
    "tflite": "TFLite",
    "onnx": "ONNX",
    "torch": "PyTorch",
    "torch_gradients": "its gradients, in PyTorch",
    "openvino": "the same in OpenVINO",
    "iree": "the same in IREE",
    "web": "the same in onnxruntime-web, in Node.js",
    "jax2tf": "plain jax2tf",
    "jax2onnx": "plain jax2onnx",
}
_PACKAGES = (
    "jax", "tensorflow", "ai-edge-litert", "jax2onnx", "onnxruntime", "openvino",
    "iree-base-compiler", "torch", "flax", "equinox", "dm-haiku",
)  # fmt: skip
_FRAMEWORKS = {"jax": "plain jax", "nnx": "flax nnx", "linen": "flax linen", "pax": "pax-export"}
_WIDTH = 160


def empty() -> Results:
    """Results of nothing."""
    return {"versions": {}, "models": {}, "outcomes": {}}


def read(path: Path) -> Results:
    """Results as they were stored; without a file none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else empty()


def write(results: Results, path: Path) -> None:
    """Stores results, in an order that does not depend on the run; no long messages."""
    short = {
        form: {
            name: {k: v for k, v in each.items() if k != "details"}
            for name, each in sorted(found.items())
        }
        for form, found in sorted(results["outcomes"].items())
    }
    text = json.dumps({**results, "outcomes": short}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def describe(results: Results, models: Iterable[Model]) -> None:
    """Notes the models, and the versions of the packages that try them."""
    for model in models:
        results["models"][model.name] = {"framework": model.framework, "field": model.field}
    for name in _PACKAGES:
        try:
            results["versions"][name] = version(name)
        except PackageNotFoundError:
            continue


def counts(results: Results, form: str) -> tuple[int, int, int, int, int]:
    """Of one format: models, right ones, static ones, refused ones, bad ones."""
    found = [each["outcome"] for each in results["outcomes"].get(form, {}).values()]
    bad = sum(each in BAD for each in found)
    return len(found), found.count(RIGHT), found.count(STATIC), found.count(REFUSED), bad


def any_bad(results: Results, formats: Iterable[str]) -> bool:
    """Whether a format of ours does to a model what none should."""
    return any(counts(results, form)[4] for form in formats if form in _OURS)


def table(results: Results, formats: Sequence[str]) -> str:
    """The table in Markdown."""
    lines = [
        "| | served right | only with fixed sizes | refused clearly | raw, dead, wrong, unclear |",
        "|---|---|---|---|---|",
    ]
    for form in formats:
        total, right, static, refused, bad = counts(results, form)
        share = f" ({100 * right / total:.0f} %)" if total else ""
        fixed = "–" if form in OTHERS else static
        lines.append(
            f"| {_TITLES[form]} ({total}) | {right}{share} | {fixed} | {refused} | {bad} |"
        )
    return "\n".join(lines)


def render(results: Results) -> str:
    """The page."""
    models = results["models"]
    names = sorted({_FRAMEWORKS.get(m["framework"], m["framework"]) for m in models.values()})
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    parts = [
        "# Which models were tried",
        f"{len(models)} models of the kinds that people deploy, written with {', '.join(names)}: "
        "small in their widths, and whole in everything else. "
        "Each is exported with symbolic sizes, served by the runtime of its format, and called "
        "with other batches and lengths, with ties, and where they mean something with NaN, "
        "extremes and empty batches; every output is compared with jax.",
        "They are in `tests/models`; `tox -e models` tries them all, and writes this page.",
        table(results, [f for f in _TITLES if f in results["outcomes"] and f not in ELSEWHERE]),
        "The columns: served right with symbolic sizes; refused with those, and right with "
        "numbers in their place; refused with the operation, the place and the line; and last what "
        "should not be: an error that is not ours or does not say enough, a file that does not "
        "run, another result. "
        "jax2tf and jax2onnx are called as their guides say, with symbolic sizes as well; of "
        "their errors those count as clear that say what is not implemented.",
        f"Made with {versions}.",
        *_exceptions(results),
        *_matrix(results),
        "## The models",
        _list_of(models),
    ]
    return "\n\n".join(parts) + "\n"


def _exceptions(results: Results) -> Iterable[str]:
    for form in _OURS:
        found = results["outcomes"].get(form, {})
        rest = {name: each for name, each in found.items() if each["outcome"] != RIGHT}
        if not rest:
            continue
        yield f"## {_TITLES[form][0].upper()}{_TITLES[form][1:]}: all but {len(rest)}"
        lines = ["| model | | why |", "|---|---|---|"]
        for name, each in sorted(rest.items()):
            where = f", at {_code(each['where'])}" if each.get("where") else ""
            lines.append(f"| {name} | {_words(each)} | {_code(each.get('error', ''))}{where} |")
        yield "\n".join(lines)


def _words(each: Mapping[str, Any]) -> str:
    return "fixed sizes only" if each["outcome"] == STATIC else each["outcome"]


def _code(text: str) -> str:
    text = tidy(" ".join(text.split())).replace("`", "'").replace("|", "/")
    return f"`{text[:_WIDTH]}{'…' if len(text) > _WIDTH else ''}`"


def _matrix(results: Results) -> Iterable[str]:
    """Every model in every runtime, and why one refuses some."""
    known = {form: results["outcomes"].get(form, {}) for form in RUNTIMES}
    yield "## The matrix"
    yield (
        "The same models by runtime: the largest difference from jax in any call, as a part of "
        "the largest number of its output (or of 0.01). OpenVINO, IREE and onnxruntime-web (in "
        "Node.js) read the ONNX file, each in a process of its own that is stopped after 110 "
        "seconds. Models that are called with NaN are written with `exact=True` for OpenVINO and "
        "IREE, whose `Relu`, `Clip` and maxima lose it, and those with `Gelu` for IREE, where it "
        "is apart. torch runs the program in a process without jax; torch.autograd has the slopes "
        "of all parameters and float inputs, of models that have some. "
        "*fixed*: with numbers in the place of "
        "symbolic sizes. `tox -e matrix` tries them, and writes this table; a dash is a model that "
        "was not tried; *last* is how many were tried on the last day, with the files of that day."
    )
    yield "\n".join(_shares(known))
    lines = [f"| model | {' | '.join(RUNTIMES.values())} |", "|---|" + "---|" * len(RUNTIMES)]
    for name in sorted(results["models"]):
        cells = (_cell(found.get(name)) for found in known.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    yield "\n".join(lines)
    for form in ELSEWHERE:
        bad = {n: each for n, each in known[form].items() if each["outcome"] not in (RIGHT, STATIC)}
        if bad:
            yield f"### Models that {RUNTIMES[form]} does not run right"
            rows = [
                f"| {name} | {each['outcome']} | {_code(each.get('error', ''))} |"
                for name, each in sorted(bad.items())
            ]
            yield "\n".join(["| model | | why |", "|---|---|---|", *rows])


def _shares(known: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterable[str]:
    """A line for each runtime: how many models it ran, and ran right."""
    yield "| | tried | right | refused | crashed or stopped | wrong | last |"
    yield "|---|---|---|---|---|---|---|"
    for form, title in RUNTIMES.items():
        found = [each["outcome"] for each in known[form].values()]
        right = sum(each in (RIGHT, STATIC) for each in found)
        share = f" ({100 * right / len(found):.0f} %)" if found else ""
        wrong = found.count(WRONG)
        refused = found.count(REFUSED)
        rest = len(found) - right - wrong - refused
        days = [each["day"] for each in known[form].values() if "day" in each]
        last = f"{days.count(max(days))} on {max(days)}" if days else ""
        yield f"| {title} | {len(found)} | {right}{share} | {refused} | {rest} | {wrong} | {last} |"


def _cell(each: Mapping[str, Any] | None) -> str:
    if each is None:
        return "–"
    if each["outcome"] not in (RIGHT, STATIC):
        return f"**{each['outcome']}**" if each["outcome"] == WRONG else each["outcome"]
    far = f"{each['largest']:.0e}" if each.get("largest") else "0" if "largest" in each else "right"
    return f"*fixed* {far}" if each["outcome"] == STATIC else far


def _list_of(models: Mapping[str, Mapping[str, str]]) -> str:
    fields: dict[str, list[str]] = {}
    for name, each in models.items():
        fields.setdefault(each["field"], []).append(f"{name} ({each['framework']})")
    lines = ["| field | models |", "|---|---|"]
    lines += [f"| {field} | {', '.join(names)} |" for field, names in fields.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render(read(RESULTS)), encoding="utf-8")
