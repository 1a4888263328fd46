"""Keras's files as a source, and HDF5 as h5py writes it, of which they are made."""

from __future__ import annotations

import json
import zipfile

import h5py
import numpy as np
import pytest

from pax_export.errors import UnsupportedDtypeError, WeightsFileError
from pax_export.weights import open_source
from tests.closeness import assert_close
from tests.refusals import refused

ARRAYS = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "float64": np.array(1.5),
    "big": np.arange(3, dtype=">f4"),
    "float16": np.ones((2, 2), np.float16),
    "int8": np.array([-1, 2], np.int8),
    "uint64": np.array([1 << 63], np.uint64),
    "bool": np.array([True, False]),
    "empty": np.zeros((0, 3), np.float32),
}


def variables(group, name, *arrays):
    group = group.create_group("vars")
    group.attrs["name"] = name
    for number, array in enumerate(arrays):
        group.create_dataset(str(number), data=array)


@pytest.fixture
def weights(tmp_path):
    """As Keras 3 writes it: folders by class, names beside."""
    path = tmp_path / "net.weights.h5"
    with h5py.File(path, "w") as file:
        cell = file.create_group("layers/lstm/cell")
        variables(cell, "lstm_cell", np.ones((2, 8)), np.ones((3, 8)), np.ones(8))
        variables(file["layers/lstm"], "rnn")
        variables(file.create_group("layers/dense"), "head", np.eye(3), np.arange(3.0))
        variables(file.create_group("layers/dense_1"), "last", np.eye(2))
        norm = [np.full(2, number, np.float32) for number in range(4)]
        variables(file.create_group("layers/batch_normalization"), "norm", *norm)
        variables(file.create_group("layers/my_layer"), "mine", np.ones(2), np.ones(3))
        variables(file.create_group("optimizer"), "adam", np.array(3))
    return path


NAMES = [
    "rnn/lstm_cell/kernel", "rnn/lstm_cell/recurrent_kernel", "rnn/lstm_cell/bias",
    "head/kernel", "head/bias", "last/kernel", "norm/gamma", "norm/beta", "norm/moving_mean",
    "norm/moving_variance", "mine/0", "mine/1", "adam/0",
]  # fmt: skip


def test_layers_and_variables_have_their_names(weights):
    with open_source(weights) as source:
        assert source.kind == "keras"
        assert list(source.entries) == NAMES
        assert_close(source.entries["head/bias"].read(), np.arange(3.0))
        assert_close(source.entries["norm/moving_variance"].read(), np.full(2, 3.0))
        assert source.entries["adam/0"].note == "optimizer"


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_with_its_configuration(weights, tmp_path, packing):
    with zipfile.ZipFile(tmp_path / "net.keras", "w", packing) as archive:
        archive.write(weights, "model.weights.h5")
        archive.writestr("metadata.json", json.dumps({"keras_version": "3.15"}))
        archive.writestr("config.json", json.dumps({"class_name": "Functional"}))
    with open_source(tmp_path / "net.keras") as source:
        assert list(source.entries) == NAMES
        assert source.metadata["keras_version"] == "3.15"
        assert_close(source.entries["head/kernel"].read(), np.eye(3))


def test_names_of_layers_from_the_configuration_where_the_file_has_none(tmp_path):
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        for group in ("layers/dense", "layers/dense_1", "layers/sequential/layers/conv2d"):
            file.create_dataset(f"{group}/vars/0", data=np.ones(2))
    inner = {"class_name": "Conv2D", "config": {"name": "stem"}}
    layers = [
        {"class_name": "Dense", "config": {"name": "one"}},
        {"class_name": "Sequential", "config": {"name": "block", "layers": [inner]}},
        {"class_name": "Dense", "config": {"name": "two"}},
    ]
    with zipfile.ZipFile(tmp_path / "net.keras", "w") as archive:
        archive.write(tmp_path / "model.weights.h5", "model.weights.h5")
        archive.writestr("config.json", json.dumps({"config": {"layers": layers}}))
    with open_source(tmp_path / "net.keras") as source:
        assert list(source.entries) == ["one/kernel", "two/kernel", "block/stem/kernel"]


