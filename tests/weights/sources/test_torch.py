"""PyTorch's files as a source: archives, the older format, TorchScript; and what would do harm."""

from __future__ import annotations

import os
import pickle
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from pax_export.errors import PaxError, UnsupportedDtypeError, WeightsFileError
from pax_export.weights import open_source
from pax_export.weights.sources import _mapping
from tests.closeness import assert_close
from tests.refusals import refused
from tests.weights.sources.torch_files import (
    Call,
    Made,
    Name,
    Persistent,
    pickled,
    state_dict,
    storage,
    tensor,
    write_legacy,
    write_zip,
)

ARRAYS = {
    "layer.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "transposed": np.arange(6, dtype=np.int64).reshape(2, 3).T,
    "layer.steps": np.array(7, np.int64),
    "none": np.zeros((0, 3), np.float16),
    "small": np.asarray(jnp.arange(5, dtype="bfloat16")),
    "flags": np.array([True, False]),
    "large": np.arange(1 << 19, dtype=np.float32).reshape(512, -1),
}


def bytes_of(arrays):
    return {str(key): array.T.tobytes() if name == "transposed" else array.tobytes()
            for key, (name, array) in enumerate(arrays.items())}  # fmt: skip


def check(source, arrays=ARRAYS):
    assert source.kind == "torch"
    assert list(source.entries) == list(arrays)
    for name, array in arrays.items():
        entry = source.entries[name]
        assert (entry.shape, entry.dtype) == (array.shape, array.dtype)
        assert_close(entry.read(), array, rtol=0)
        part = (slice(0, 1),) * array.ndim
        assert_close(entry.read_part(part), array[part], rtol=0)


def test_an_archive(tmp_path):
    path = write_zip(tmp_path / "a.pt", state_dict(ARRAYS), bytes_of(ARRAYS), byteorder=b"little")
    with open_source(path) as source:
        check(source)


def test_the_older_format(tmp_path):
    flat = {str(key): array.T if name == "transposed" else array
            for key, (name, array) in enumerate(ARRAYS.items())}  # fmt: skip
    path = write_legacy(tmp_path / "a.bin", state_dict(ARRAYS, legacy=True), flat)
    with open_source(path) as source:
        check(source)


def test_a_checkpoint_of_more_than_tensors(tmp_path):
    number = Call(
        "numpy._core.multiarray.scalar",
        (
            Call("numpy.dtype", ("f8", False, True)),
            Call("_codecs.encode", (np.float64(2.5).tobytes().decode("latin1"), "latin1")),
        ),
    )
    weights = state_dict({"w": np.ones((2, 3), np.float32)})
    tree = {
        "epoch": 3, "best": number, "path": "x", "state_dict": weights,
        "parameter": Call("torch._utils._rebuild_parameter", (weights["w"], True, {})),
        "optimizer": {"state": {0: {"step": 1}}, "param_groups": [{"lr": 0.5, "params": [0]}]},
        "size": Call("torch.Size", ([2, 3],)), "dtype": Name("torch.float32"),
        "device": Call("torch.device", ("cuda", 0)),
    }  # fmt: skip
    path = write_zip(tmp_path / "a.pt", tree, {"0": np.ones(6, np.float32).tobytes()})
    with open_source(path) as source:
        assert list(source.entries) == ["state_dict.w", "parameter"]
        assert source.tied == {"parameter": "state_dict.w"}
        assert (source.metadata["epoch"], source.metadata["best"]) == (3, 2.5)
        assert source.metadata["optimizer.param_groups.0.lr"] == 0.5


def test_windows_on_one_storage(tmp_path):
    """Halves of one array, its transpose, and one number shown many times."""
    of = storage("0", "float32", 12)
    tree = {
        "top": tensor(of, (2, 3), (3, 1)), "below": tensor(of, (2, 3), (3, 1), 6),
        "turned": tensor(of, (3, 4), (1, 3)), "again": tensor(of, (2, 3), (3, 1), 6),
        "expanded": tensor(of, (5, 2), (0, 1), 10),
    }  # fmt: skip
    all_of_it = np.arange(12, dtype=np.float32)
    with open_source(write_zip(tmp_path / "a.pt", tree, {"0": all_of_it.tobytes()})) as source:
        assert source.tied == {"again": "below"}
        assert_close(source.entries["below"].read(), all_of_it[6:].reshape(2, 3))
        assert_close(source.entries["turned"].read(), all_of_it.reshape(4, 3).T)
        assert_close(source.entries["expanded"].read(), np.tile(all_of_it[10:], (5, 1)))


