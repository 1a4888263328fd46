"""The notes by which two commits are compared: equal for equal exports, and not for others."""

from __future__ import annotations

import json

import pytest

from tests.export.same_bytes import contents, exports, notes

# One of each form of file: beside the report, with its hash, and with the report inside.
SOME = ["saved_model/Linear", "stablehlo/Linear", "tflite/Linear"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def found(kept):
    return notes.take(kept, SOME)


def test_two_runs_give_the_same_notes(found):
    again = notes.take(only=SOME)
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(found))
    assert list(notes.differences(found, again)) == []
    assert {name.split("/")[0] for name in found["files"]} == {"saved_model", "stablehlo", "tflite"}
    assert found["refused"] == {} and "Linear" in found["names"]["pax_export"]


def test_each_difference_is_one_line(found, kept):
    new = json.loads(json.dumps(found))
    file = kept / "saved_model" / "Linear" / "model" / "saved_model.pb"
    file.write_bytes(file.read_bytes() + b"\0")
    new["files"] |= {
        f"saved_model/Linear/{name}": note for name, note in contents.notes(file.parent)
    }
    new["files"].pop("stablehlo/Linear/SHA256SUMS")
    new["names"]["pax_export"].remove("Linear")
    new["refused"]["tflite/Linear"] = "ImportError: no\nsuch module"
    lines = list(notes.differences(found, new))
    assert [line.rsplit(": ", 1)[0] for line in lines[1:3]] == [
        "files: stablehlo/Linear/SHA256SUMS",
        "refused: tflite/Linear: new: ImportError",
    ]
    assert lines[0].startswith("files: saved_model/Linear/saved_model.pb: 'sha256 ")
    assert lines[3] == "names: pax_export: gone: Linear; new: none"
    assert not any("\n" in line for line in lines)


def test_only_what_both_have_is_compared(found):
    new = json.loads(json.dumps(found))
    for name in list(new["files"]):
        if not name.startswith("saved_model"):
            del new["files"][name]
    new["not_here"] = {"tflite": ["tensorflow"]}
    assert all("stablehlo" in line for line in notes.differences(found, new))
    assert list(notes.differences(found, new, ["saved_model/*"])) == []
    assert list(notes.not_compared(found, new)) == ["tflite: no tensorflow"]


def test_measured_numbers_do_not_count_and_everything_else_does(tmp_path):
    def noted(**report):
        (tmp_path / "pax_export.json").write_text(json.dumps(report, indent=1))
        return dict(contents.notes(tmp_path))["pax_export.json"]

    one = noted(seconds={"trace": 0.25, "write": 1e-05}, largest_error={"f: y": 1.5e-7}, size=3)
    assert one == noted(seconds={"trace": 3.5, "write": 2}, largest_error={"f: y": 0.0}, size=3)
    assert one != noted(seconds={"trace": 3.5, "write": 2}, largest_error={"f: y": 0.0}, size=4)
    assert one != noted(seconds={"write": 2, "trace": 3.5}, largest_error={"f: y": 0.0}, size=3)


def test_what_a_report_says_of_sources_does_not_count_in_a_bundle(tmp_path):
    def noted(target, **report):
        path = tmp_path / "pax_export.json"
        path.write_text(json.dumps({**report, "target": target}, indent=1))
        return next(contents.notes(tmp_path))

    for target, equal in (("stablehlo", True), ("saved_model", False)):
        assert (noted(target, module_bytes=10) == noted(target, module_bytes=11)) is equal
    one, other = ({"versions": {"pax_export": version, "jax": "1"}} for version in ("0.1", "0.2"))
    assert noted("saved_model", **one) == noted("saved_model", **other)
    other["versions"]["jax"] = "2"
    assert noted("saved_model", **one) != noted("saved_model", **other)


def test_what_is_left_out_is_listed(tmp_path):
    (tmp_path / "fingerprint.pb").write_bytes(b"random")
    assert list(contents.notes(tmp_path)) == []
    assert [name for name, _ in contents.left_out(tmp_path)] == ["fingerprint.pb"]


def test_every_name_is_that_of_one_export():
    names = [(each.kind, each.name) for each in exports.exports()]
    assert len(names) == len(set(names)) > 300
