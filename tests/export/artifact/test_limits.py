"""Files made to fill the memory, to wait for ever, or to raise what nobody expects."""

import hashlib
import json
import os
import shutil
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from pax_export.cli import main
from pax_export.errors import ExportPathError
from pax_export.export import Report, load, spec, to_saved_model, to_stablehlo, to_tflite
from pax_export.export.artifact import embedded
from pax_export.export.artifact.dimensions import RandomInput, choose, random_calls
from tests.export.models import affine, affine_params, random, rehash
from tests.refusals import refused


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path, model = tmp_path_factory.mktemp("whole"), (affine_params(), affine)
    to_saved_model(model, path / "saved", spec("n, 3"), validate=False)
    to_stablehlo(model, path / "bundle", spec("n, 3"), platforms=("cpu",), validate=False)
    to_tflite(model, path / "m.tflite", spec("2, 3"), validate=False)
    return path


def unreadable(path):
    tracemalloc.start()
    try:
        with pytest.raises(ExportPathError) as caught:
            Report.read(path)
        return caught.value, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_bomb_behind_a_model(tmp_path):
    """230 kB of a file became 5.8 GiB of memory."""
    with zipfile.ZipFile(tmp_path / "m.tflite", "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open(embedded.NAME, "w", force_zip64=True) as entry:
            for _ in range(230):
                entry.write(b"[[" * (1 << 19))
    assert (tmp_path / "m.tflite").stat().st_size < 500_000
    error, memory = unreadable(tmp_path / "m.tflite")
    assert error.got == "ValueError('the report is too large')"
    assert memory < 4 * embedded.BYTES


def test_a_bomb_of_values(tmp_path):
    (tmp_path / "pax_export.json").write_text("[" + "{}," * (embedded.VALUES + 1) + "{}]")
    error, memory = unreadable(tmp_path)
    assert error.got == "ValueError('a report has too many values')"
    assert memory < 4 * embedded.BYTES


def test_a_report_of_any_size(tmp_path):
    with (tmp_path / "pax_export.json").open("wb") as file:
        file.truncate(1 << 40)  # of nothing: it takes no room on the disk
    error, memory = unreadable(tmp_path)
    assert f"it has {1 << 40} bytes, and {embedded.BYTES} are the most that is read" in error.got
    assert memory < 1 << 20


def test_named_pipes_as_reports_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pax_export.json")
    error = unreadable(tmp_path)[0]
    assert error.where == str(tmp_path / "pax_export.json")
    assert "not a regular file, but a FIFO (a named pipe)" in error.got


SAVED_MODEL_FILES = (
    "saved_model.pb", "fingerprint.pb", "variables/variables.index", "assets/words.txt",
    "debug/saved_model_debug_info.pb", "pax_export.json", "SHA256SUMS",
)  # fmt: skip


@pytest.mark.parametrize("name", SAVED_MODEL_FILES)
def test_named_pipes_in_saved_models_are_refused(whole, tmp_path, name):
    """TensorFlow would open it, and wait for somebody to write."""
    path = shutil.copytree(whole / "saved", tmp_path / "m")
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    with refused(ExportPathError, "a FIFO (a named pipe)"):
        load(path, trusted=True)


def test_named_pipes_in_linked_folders_are_refused(whole, tmp_path):
    path = shutil.copytree(whole / "saved", tmp_path / "m")
    (path / "SHA256SUMS").unlink()
    (path / "variables").rename(tmp_path / "variables")
    (path / "variables").symlink_to(tmp_path / "variables")
    load(path)
    (tmp_path / "variables" / "variables.index").unlink()
    os.mkfifo(tmp_path / "variables" / "variables.index")
    with refused(ExportPathError, where=str(path / "variables" / "variables.index")):
        load(path)


@pytest.mark.parametrize("name", ["weights.safetensors", "serving_default.jax_export"])
def test_named_pipes_in_bundles_are_refused(whole, tmp_path, name):
    path = shutil.copytree(whole / "bundle", tmp_path / "m")
    (path / name).unlink()
    os.mkfifo(path / name)
    with refused(ExportPathError, where=str(path / name), got="a FIFO (a named pipe)"):
        load(path)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "[]", "3", "null", '{"format": 1}', "", "\x00", "{",
     '{"format": [1]}', '{"format": 1e999}', '{"format": ' + "9" * 5000 + "}"],
    ids=range(12),
)  # fmt: skip
def test_invalid_reports_are_refused(tmp_path, text):
    path = tmp_path / "pax_export.json"
    path.write_text(text)
    assert unreadable(tmp_path)[0].where == str(path)