def test_torchscript_classes_become_their_attributes(tmp_path):
    weights = state_dict({"w": np.ones((2, 3), np.float32)})
    inner = Made("__torch__.os.system", {"training": False, "weight": weights["w"]})
    sizes = Call("torch.jit._pickle.build_intlist", ([1, 2],))
    net = Made("__torch__.Net", {"inner": inner, "sizes": sizes})
    constants = pickled((tensor(storage("0", "float32", 2), (2,), (1,)),))
    path = write_zip(tmp_path / "a.jit", net, {"0": np.ones(6, np.float32).tobytes()}, root="Net",
                     constants_pkl=constants, **{"constants/0": bytes(8)})  # fmt: skip
    with open_source(path) as source:
        assert list(source.entries) == ["inner.weight", "CONSTANTS.c0"]
        assert_close(source.entries["CONSTANTS.c0"].read(), np.zeros(2))
        assert source.metadata["sizes.1"] == 2


def test_arrays_of_numpy_in_a_checkpoint(tmp_path):
    array = np.arange(6.0).reshape(2, 3)
    path = write_zip(tmp_path / "a.pt", pickle.dumps({"mean": array}, protocol=2), {})
    with open_source(path) as source:
        assert_close(source.entries["mean"].read(), array)


class Calls:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


HARMFUL = {
    "os.system": pickle.dumps({"a": Calls(os.system, "touch harm")}),
    "eval": pickle.dumps({"a": Calls(eval, "open('harm', 'w')")}),
    "exec": pickle.dumps(Calls(exec, "open('harm', 'w')"), protocol=0),
    "getattr": b"\x80\x04cbuiltins\ngetattr\n(cos\nsystem\nX\x01\x00\x00\x00atR.",
    "open": pickle.dumps(Calls(open, "harm", "w"), protocol=1),
    "INST": b"(S'touch harm'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'touch harm'\no.",
    "NEWOBJ": b"\x80\x02cos\nsystem\nX\x0a\x00\x00\x00touch harm\x85\x81.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0atouch harm\x85R.",
    "runpy": b"\x80\x02crunpy\nrun_path\nX\x04\x00\x00\x00harm\x85R.",
    "torch": b"\x80\x02ctorch.hub\nload\n(X\x01\x00\x00\x00at\x52.",
    "class": b"\x80\x02ctorchvision.models.resnet\nResNet\n)\x81}b.",
    "a dtype called": b"\x80\x02ctorch\nfloat32\n)R.",
    "extension": b"\x80\x02\x82\x01.",
    "a tensor's function": pickled(
        Call("torch._tensor._rebuild_from_type_v2", (Name("os.system"), Name("torch.Tensor"), ()))
    ),
}


@pytest.mark.parametrize("how", HARMFUL)
@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_in_a_pickle_is_called(tmp_path, monkeypatch, how, legacy):
    monkeypatch.chdir(tmp_path)
    path = write_zip(tmp_path / "a.pt", HARMFUL[how], {})
    if legacy:
        start = write_legacy(path, {}, {}).read_bytes()
        path.write_bytes(start.replace(pickled({}), HARMFUL[how]))
    with pytest.raises(WeightsFileError) as caught:
        open_source(path)
    assert not os.path.exists("harm")
    if how in ("os.system", "NEWOBJ", "STACK_GLOBAL"):
        assert str(caught.value.got) in ("posix.system", "os.system", "nt.system")
        assert "state_dict" in str(caught.value)


