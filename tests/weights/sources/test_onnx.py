"""ONNX models as a source: initialisers, constants, branches, files beside the model."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pax_export.errors import MissingWeightsFileError, UnsupportedDtypeError, WeightsFileError
from pax_export.weights import open_source
from tests.closeness import assert_close
from tests.refusals import refused

KERNEL = np.arange(12, dtype=np.float32).reshape(3, 4)
KINDS = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "int32",
         "int64", "uint32", "uint64", "bool", "complex64", "float8_e4m3fn", "int4", "uint4",
         "float4_e2m1fn"]  # fmt: skip


def graph(name, nodes=(), tensors=()):
    return helper.make_graph(list(nodes), name, [], [], initializer=list(tensors))


def saved(path, *tensors, nodes=(), **options):
    model = helper.make_model(graph("g", nodes, tensors))
    if options:
        onnx.save(model, path, **options)
    else:
        path.write_bytes(model.SerializeToString())
    return path


def constant(output, value):
    return helper.make_node("Constant", [], [output], value=numpy_helper.from_array(value))


@pytest.mark.parametrize("raw", [True, False])
def test_every_dtype(tmp_path, raw):
    arrays = {kind: np.array([0, 1, 1, 0, 1]).astype(kind) for kind in KINDS}
    tensors = []
    for kind, array in arrays.items():
        code = helper.np_dtype_to_tensor_dtype(array.dtype)
        if raw or "4" in (kind[-1], kind[5:6]):
            tensors.append(numpy_helper.from_array(array, kind))
        else:
            tensors.append(helper.make_tensor(kind, code, array.shape, array.tolist()))
    with open_source(saved(tmp_path / "a", *tensors)) as source:
        assert source.kind == "onnx"
        for kind, array in arrays.items():
            entry = source.entries[kind]
            assert (entry.dtype.name, entry.shape) == (kind, (5,))
            wide = complex if kind == "complex64" else np.float64
            assert_close(entry.read().astype(wide), array.astype(wide))
            assert entry.read_part((slice(1, 2),)).shape == (1,)


def test_constants_branches_and_who_uses_what(tmp_path):
    then, other = (
        graph(name, [constant("inner", np.full(3, value))])
        for name, value in (("then", 1.0), ("other", 2.0))
    )
    nodes = [
        constant("outer", KERNEL),
        helper.make_node("Constant", [], ["list"], value_floats=[1.5, 2.5]),
        helper.make_node("Constant", [], ["one"], value_int=-3),
        helper.make_node("Constant", [], ["text"], value_string="words"),
        helper.make_node("Gemm", ["x", "w"], ["y"], "dense", transB=1),
        helper.make_node("If", ["c"], ["z"], "choice", then_branch=then, else_branch=other),
    ]
    path = saved(tmp_path / "a.onnx", numpy_helper.from_array(KERNEL, "w"), nodes=nodes)
    with open_source(path) as source:
        expected = {
            "outer": KERNEL, "list": [1.5, 2.5], "one": -3, "w": KERNEL,
            "inner": np.ones(3), "choice/then_branch/inner": np.full(3, 2.0),
        }  # fmt: skip
        found = {name: entry.read() for name, entry in source.entries.items()}
        clash = {"choice/else_branch/inner", "choice/then_branch/inner"} & found.keys()
        assert len(clash) == 1
        swapped = min(clash).startswith("choice/else")
        if not swapped:
            expected["inner"] = np.full(3, 2.0)
            expected["choice/then_branch/inner"] = np.ones(3)
        else:
            expected["choice/else_branch/inner"] = expected.pop("choice/then_branch/inner")
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            assert_close(found[name], array)
        assert source.entries["outer"].note == "Constant"
        assert source.metadata["used_by"]["w"] == [("Gemm", 1, "dense")]


def test_external_data(tmp_path):
    large = np.arange(1 << 19, dtype=np.float32)
    path = saved(
        tmp_path / "a.onnx", numpy_helper.from_array(large, "large"),
        numpy_helper.from_array(KERNEL, "kernel"), save_as_external_data=True,
        location="weights.bin", size_threshold=0,
    )  # fmt: skip
    with open_source(path) as source:
        assert_close(source.entries["large"].read(), large, rtol=0)
        assert_close(source.entries["kernel"].read_part((slice(1, 2),)), KERNEL[1:2])
    (tmp_path / "weights.bin").unlink()
    with refused(MissingWeightsFileError, "weights.bin"):
        open_source(path)


def external(location, shape=(2,), **others):
    tensor = TensorProto(name="a", data_type=1, dims=shape, data_location=1)
    for key, value in {"location": location, **others}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


@pytest.mark.parametrize(
    "location", ["../secret", "/etc/hostname", "a/../../secret", "", "link", "a\\b", "a\0"]
)
def test_only_files_below_the_folder_of_the_model(tmp_path, location):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(8))
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(WeightsFileError) as caught:
        open_source(saved(folder / "a.onnx", external(location)))
    assert not isinstance(caught.value, MissingWeightsFileError)


@pytest.mark.parametrize(
    "tensor",
    [
        external("a.bin", offset="4"),
        external("a.bin", offset="-4"),
        external("a.bin", offset="x"),
        external("a.bin", length="9"),
        external("a.bin", shape=(1 << 60,)),
        external("a.onnx"),
        TensorProto(name="a", data_type=1, dims=(-1,), raw_data=bytes(4)),
        TensorProto(name="a", data_type=1, dims=(3,), raw_data=bytes(4)),
        TensorProto(name="a", data_type=1, dims=(1 << 62,), float_data=[1.0]),
        TensorProto(name="a", data_type=7, dims=(2,), int64_data=[1]),
        TensorProto(name="a", data_type=1, dims=(1,) * 70, raw_data=bytes(4)),
        TensorProto(name="a", data_type=1, dims=(1,), raw_data=bytes(4), data_location=1),
    ],
)
def test_inconsistent_tensors_are_refused(tmp_path, tensor):
    (tmp_path / "a.bin").write_bytes(bytes(8))
    path = saved(tmp_path / "a.onnx", tensor)
    if tensor.external_data and tensor.external_data[0].value == "a.onnx":
        with open_source(path) as source:  # the model itself lies in its folder: harmless
            source.entries["a"].read()
        return
    with pytest.raises(WeightsFileError):
        open_source(path)


def test_a_dtype_that_nothing_here_has(tmp_path):
    with refused(UnsupportedDtypeError, got="the dtype 99 of ONNX"):
        open_source(saved(tmp_path / "a", TensorProto(name="a", data_type=99, dims=(1,))))


def test_two_arrays_of_one_name(tmp_path):
    twice = numpy_helper.from_array(KERNEL, "a")
    with refused(WeightsFileError, got="ValueError: two arrays with the name 'a'"):
        open_source(saved(tmp_path / "a", twice, twice))


def field(number, content):
    size, parts = len(content), [number << 3 | 2]
    while size > 127:
        parts.append(size & 127 | 128)
        size >>= 7
    return bytes([*parts, size]) + content


def test_graphs_in_graphs_without_end(tmp_path):
    inner = b""
    for _ in range(40):
        inner = field(1, field(5, field(1, b"then_branch") + field(6, inner)))
    (tmp_path / "a.onnx").write_bytes(b"\x08\x09" + field(7, inner))
    with refused(WeightsFileError, got="ValueError: graphs in graphs without end"):
        open_source(tmp_path / "a.onnx")


def test_every_cut_is_noticed(tmp_path):
    path = saved(tmp_path / "a.onnx", numpy_helper.from_array(KERNEL, "a"))
    content = path.read_bytes()
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        try:
            with open_source(path) as source:
                assert not source.entries or cut > content.rindex(KERNEL.tobytes())
        except WeightsFileError:
            pass


def test_names_without_end(tmp_path):
    """Each array of a branch is named after what it stands in, where its own name is taken."""
    constants = b"".join(
        field(1, field(2, b"c%d" % at) + field(4, b"Constant") + field(5, value))
        for at in range(100)
        for value in [field(1, b"value") + field(5, b"\x10\x01\x08\x00" + field(9, b""))]
    )
    inner = constants
    for _ in range(4):
        inner = field(1, field(3, b"n" * 200_000) + field(5, field(1, b"then") + field(6, inner)))
    (tmp_path / "a.onnx").write_bytes(b"\x08\x09" + field(7, constants + inner))
    with refused(WeightsFileError, got="ValueError: names without end"):
        open_source(tmp_path / "a.onnx")