def test_fields_without_end(tmp_path):
    (tmp_path / "a.onnx").write_bytes(b"\x08\x01" * 300_000)
    unreadable(tmp_path / "a.onnx")
    entry = b"\x0a\x0fpax_export.json\x12" + b"\xff" * 8 + b"\x7f" + b"x"
    (tmp_path / "b.onnx").write_bytes(b"\x72" + bytes([len(entry)]) + entry)
    unreadable(tmp_path / "b.onnx")


def test_a_field_larger_than_a_report(tmp_path):
    length = embedded.BYTES + 1
    varint = bytes([length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14 & 0x7F | 0x80,
                    length >> 21 & 0x7F])  # fmt: skip
    with (tmp_path / "a.onnx").open("wb") as file:
        file.write(b"\x72" + varint)
        file.truncate(length + 100)
    error, memory = unreadable(tmp_path / "a.onnx")
    assert "the report is too large" in error.got
    assert memory < 1 << 20


def test_an_archive_of_a_million_files(tmp_path):
    entry = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", *[0] * 11, 1, *[0] * 6) + b"x"
    count = 400_000
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, count * len(entry), 0, 0)
    (tmp_path / "m.tflite").write_bytes(count * entry + end)
    error, memory = unreadable(tmp_path / "m.tflite")
    assert error.got == "ValueError('the archive has too many files for one of pax_export')"
    assert memory < 1 << 20


