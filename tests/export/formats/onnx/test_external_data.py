"""ONNX models whose weights lie in a file beside them."""

import os

import jax
import jax.numpy as jnp
import onnx
import pytest

import pax_export as pax
from pax_export._foundations.files import atomic
from pax_export.errors import ExportPathError
from pax_export.export import load, spec, to_onnx
from pax_export.export.formats.onnx import file
from tests.closeness import assert_close
from tests.export.models import random
from tests.memory import measured, on_linux


@pytest.fixture(scope="module")
def net():
    return pax.Sequential(pax.Linear(40, 30), jax.nn.relu, pax.Linear(30, 20))


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def data_of(path):
    (found,) = path.parent.glob(f"{path.name}.*.data")
    return found


def test_weights_lie_beside_the_model_and_are_loaded_from_there(tmp_path, net):
    path = tmp_path / "net.onnx"
    report = to_onnx(net, path, spec("b, 40"), external_data=True)
    assert report.details["external_data"] == data_of(path).name
    assert data_of(path).name in str(report)
    onnx.checker.check_model(str(path), full_check=True)
    stored = {e.name: e for e in onnx.load(path, load_external_data=False).graph.initializer}
    offsets = {e.key: e.value for e in stored["modules.2.weight"].external_data}
    assert int(offsets["offset"]) % 64 == 0 and int(offsets["length"]) == 30 * 20 * 4
    assert stored["modules.2.bias"].raw_data  # it is small
    assert_close(load(path)(random(7, 40)), net(random(7, 40)), rtol=1e-5)
    assert report.validated is not None and pax.inspect(str(path))


def test_a_model_beyond_the_limit_of_protobuf_has_them_unasked(tmp_path, net, monkeypatch):
    monkeypatch.setattr(file, "LARGEST", 4000)
    to_onnx(net, tmp_path / "net.onnx", spec("b, 40"), validate="process")
    assert data_of(tmp_path / "net.onnx").stat().st_size >= (40 * 30 + 30 * 20) * 4


def test_two_runs_write_the_same_bytes(tmp_path, net):
    for run in "ab":
        to_onnx(net, tmp_path / run / "net.onnx", spec("b, 40"), external_data=True, validate=False)
    first = {each: (tmp_path / "a" / each).read_bytes() for each in names(tmp_path / "a")}
    second = {each: (tmp_path / "b" / each).read_bytes() for each in names(tmp_path / "b")}
    data = data_of(tmp_path / "a" / "net.onnx").name
    assert names(tmp_path / "a") == names(tmp_path / "b") and first[data] == second[data]


def test_without_it_the_bytes_are_those_of_protobuf(tmp_path, net):
    to_onnx(net, tmp_path / "net.onnx", spec("b, 40"))
    content = (tmp_path / "net.onnx").read_bytes()
    assert onnx.load_from_string(content).SerializeToString(deterministic=True) == content


def test_weights_seen_in_another_order_are_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "_PIECE", 1000)
    weight = jnp.asarray(random(40, 30))
    model = {"w": weight}, lambda p, x: x @ jnp.transpose(p["w"])
    for external in (False, True):
        to_onnx(model, tmp_path / f"{external}.onnx", spec("b, 30"), external_data=external)


def test_both_files_are_replaced_together(tmp_path, net):
    path = tmp_path / "net.onnx"
    to_onnx(net, path, spec("b, 40"), external_data=True)
    old, model = data_of(path), path.read_bytes()
    other = jax.tree_util.tree_map(lambda x: x * 2, net)
    with pytest.raises(ExportPathError, match="overwrite=True"):
        to_onnx(other, path, spec("b, 40"), external_data=True)
    assert (data_of(path), path.read_bytes()) == (old, model)
    to_onnx(other, path, spec("b, 40"), external_data=True, overwrite=True)
    assert data_of(path) != old
    to_onnx(net, path, spec("b, 40"), overwrite=True)
    assert names(tmp_path) == ["net.onnx", "net.onnx.html"]


def test_nothing_is_left_where_the_model_cannot_take_its_name(tmp_path, net, monkeypatch):
    def refuse(*_):
        raise ExportPathError("It cannot.", where="here", got="this", write="that")

    monkeypatch.setattr(atomic, "_move_file", refuse)
    with pytest.raises(ExportPathError, match="It cannot"):
        to_onnx(net, tmp_path / "net.onnx", spec("b, 40"), external_data=True)
    assert names(tmp_path) == []


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_damaged_weights_are_refused(tmp_path, net, damage):
    path = tmp_path / "net.onnx"
    to_onnx(net, path, spec("b, 40"), external_data=True)
    data = data_of(path)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        data.unlink()
    else:
        data.write_bytes(content if damage == "changed" else data.read_bytes()[:-1])
    with pytest.raises(ExportPathError, match="external data of the model are corrupted"):
        load(path)


MEASURE = "tests.export.measure_external_data"


@on_linux
def test_an_export_holds_the_weights_once(tmp_path):
    found = measured(MEASURE, tmp_path / "m.onnx", 8, 2048)
    assert found["weights"] == 128 and found["validated"] == "here"
    assert found["beyond"] < 0.3 * found["weights"]


@pytest.mark.skipif(not os.environ.get("PAX_EXPORT_HARD"), reason="6 GiB of disk and memory")
def test_three_gibibytes(tmp_path):
    found = measured(MEASURE, tmp_path / "m.onnx", 12, 8192)
    assert found["weights"] == 3072 and found["beyond"] < 1536
