"""Damage to every kind of export: refused by an error of ours, or the same results.

A flip, a cut, a gap, a hole of zeros or a stranger's bytes, at a place that chance chooses in a
file that chance chooses.  Never a wrong number, and never an error that is not ours.
"""

from __future__ import annotations

import random as chance
import shutil
import warnings
from collections import Counter

import numpy as np
import pytest

from pax_export.errors import NotValidatedWarning, PaxError
from pax_export.export import (
    Report,
    load,
    renew,
    spec,
    to_onnx,
    to_saved_model,
    to_stablehlo,
    to_tflite,
    to_web,
)
from tests.closeness import assert_close
from tests.export.models import affine, affine_params, random
from tests.hard.size import runs

X = random(2, 3)


def saved_model(path):
    to_saved_model((affine_params(), affine), path, spec("2, 3"), validate=False)


def with_a_vocabulary(path):
    """TensorFlow itself writes this one: an asset, a table, and its own saver."""
    tf = pytest.importorskip("tensorflow")
    words = path.parent / "words.txt"
    words.write_text("".join(f"{number}\n" for number in range(20)))
    table = tf.lookup.StaticHashTable(
        tf.lookup.TextFileInitializer(
            str(words), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE,
            tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER,
        ),
        -1,
    )  # fmt: skip
    to_saved_model(
        (affine_params(), affine), path, spec("2, 3"), validate=False,
        preprocess=lambda x: tf.cast(
            table.lookup(tf.strings.as_string(tf.cast(tf.abs(4 * x), tf.int32))), tf.float32
        ),
        preprocess_inputs=spec("2, 3"),
    )  # fmt: skip


def bundle(path):
    to_stablehlo(
        (affine_params(), affine), path, spec("2, 3"), platforms=("cpu",), vjp_order=1,
        validate=False,
    )  # fmt: skip


def tflite(path):
    to_tflite((affine_params(), affine), path, spec("2, 3"), validate=False)


def onnx(path):
    pytest.importorskip("onnx")
    to_onnx((affine_params(), affine), path, spec("2, 3"), validate=False)


def web(path):
    """The folder without the packages of npm, which are third-party files."""
    pytest.importorskip("onnx")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", NotValidatedWarning)
        patch.setattr("pax_export.export.formats.onnx.web.npm.found", lambda: False)
        to_web((affine_params(), affine), path, spec("2, 3"), validate=False)


ARTIFACTS = {
    "SavedModel": saved_model,
    "vocabulary": with_a_vocabulary,
    "bundle": bundle,
    "TFLite": tflite,
    "ONNX": onnx,
    "web": web,
}


@pytest.fixture(scope="module", params=ARTIFACTS)
def artifact(request, tmp_path_factory):
    """An export as it was written, and what it gives."""
    path = tmp_path_factory.mktemp("whole") / "export"
    ARTIFACTS[request.param](path)
    return path, np.asarray(load(path)(X))


def files(path):
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def copied(path, place):
    """A fresh copy; of a folder, only files are replaced, since most damage spares most files."""
    if place.is_dir():
        shutil.rmtree(place)
    return shutil.copytree(path, place) if path.is_dir() else shutil.copy(path, place)


def damaged(content, draw):
    """Other bytes, and what was done; the same bytes are drawn again."""
    size = len(content)
    at = draw.choice((draw.randrange(size), draw.randrange(max(0, size - 200), size)))
    length = min(draw.choice((1, 4, 64, 1000)), size - at)
    ways = {
        "a bit": lambda: content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)])
        + content[at + 1 :],
        "truncated": lambda: content[:at],
        "a gap": lambda: content[:at] + content[at + length :],
        "zeros": lambda: content[:at] + bytes(length) + content[at + length :],
        "noise": lambda: content[:at] + draw.randbytes(length) + content[at + length :],
        "longer": lambda: content[:at] + draw.randbytes(length) + content[at:],
    }  # fmt: skip
    way = draw.choice(list(ways))
    return way, ways[way]()


def outcome(path, expected):
    """What came of loading and calling it: anything but these two is a mistake of ours."""
    try:
        result = load(path)(X)
    except PaxError:
        return "refused"
    np.testing.assert_array_equal(result, expected)
    return "the same"


def test_damage_is_refused_or_makes_no_difference(artifact, tmp_path):
    path, expected = artifact
    found = Counter()
    for seed in range(runs(short=60, long=1000)):
        draw = chance.Random(seed)
        place = copied(path, tmp_path / "copy")
        file = draw.choice(files(tmp_path / "copy"))
        way, content = damaged(file.read_bytes(), draw)
        if content == file.read_bytes():
            continue
        file.write_bytes(content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found[outcome(place, expected)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, {way} in {file.name}: {error!r}") from error
    assert found["refused"] > 0.9 * found.total()


def test_every_flipped_byte_of_a_file_is_found(tmp_path):
    path = tmp_path / "model.tflite"
    tflite(path)
    content = path.read_bytes()
    step = runs(short=-(-len(content) // 400), long=1)
    for at in {*range(0, len(content), step), *range(len(content) - 100, len(content))}:
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        with pytest.raises(PaxError):
            load(path)


@pytest.mark.parametrize("folder", [saved_model, bundle])
def test_every_file_of_a_folder_is_looked_at(tmp_path, folder):
    folder(tmp_path / "export")
    found = 0
    for file in files(tmp_path / "export"):
        content = file.read_bytes()
        places = chance.Random(file.name).sample(
            range(len(content)), min(len(content), runs(short=12, long=300))
        )
        for at in places:
            changed = bytearray(content)
            changed[at] ^= 1 << at % 8
            file.write_bytes(changed)
            # Between its arrays TensorFlow leaves room, which nobody reads.
            expected = affine(affine_params(), X)
            if outcome_close(tmp_path / "export", expected) == "refused":
                found += 1
            else:
                assert file.name.startswith("variables.data")
        file.write_bytes(content)
    assert found


def places(size, most):
    """So many places in a file, or all of them, the first and the last among them."""
    return sorted({*range(0, size, max(1, size // most)), *range(max(0, size - 3), size)})


def outcome_close(path, expected):
    try:
        result = load(path)(X)
    except PaxError:
        return "refused"
    assert_close(result, expected, rtol=1e-5)
    return "the same"


def test_a_damaged_bundle_is_not_made_anew(tmp_path):
    bundle(tmp_path / "export")
    whole = {file.name: file.read_bytes() for file in (tmp_path / "export").iterdir()}
    for seed in range(runs(short=20, long=200)):
        draw = chance.Random(seed)
        name = draw.choice(sorted(whole))
        _, content = damaged(whole[name], draw)
        if content == whole[name]:
            continue
        (tmp_path / "export" / name).write_bytes(content)
        with pytest.raises(PaxError):
            renew(tmp_path / "export")
        assert (tmp_path / "export" / name).read_bytes() == content
        (tmp_path / "export" / name).write_bytes(whole[name])


def test_a_damaged_report_is_read_or_refused(artifact, tmp_path):
    """Whoever only looks at an export gets a report or an error of ours."""
    path, _ = artifact
    for seed in range(runs(short=60, long=1000)):
        draw = chance.Random(seed)
        place = copied(path, tmp_path / "copy")
        file = place / "pax_export.json" if path.is_dir() else place
        file.write_bytes(damaged(file.read_bytes(), draw)[1])
        try:
            str(Report.read(place))
        except PaxError:
            pass