def test_the_older_file_lists_its_names(tmp_path):
    with h5py.File(tmp_path / "old.h5", "w") as file:
        file.attrs["model_config"] = json.dumps({"class_name": "Sequential"})
        file.attrs["keras_version"] = b"2.9"
        top = file.create_group("model_weights")
        top.attrs["layer_names"] = [b"zeta", b"alpha"]
        for layer in ("alpha", "zeta"):
            group = top.create_group(layer)
            names = [f"{layer}/kernel:0", f"{layer}/bias:0"]
            group.attrs["weight_names"] = np.array(names, dtype="S30")
            for name in reversed(names):
                group.create_dataset(name, data=np.ones(2))
        file.create_dataset("optimizer_weights/step", data=1)
    with open_source(tmp_path / "old.h5") as source:
        assert list(source.entries) == [
            "zeta/kernel", "zeta/bias", "alpha/kernel", "alpha/bias", "optimizer_weights/step",
        ]  # fmt: skip
        assert source.metadata == {"config": {"class_name": "Sequential"}, "keras_version": "2.9"}


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_every_dtype_and_layout(tmp_path, libver):
    large = np.random.default_rng(0).normal(size=(300, 70))
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        for name, array in ARRAYS.items():
            file.create_dataset(f"{array.ndim}/{name}", data=array)
        file["2/again"] = file["2/float32"]
        brain = file.create_dataset("brain", data=np.ones(2, "bfloat16").view("V2"))
        brain.attrs["dtype"] = "bfloat16"
        file.create_dataset("text", data="words")
        file.create_dataset("old brain", data=np.ones(2, "bfloat16").view("V2"))
        for number in range(100):
            file.create_dataset(f"many/{number}", data=number)
        options = {"chunks": (64, 32), "shuffle": True, "fletcher32": True}
        file.create_dataset("chunks", data=large, compression="gzip", **options)
    with open_source(tmp_path / "a.h5") as source:
        for name, array in ARRAYS.items():
            entry = source.entries[f"{array.ndim}/{name}"]
            assert (entry.shape, entry.dtype) == (array.shape, array.dtype.newbyteorder("="))
            assert_close(entry.read(), array, rtol=0)
        assert source.tied == {"2/float32": "2/again"}
        assert_close(source.entries["brain"].read(), np.ones(2))
        assert_close(source.entries["old brain"].read(), np.ones(2))
        assert "text" not in source.entries
        assert_close(source.entries["many/77"].read(), 77)
        assert_close(source.entries["chunks"].read(), large, rtol=0)
        part = (slice(60, 70), slice(30, 40))
        assert_close(source.entries["chunks"].read_part(part), large[part], rtol=0)


def test_bytes_without_a_type_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", data=np.ones(2, "float8_e4m3fn").view("V1"))
    with refused(UnsupportedDtypeError, "1 bytes of no type"):
        open_source(tmp_path / "a.h5")


def soft(file):
    file["a"] = h5py.SoftLink("/b")


def elsewhere(file):
    file["a"] = h5py.ExternalLink("/etc/hostname", "/")


def outside(file):
    file.create_dataset("a", (4,), "u1", external=[("/etc/hostname", 0, 4)])


def virtual(file):
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("/etc/hostname", "a", (4,))
    file.create_virtual_dataset("a", layout)


def unwritten(file):
    file.create_dataset("a", (1 << 40,), "f8")


def chunks_of_nothing(file):
    file.create_dataset("a", (1 << 30, 1 << 10), "f8", chunks=(1 << 10, 1 << 10))


HARMFUL = [soft, elsewhere, outside, virtual, unwritten, chunks_of_nothing]


@pytest.mark.parametrize("write", HARMFUL)
def test_nothing_from_elsewhere_and_nothing_that_was_not_written(tmp_path, write):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        write(file)
    with pytest.raises(WeightsFileError):
        with open_source(tmp_path / "a.h5") as source:
            source.entries["a"].read()


def test_cyclic_groups_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("group/a", data=1)
        file["group/group"] = file["group"]
        file["group/root"] = file["/"]
    with open_source(tmp_path / "a.h5") as source:
        assert list(source.entries) == ["group/a"]


def test_every_cut_is_noticed(weights):
    content = weights.read_bytes()
    for cut in range(9, len(content) - 1, len(content) // 50):
        weights.write_bytes(content[:cut])
        try:
            with open_source(weights) as source:
                for entry in source.entries.values():
                    entry.read()
            assert len(content) - cut < 4096  # room behind the last array
        except WeightsFileError:
            pass