@pytest.mark.parametrize("way", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_an_archive_that_is_packed_in_other_ways(tmp_path, way):
    """A few bytes of LZMA may ask for a dictionary of 4 GiB."""
    with zipfile.ZipFile(tmp_path / "m.tflite", "w", way) as archive:
        archive.writestr(embedded.NAME, "{}")
    error, _ = unreadable(tmp_path / "m.tflite")
    assert "packed in a way that pax_export does not use" in error.got


def test_archives_with_a_wrong_offset_are_refused(whole, tmp_path):
    content = bytearray((whole / "m.tflite").read_bytes())
    struct.pack_into("<L", content, len(content) - 6, 0xFFFFFFF0)  # where its list begins
    (tmp_path / "m.tflite").write_bytes(content)
    with pytest.raises(ExportPathError):
        load(tmp_path / "m.tflite")


@pytest.mark.parametrize("size", ["", "\0", "((", "../../x", "n if n else n", "f(n)", "n.n"])
def test_a_size_that_is_none_is_refused(whole, tmp_path, size):
    report = json.loads((whole / "bundle" / "pax_export.json").read_text())
    report["signatures"]["serving_default"]["inputs"][0]["shape"][0] = size
    (tmp_path / "pax_export.json").write_text(json.dumps(report))
    with refused(ExportPathError, "neither a symbolic dimension", "pax_export.json"):
        Report.read(tmp_path)


@pytest.mark.parametrize("constraint", ["x", "n >= ", "n > 2", "n.n == 2"])
def test_a_constraint_that_is_none_is_refused(whole, tmp_path, constraint):
    report = json.loads((whole / "bundle" / "pax_export.json").read_text())
    report["signatures"]["serving_default"]["constraints"] = [constraint]
    (tmp_path / "pax_export.json").write_text(json.dumps(report))
    with refused(ExportPathError, "neither a symbolic dimension", "pax_export.json"):
        Report.read(tmp_path)


# --- details of a bundle -----------------------------------------------------------------


@pytest.fixture
def bundle(whole, tmp_path):
    """A bundle to be changed, with hashes that fit the change: its author made them."""
    for file in (whole / "bundle").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    def change(do, also=lambda: None):
        report = json.loads((tmp_path / "pax_export.json").read_text())
        do(report["details"])
        (tmp_path / "pax_export.json").write_text(json.dumps(report))
        also()
        return rehash(tmp_path)

    return change


def function(details):
    return details["functions"]["serving_default"]


def test_a_function_outside_of_the_folder_is_not_loaded(bundle, whole, tmp_path):
    for name in (
        os.path.relpath(whole / "bundle" / "serving_default", tmp_path),
        str(whole / "bundle" / "serving_default"),
        "..",
        "a/b",
        "",
    ):
        path = bundle(lambda details, name=name: function(details).update(file=name))
        with refused(ExportPathError, "file is not a file name"):
            load(path)


def test_a_link_out_of_the_folder_is_not_followed(bundle, whole, tmp_path):
    def link():
        (tmp_path / "serving_default.jax_export").unlink()
        (tmp_path / "serving_default.jax_export").symlink_to(
            whole / "bundle" / "serving_default.jax_export"
        )

    with refused(ExportPathError, "serving_default.jax_export"):
        load(bundle(lambda details: None, link))


@pytest.mark.parametrize(
    "file", ["serving_default.jax_export", "weights.safetensors", "pax_export.json"]
)
def test_a_file_that_the_list_leaves_out_is_not_read(bundle, tmp_path, file):
    path = bundle(lambda details: None)
    lines = (path / "SHA256SUMS").read_text().splitlines(keepends=True)
    (path / "SHA256SUMS").write_text("".join(line for line in lines if file not in line))
    if file.endswith("jax_export"):
        for each in path.glob("*.mlirbc"):  # or the function would be made from these
            each.unlink()
        kept = (path / "SHA256SUMS").read_text().splitlines(keepends=True)
        (path / "SHA256SUMS").write_text("".join(x for x in kept if "mlirbc" not in x))
    with refused(ExportPathError, got=file):
        load(path)


@pytest.mark.parametrize(
    "text",
    ["", "\n", "x", "0" * 64, f"{'0' * 64}  a", f"{'0' * 64}  /etc/passwd\n",
     f"{'0' * 64}  ../a\n", f"{'A' * 64}  a\n", f"{'0' * 64}  a\n{'0' * 64}  a\n"],
)  # fmt: skip
def test_invalid_lists_are_refused(bundle, text):
    path = bundle(lambda details: None)
    (path / "SHA256SUMS").write_text(text)
    with pytest.raises(ExportPathError):
        load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda details: details.clear(),
        lambda details: details.pop("vjp_order"),
        lambda details: details.update(vjp_order="1"),
        lambda details: details.update(vjp_order=-1),
        lambda details: details.update(weights="elsewhere"),
        lambda details: details.update(functions=[]),
        lambda details: details.update(functions={}),
        lambda details: details.update(sha256=3),
        lambda details: function(details).pop("file"),
        lambda details: function(details).update(file=3),
        lambda details: function(details).update(operands=[["weight", "nobody"]]),
        lambda details: function(details).update(operands=[]),
        lambda details: function(details)["operands"].pop(0),  # a weight, of which some are read
        lambda details: function(details).update(results=[["output"]]),
        lambda details: function(details).update(results=[]),
        lambda details: function(details).update(kept=7),
    ],
)
def test_invalid_details_are_refused(bundle, change):
    with pytest.raises(ExportPathError):
        load(bundle(change))