DAMAGED = {
    "no end": b"\x80\x02}",
    "nothing": b"",
    "no value": b"\x80\x02.",
    "no mark": b"\x80\x02t.",
    "a mark as a value": b"\x80\x02(.q\x00",
    "a memo that is not there": b"\x80\x02h\x05.",
    "a huge memo": b"\x80\x02Nr\xff\xff\xff\x7f0]r\xff\xff\xff\xffj\xff\xff\xff\x7fa.",
    "a lying length": b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b"a.",
    "a lying text": b"\x80\x02X\xff\xff\xff\xffabc.",
    "a number without end": b"\x80\x02\x8b\xff\xff\xff\x7f1.",
    "a list as a key": b"\x80\x02}]Ns.",
    "a deep tuple as a key": b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"Ns.",
    "a list that holds itself": b"\x80\x02]q\x00h\x00a.",
    "laughs": b"\x80\x02]" + b"q\x00](h\x00h\x00h\x00h\x00e" * 40 + b".",
    "deep": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a step of buffers": b"\x80\x05\x97.",
    "no pickle": b"{}",
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_pickle(tmp_path, how, monkeypatch):
    monkeypatch.setattr(_mapping, "_MOST", 50_000)
    path = write_zip(tmp_path / "a.pt", DAMAGED[how], {})
    try:
        with open_source(path) as source:
            assert not source.entries  # a huge number in a memo is no fault, and takes no room
    except WeightsFileError:
        pass
    else:
        assert how == "a huge memo"


FLOAT = storage("0", "float32", 4)
LYING = {
    "beyond": tensor(FLOAT, (5,), (1,)),
    "strides beyond": tensor(FLOAT, (2, 2), (3, 1)),
    "offset beyond": tensor(FLOAT, (2,), (1,), 3),
    "negative shape": tensor(FLOAT, (-1,), (1,)),
    "negative stride": tensor(FLOAT, (2,), (-1,)),
    "negative offset": tensor(FLOAT, (2,), (1,), -1),
    "expanded without end": tensor(FLOAT, (1 << 40, 1 << 10), (0, 0)),
    "a size that is a truth": tensor(FLOAT, (True,), (1,)),
    "two strides": tensor(FLOAT, (2,), (1, 1)),
    "another storage": tensor(storage("7", "float32", 4), (2,), (1,)),
    "outside": tensor(storage("../version", "float32", 4), (2,), (1,)),
    "a lying storage": tensor(storage("0", "float32", 1 << 60), (1 << 60,), (1,)),
    "no storage": Call("torch._utils._rebuild_tensor_v2", (1, 0, (2,), (1,), False, None)),
    "no kind": Persistent(("storage", 3, "0", "cpu", 4)),
    "no storage's id": Persistent(("module", 3, "0", "cpu", 4)),
    "many sizes": tensor(FLOAT, (1,) * 65, (1,) * 65),
}


@pytest.mark.parametrize("how", LYING)
def test_inconsistent_tensors_are_refused(tmp_path, how):
    path = write_zip(tmp_path / "a.pt", {"a": LYING[how]}, {"0": bytes(16)})
    with pytest.raises(WeightsFileError):
        open_source(path)


def test_other_contents_are_refused(tmp_path):
    (tmp_path / "a").write_bytes(pickle.dumps(Calls(os.system, "touch harm")))
    with pytest.raises(WeightsFileError):
        open_source(tmp_path / "a")
    path = write_zip(tmp_path / "a.pt", {}, {}, byteorder=b"big")
    with refused(UnsupportedDtypeError, got="a file of a big-endian machine"):
        open_source(path)
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("readme", b"")
    with pytest.raises(WeightsFileError):
        open_source(tmp_path / "b.zip")


def test_a_changed_number_is_noticed(tmp_path):
    path = write_zip(tmp_path / "a.pt", state_dict(ARRAYS), bytes_of(ARRAYS))
    content = bytearray(path.read_bytes())
    content[-200_000] ^= 4
    path.write_bytes(content)
    with open_source(path) as source:
        with refused(WeightsFileError, "checksum"):
            source.entries["large"].read()


def test_several_files_by_their_index(tmp_path):
    write_zip(tmp_path / "1.bin", state_dict({"a": np.ones(2)}), {"0": np.ones(2).tobytes()})
    write_zip(tmp_path / "2.bin", state_dict({"b": np.ones(3)}), {"0": np.ones(3).tobytes()})
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"b": "2.bin", "a": "1.bin"}}')
    with open_source(tmp_path) as source:
        assert (source.kind, list(source.entries)) == ("torch", ["b", "a"])
        assert_close(source.entries["b"].read(), np.ones(3))


def test_every_cut_of_both_formats(tmp_path):
    few = {"a": np.ones(3, np.float32)}
    for path in (
        write_zip(tmp_path / "a.pt", state_dict(few), {"0": few["a"].tobytes()}),
        write_legacy(tmp_path / "b.pt", state_dict(few, legacy=True), {"0": few["a"]}),
    ):
        content = path.read_bytes()
        for cut in range(0, len(content) - 1, 7):
            path.write_bytes(content[:cut])
            with pytest.raises(PaxError):
                open_source(path)
