"""Flax's msgpack files as a source."""

from __future__ import annotations

import flax.serialization
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest

from pax_export.errors import UnsupportedDtypeError, WeightsFileError
from pax_export.weights import open_source
from tests.closeness import assert_close
from tests.refusals import refused

TREE = {
    "params": {
        "Dense_0": {"kernel": jnp.ones((2, 3), jnp.bfloat16), "bias": np.arange(3.0)},
        "few": np.array([[1], [2]], np.int8),
    },
    "scalar": np.float32(3), "parts": [np.ones(1), 2], "step": -3, "rate": 2.5, "many": 300,
    "name": "net", "none": None, "complex": 1 + 2j, "yes": True,
}  # fmt: skip


def test_nested_dicts(tmp_path):
    (tmp_path / "a").write_bytes(flax.serialization.to_bytes(TREE))
    with open_source(tmp_path / "a") as source:
        assert source.kind == "flax"
        found = {name: (entry.shape, entry.dtype.name) for name, entry in source.entries.items()}
        assert found == {
            "params.Dense_0.kernel": ((2, 3), "bfloat16"), "params.few": ((2, 1), "int8"),
            "params.Dense_0.bias": ((3,), "float64"), "scalar": ((), "float32"),
            "parts.0": ((1,), "float64"),
        }  # fmt: skip
        assert_close(source.entries["params.Dense_0.bias"].read(), np.arange(3.0))
        assert_close(source.entries["params.few"].read_part((slice(1, 2), slice(1))), [[2]])
        assert source.metadata == {
            "parts.1": 2, "step": -3, "rate": 2.5, "many": 300, "name": "net", "complex": 1 + 2j,
            "yes": True,
        }  # fmt: skip


def test_a_large_array_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 1000)
    array = np.random.default_rng(0).normal(size=(30, 50)).astype(np.float32)
    (tmp_path / "a").write_bytes(flax.serialization.to_bytes({"a": array}))
    with open_source(tmp_path / "a") as source:
        assert_close(source.entries["a"].read(), array, rtol=0)
        assert_close(source.entries["a"].read_part((slice(3, 4),)), array[3:4], rtol=0)


def array(shape=(2,), dtype="float32", content=bytes(8), code=1):
    return msgpack.ExtType(code, msgpack.packb((shape, dtype, content)))


HUGE = 1 << 60
LYING = {
    "too few bytes": {"a": array((3,))},
    "huge": {"a": array((HUGE, HUGE))},
    "negative": {"a": array((-1, -2))},
    "a size that is a float": {"a": array((2.0,))},
    "no bytes": {"a": array((), content="text")},
    "another extension": {"a": array(code=42)},
    "parts of another size": {
        "a": {"__msgpack_chunked_array__": True, "shape": {"0": HUGE}, "chunks": {"0": array()}}
    },
    "no parts": {"a": {"__msgpack_chunked_array__": True, "shape": {"0": 0}, "chunks": {}}},
    "parts without a shape": {"a": {"__msgpack_chunked_array__": True}},
    "a part that is a number": {
        "a": {"__msgpack_chunked_array__": True, "shape": {"0": 2}, "chunks": {"0": 3}}
    },
    "one name twice": {"a": {"b": array()}, "a.b": array()},
}
RAW = {
    "a huge dict": b"\xdf\xff\xff\xff\xff\xa1a\x01",
    "a huge list": b"\x81\xa1a\xdd\xff\xff\xff\xff\x01",
    "a huge text": b"\x81\xa1a\xdb\xff\xff\xff\xffabc",
    "huge bytes": b"\x81\xa1a\xc6\xff\xff\xff\xffabc",
    "a huge extension": b"\x81\xa1a\xc9\xff\xff\xff\xff\x01abc",
    "deep": b"\x81\xa1a" + b"\x91" * 100_000 + b"\x01",
    "a list as a key": b"\x82\xa1a\x01\x90\x01",
    "a key twice": b"\x82\xa1a\x01\xa1a\x01",
    "no value": b"\x81\xa1a\xc1",
    "more behind": b"\x81\xa1a\x01\x01",
}


@pytest.mark.parametrize("how", [*LYING, *RAW])
def test_inconsistent_files_are_refused(tmp_path, how):
    (tmp_path / "a").write_bytes(RAW[how] if how in RAW else msgpack.packb(LYING[how]))
    with pytest.raises(WeightsFileError):
        open_source(tmp_path / "a")


def test_a_dtype_that_nothing_here_has(tmp_path):
    (tmp_path / "a").write_bytes(msgpack.packb({"a": array(dtype="object")}))
    with refused(UnsupportedDtypeError, got="'object'"):
        open_source(tmp_path / "a")


def test_every_cut_is_noticed(tmp_path):
    content = flax.serialization.to_bytes(TREE)
    for cut in range(len(content)):
        (tmp_path / "a").write_bytes(content[:cut])
        with pytest.raises(WeightsFileError):
            open_source(tmp_path / "a")