def test_a_function_with_other_operands_than_the_report_says(bundle, tmp_path, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "bundle"
    to_stablehlo(
        ({}, lambda params, x: x), other, spec("n, 3"), platforms=("cpu",),
        validate=False,
    )  # fmt: skip
    foreign = (other / "serving_default.jax_export").read_bytes()

    def swap():
        (tmp_path / "serving_default.jax_export").write_bytes(foreign)

    with refused(ExportPathError, "(3, 1) operands", "(1, 1) in the function"):
        load(bundle(lambda details: None, swap))


# --- files with their report in them -----------------------------------------------------


def test_hashes_of_files_are_not_shown(whole):
    report = Report.read(whole / "m.tflite")
    assert len(report.details["sha256"]) == 64
    assert "sha256" not in str(report)


def test_a_file_without_a_hash_loads(whole, tmp_path):
    content = (whole / "m.tflite").read_bytes()
    report = json.loads(embedded.read(whole / "m.tflite"))
    del report["details"]["sha256"]
    model = content[: content.rindex(b"PK\x03\x04")]
    (tmp_path / "m.tflite").write_bytes(model)
    embedded.append_zip(tmp_path / "m.tflite", json.dumps(report))
    assert load(tmp_path / "m.tflite")(random(2, 3)).shape == (2, 4)


@pytest.mark.parametrize("append", [embedded.append_zip, embedded.append_field])
def test_every_byte_around_a_report_is_known(tmp_path, append):
    file = tmp_path / "model"
    file.write_bytes(b"\x08\x07")
    digest, text = hashlib.sha256(b"\x08\x07").hexdigest(), json.dumps({"a": "b" * 300})
    append(file, text)
    assert embedded.read(file) == text
    assert embedded.is_whole(file, text, digest)
    content = file.read_bytes()
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        file.write_bytes(changed)
        try:
            found = embedded.read(file)
        except (ValueError, OSError):
            continue
        assert found is None or not embedded.is_whole(file, found, digest), at


@pytest.mark.parametrize("append", [embedded.append_zip, embedded.append_field])
def test_reports_without_their_hash_are_refused(tmp_path, append):
    file = tmp_path / "model"
    file.write_bytes(b"\x08\x07")
    append(file, '{"sha256": "..."}')
    file.write_bytes(file.read_bytes().replace(b'"sha256"', b'"sha246"'))
    with pytest.raises(ValueError):
        embedded.read(file)


def test_the_archive_is_one_for_everybody(whole, tmp_path):
    with zipfile.ZipFile(whole / "m.tflite") as archive:
        assert archive.testzip() is None
        (entry,) = archive.infolist()
        assert (entry.filename, entry.compress_type) == ("pax_export.json", zipfile.ZIP_STORED)
    (tmp_path / "plain").write_bytes(b"model")
    embedded.append_zip(tmp_path / "plain", "{}")
    with zipfile.ZipFile(tmp_path / "plain", "a") as archive:
        archive.writestr("more", "x")
    assert embedded.read(tmp_path / "plain") == "{}"


# --- what validate is asked to try -------------------------------------------------------


def test_a_report_without_signatures_is_not_valid(whole, tmp_path, capsys):
    report = json.loads((whole / "saved" / "pax_export.json").read_text())
    (tmp_path / "saved_model.pb").write_bytes((whole / "saved" / "saved_model.pb").read_bytes())
    (tmp_path / "pax_export.json").write_text(json.dumps({**report, "signatures": {}}))
    assert main(["validate", str(tmp_path), "--json"]) == 1
    out, error = capsys.readouterr()
    assert json.loads(out) == {"valid": False, "checks": []}
    assert "a report without signatures" in error


def test_inputs_of_any_size_are_not_made():
    huge = {"x": RandomInput((1 << 40, "n"), np.dtype("float32"))}
    with pytest.raises(ValueError):
        list(random_calls(huge, most=1 << 28))


def test_constraints_of_any_number_end():
    constraints = [f"n >= {number}" for number in range(50_000)] + ["n <= 0"]
    assert choose([("n",)], constraints) == []
