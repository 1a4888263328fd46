"""The records by which two commits are compared: equal for equal exports alone."""

import json

from tests.export import same_bytes

ONLY = ["*/Linear", "*/Linear.*"]


def test_two_runs_record_the_same_and_each_difference_is_one_line(tmp_path, monkeypatch):
    found = same_bytes.record(tmp_path, ONLY)
    assert found["refused"] == {}
    assert {name.partition("/")[0] for name in found["files"]} == set(same_bytes.FORMATS)

    def refuse(*args, **options):
        raise ImportError("no\nsuch module")

    monkeypatch.setitem(same_bytes.FORMATS, "tflite", (refuse, {}, ".tflite"))
    again = json.loads(json.dumps(same_bytes.record(only=ONLY)))
    file = tmp_path / "saved_model" / "Linear" / "saved_model.pb"
    file.write_bytes(file.read_bytes() + b"\0")
    changed = dict(same_bytes.programs(file.parent))["saved_model.pb"]
    again["files"]["saved_model/Linear: saved_model.pb"] = f"{len(changed)} bytes"
    lines = list(same_bytes.differences(found, again, ONLY))
    assert not any("\n" in line for line in lines)
    assert [line.partition(": ")[0] for line in lines] == ["files", "files", "refused"]
    named = [line.split(": ")[1] for line in lines]
    assert named == ["saved_model/Linear", "tflite/Linear.tflite", "tflite/Linear.tflite"]


def test_every_name_is_that_of_one_export():
    names = [name for name, _ in same_bytes.exports()]
    assert len(names) == len(set(names)) > 300
