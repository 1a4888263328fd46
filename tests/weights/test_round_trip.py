"""What is saved is what is loaded: every kind of module, leaf, dtype and place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pax_export as pax
from tests.processes import printed
from tests.refusals import refused
from tests.weights.models import NAMES, Everything, equal


def round_trip(tree, path, into=None):
    pax.save_weights(tree, path)
    return pax.load_weights(tree if into is None else into, path)


def test_module(tmp_path):
    path = tmp_path / "model.safetensors"
    module, other = Everything(), Everything(start=5.0)
    assert not equal(module, other)
    loaded = round_trip(module, path, into=other)
    assert equal(loaded, module)
    assert set(safetensors.numpy.load_file(path)) == NAMES
    assert other.table[0, 0] == 5.0


def test_mode_and_static_data_are_those_of_the_target(tmp_path):
    loaded = round_trip(Everything(), tmp_path / "model", into=Everything().eval())
    assert not loaded.training and loaded.mixed[1] == "text"


def test_model_and_optimizer_in_one_file(tmp_path):
    optax = pytest.importorskip("optax")
    model = pax.Linear(2, 3)
    both = {"model": model, "optimizer": pax.optim.from_optax(optax.adam(0.1))(model.parameters())}
    assert equal(round_trip(both, tmp_path / "both"), both)


def test_other_programs_read_it_without_jax(tmp_path):
    path = tmp_path / "model.safetensors"
    pax.save_weights(Everything(), path)
    code = f"""
import sys, safetensors.numpy
arrays = safetensors.numpy.load_file({str(path)!r})
print(*sorted(arrays))
print(arrays["net.modules.0.weight"].shape, arrays["key"].dtype, arrays["parts.a.0"])
assert not {{"jax", "pax_export"}} & set(sys.modules)
"""
    names, facts = printed(code).splitlines()
    assert names.split() == sorted(NAMES)
    assert facts == "(2, 3) uint32 2.0"


def test_files_of_other_programs_are_read(tmp_path):
    path = tmp_path / "foreign.safetensors"
    arrays = {"weight": np.ones((2, 3), "f"), "bias": np.arange(3, dtype="f")}
    safetensors.numpy.save_file(arrays, path, metadata={"format": "np"})
    loaded = pax.load_weights(pax.Linear(2, 3), path)
    assert loaded.bias.tolist() == [0, 1, 2]


DTYPES = """bool int2 int4 int8 int16 int32 uint2 uint4 uint8 uint16 uint32 float16 bfloat16
    float32 complex64 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz
    float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn"""


@pytest.mark.parametrize("dtype", DTYPES.split())
def test_dtypes_of_jax(dtype, tmp_path):
    values = np.array([0, 1, 1, 1, 0, 1]).astype(jnp.dtype(dtype))
    shapes = ((2, 3), (6,), (1, 6, 1))
    tree = [jnp.asarray(values.reshape(shape)) for shape in shapes]
    tree += [jnp.asarray(values[:0].reshape(2, 0)), jnp.asarray(values[1])]
    assert equal(round_trip(tree, tmp_path / "x"), tree)


@pytest.mark.parametrize(
    "array",
    [
        np.full((), 0.1),
        np.arange(6).reshape(2, 3).T,
        np.arange(6.0)[::-2],
        np.zeros((0, 4)),
        np.full((), 2j),
        np.array([[1 + 2j], [3 - 4j]]),
        np.arange(3, dtype=">i4"),
        np.array([-8, 7], jnp.int4),
        np.array(2**63, "uint64"),
    ],
    ids=repr,
)
def test_numpy_arrays(array, tmp_path):
    loaded = round_trip({"x": array}, tmp_path / "x")["x"]
    assert equal(loaded, array)
    loaded[...] = 0  # it is the caller's own


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys(impl, tmp_path):
    key = jax.random.key(7, impl=impl)
    tree = {"one": key, "many": jax.random.split(key, (2, 3)), "legacy": jax.random.PRNGKey(1)}
    loaded = round_trip(tree, tmp_path / "keys", into=jax.eval_shape(lambda: tree))
    assert equal(loaded, tree)
    assert jax.random.normal(loaded["one"]) == jax.random.normal(key)


def test_wide_numbers_need_x64(tmp_path):
    path = tmp_path / "wide"
    with jax.enable_x64(True):
        tree = {"x": jnp.full(2, 0.1, jnp.float64)}
        assert equal(round_trip(tree, path), tree)
        shapes = jax.eval_shape(lambda: tree)
    with refused(TypeError, where="x", got="float64"):
        pax.load_weights(shapes, path)


def test_a_module_that_was_never_initialised(tmp_path):
    """Arrays of numpy were shapes as well, and come back as arrays of jax."""
    shapes = jax.eval_shape(Everything)
    loaded = round_trip(Everything(), tmp_path / "all", into=shapes)
    assert jax.tree.structure(loaded) == jax.tree.structure(shapes)
    assert isinstance(loaded.table, jax.Array)
    path = tmp_path / "model"
    module = pax.Sequential(pax.Linear(2, 3), jax.nn.relu, pax.BatchNorm1D(3))
    pax.save_weights(module, path)
    loaded = pax.load_weights(jax.eval_shape(module.copy), path)
    assert equal(loaded, module)
    assert loaded.eval()(jnp.ones((4, 5, 2))).shape == (4, 5, 3)


def test_sharded_arrays_stay_where_they_were(tmp_path):
    """In a process of its own, which has four devices."""
    code = f"""
import jax, jax.numpy as jnp, numpy as np, pax_export as pax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
place = lambda x, *names: jax.device_put(x, NamedSharding(mesh, P(*names)))
tree = {{
    "split": place(jnp.arange(32.0).reshape(4, 8), "a", "b"),
    "half": place(jnp.arange(8, dtype=jnp.int4), "b"),
    "same": place(jnp.arange(3.0)),
    "keys": place(jax.random.split(jax.random.key(0), 4), "a"),
    "second": jax.device_put(jnp.ones(2), jax.devices()[1]),
}}
pax.save_weights(tree, {str(tmp_path / "x")!r})
shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
for target in (tree, shapes):
    loaded = pax.load_weights(target, {str(tmp_path / "x")!r})
    for name, array in tree.items():
        assert loaded[name].sharding == array.sharding, name
        assert (loaded[name] == array).all() and loaded[name].dtype == array.dtype, name
print("equal")
data = bytearray(open({str(tmp_path / "x")!r}, "rb").read())
data[data.index(np.float32(31).tobytes())] ^= 1
open({str(tmp_path / "x")!r}, "wb").write(data)
try:
    pax.load_weights(tree, {str(tmp_path / "x")!r})
except OSError as error:
    print(error.where.split()[0], error.got)
"""
    variables = {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    expected = "equal\nsplit its numbers differ from their checksum\n"
    assert printed(code, env=variables) == expected


def test_arrays_that_jax_may_place_stay_uncommitted(tmp_path):
    loaded = round_trip(pax.Linear(1, 1), tmp_path / "x")
    assert not loaded.weight.committed
    device = jax.devices()[0]
    mesh = NamedSharding(Mesh(np.array([device]), ("a",)), PartitionSpec())
    tree = {"x": jax.device_put(jnp.ones(2), mesh)}
    assert round_trip(tree, tmp_path / "y")["x"].sharding == mesh


def test_a_loaded_array_does_not_depend_on_the_file(tmp_path):
    path = tmp_path / "x"
    tree = {"a": jnp.arange(4096.0), "b": np.arange(3)}
    loaded = round_trip(tree, path)
    path.write_bytes(bytes(path.stat().st_size))
    assert equal(loaded, tree)
