"""A user's layer gets from its declaration what layers of the library get."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
import safetensors

import pax_export as pax
from pax_export.precision import policy_of
from tests.closeness import assert_close
from tests.own_layers import rows
from tests.own_layers import scaled_normal as fan_in
from tests.refusals import refused

ROWS = pytest.mark.parametrize("name", ["Bilinear", "LowRank", "MaskedConv"])


@ROWS
def test_new_initial_values(name):
    layer, x = rows()[name]
    new = layer.at(list(dict(layer.arrays))).init(jax.random.key(1))
    for own in layer.arrays:
        assert getattr(new, own).shape == getattr(layer, own).shape
    assert abs(new(x) - layer(x)).max() > 1e-3


@ROWS
@pytest.mark.parametrize("dora", [False, True])
def test_adapters(name, dora, tmp_path):
    layer, x = rows()[name]
    net = pax.Sequential(pax.Identity(), layer).eval()
    adapted = pax.adapters.add(net, "modules.1", rank=2, dora=dora)
    assert_close(adapted(x), net(x))
    optimizer = pax.optim.from_optax(optax.sgd(0.1))(adapted.parameters())

    def loss_fn(net, x):
        net, y = net % x
        loss = (y - 1).var()
        return loss, (loss, net)

    step = jax.jit(pax.build_update_fn(loss_fn))
    losses = []
    for _ in range(5):
        adapted, optimizer, loss = step(adapted, optimizer, x)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    merged = pax.adapters.merge(adapted)
    assert jax.tree.structure(merged) == jax.tree.structure(net)
    assert abs(merged(x) - net(x)).max() > 1e-4
    assert_close(merged(x), adapted(x), atol=1e-4)
    pax.adapters.save(adapted, tmp_path / "adapters")
    loaded = pax.adapters.load(net, tmp_path / "adapters")
    assert_close(loaded(x), adapted(x))
    assert jax.tree.structure(loaded) == jax.tree.structure(adapted)


def test_each_kernel_of_a_layer_has_an_adapter(tmp_path):
    """With the names of torch's modules, and the sharding of its array."""
    layer, x = rows()["LowRank"]
    adapted = pax.adapters.add(pax.Sequential(layer), "modules.0", rank=4)
    own = adapted.modules[0].adapters["default"]
    assert {name: each.lora_a.shape for name, each in own.items()} == {
        "down": (64, 4), "up": (32, 4)
    }  # fmt: skip
    turned = adapted.at("modules.0.adapters.default.down.lora_b").map(jnp.ones_like)
    assert abs(turned(x) - adapted(x)).max() > 1e-3
    mesh = pax.sharding.abstract_mesh(model=4)
    table = pax.sharding.table(adapted, mesh, pax.sharding.tensor_parallel())
    assert table["modules.0.adapters.default.up.lora_b"].shard_shape == (4, 2)
    assert not table.unmatched
    pax.adapters.save(adapted, tmp_path / "adapters", rename={"modules.0.down": "body.fc1"})
    with safetensors.safe_open(tmp_path / "adapters/adapter_model.safetensors", "np") as file:
        names = {name.removeprefix("base_model.model.") for name in file.keys()}  # noqa: SIM118
    paths = ("body.fc1", "modules.0.up")
    assert names == {f"{path}.lora_{part}.weight" for path in paths for part in "AB"}
    smaller = pax.adapters.remove(pax.adapters.add(adapted, "modules.0", 2, name="b"), "default")
    assert pax.adapters.names(smaller) == ["b"]
    with pytest.raises(pax.errors.InvalidArgumentError, match="one kernel"):
        pax.adapters.lora(layer, 2, dropout=0.5)(x)


@ROWS
def test_the_default_policy(name):
    layer, _ = rows()[name]
    policy = policy_of(pax.experimental.default_mp_policy(layer))
    assert policy == jmp.Policy(jnp.float32, jmp.half_dtype(), jnp.float32)


@ROWS
def test_tensor_parallel_and_fully_sharded_know_every_kernel(name):
    layer, _ = rows()[name]
    mesh = pax.sharding.abstract_mesh(model=4)
    table = pax.sharding.table(layer, mesh, pax.sharding.tensor_parallel())
    kernels = [own for own, each in layer.arrays.items() if "out" in each.axes]
    for own in kernels:
        array = getattr(layer, own)
        assert table[own].shard_shape == (*array.shape[:-1], array.shape[-1] // 4)
    assert not {*layer.arrays} & set(table.unmatched)


def torch_arrays(name, layer):
    """The arrays as modules of torch have them: Bilinear, two Linear, Conv2d."""
    arrays = {own: np.asarray(getattr(layer, own)) for own in layer.arrays}
    if name == "LowRank":
        return {f"{own}.weight": np.ascontiguousarray(array.T) for own, array in arrays.items()}
    order = (2, 0, 1) if name == "Bilinear" else (3, 2, 0, 1)
    return arrays | {"weight": np.ascontiguousarray(arrays["weight"].transpose(order))}


@ROWS
def test_weights_of_torch(name, tmp_path):
    from safetensors.numpy import save_file

    trained, x = rows()[name]
    net = pax.Sequential(pax.Linear(3, 3), trained)
    file = {f"body.{path}": array for path, array in torch_arrays(name, trained).items()}
    file |= {"head.weight": np.asarray(net.modules[0].weight).T.copy()}
    file |= {"head.bias": np.asarray(net.modules[0].bias)}
    save_file(file, tmp_path / "torch.safetensors", {"format": "pt"})

    class Net(pax.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body = pax.Linear(3, 3), rows()[name][0]

    fresh = Net()
    fresh = fresh.replace(body=fresh.body.at(list(trained.arrays)).init(jax.random.key(7)))
    keep = ["body.mask"] if name == "MaskedConv" else []  # a constant of the class
    adopted, _ = pax.weights.adopt(fresh, tmp_path / "torch.safetensors", keep=keep)
    assert_close(adopted.body(x), trained(x))


def test_the_library_names_layers_in_two_rooms_only():
    """Outside of nn and nets, arrays are treated by their declarations."""
    import ast
    from pathlib import Path

    layers = {name for name in pax.nn.__all__ if isinstance(getattr(pax.nn, name), type)}
    layers -= {"Lambda", "Identity", "Sequential"}  # they have no arrays
    package = Path(pax.__file__).parent
    found = []
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0]
        if room in ("nn", "nets", "__init__.py"):
            continue
        tree = list(ast.walk(ast.parse(path.read_text())))
        made = [node.func for node in tree if isinstance(node, ast.Call)]  # a layer of a layer
        for node in [node for node in tree if not any(node is each for each in made)]:
            name = getattr(node, "id", getattr(node, "attr", None))
            if isinstance(node, (ast.Name, ast.Attribute)) and name in layers:
                found.append(f"{path.relative_to(package)}:{node.lineno} {name}")
    assert found == []


def test_inspect_shows_declarations_and_their_absence():
    class Silent(pax.ParameterModule):
        def __init__(self):
            super().__init__()
            self.own, self.low_rank = jnp.ones(2), rows()["LowRank"][0]

    table = pax.inspect(Silent())
    assert table["low_rank.up"].declared == "kernel [rank, out]"
    assert (table[""].declared, table["low_rank"].declared) == ("no declaration", "")
    assert "no declaration" in str(table) and "declar" not in str(pax.inspect(pax.Linear(2, 3)))


@ROWS
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_have_the_same_integers_in_files(name, bits, tmp_path):
    layer, x = rows()[name]
    small, report = pax.quantize(pax.Sequential(layer).eval(), bits=bits)
    kernels = [own for own, each in layer.arrays.items() if each.role == "kernel"]
    assert {leaf.name for leaf in report.leaves} == {f"modules.0.{own}" for own in kernels}
    assert_close(small(x), layer(x), atol=0.3 if bits == 8 else 3.0)
    for to, end in ((pax.export.to_onnx, "onnx"), (pax.export.to_tflite, "tflite")):
        path = tmp_path / f"net.{end}"
        done = to(small, path, x, accuracy_level=1)
        # In TFLite, blocks of scales are those of matrices and convolutions, and a product with a
        # constant is computed ahead: there two of them are in float32, and the report lists them.
        in_float = {("Bilinear", 4), ("MaskedConv", 8), ("MaskedConv", 4)}
        if end == "onnx" or (name, bits) not in in_float:
            assert f"{len(kernels)} weights in int{bits}, the integers of the model" in str(done)
        assert_close(pax.export.load(path)(x), small(x), atol=1e-4)


class Turned(pax.ParameterModule):
    """A dense layer that keeps its kernel as torch does."""

    arrays = {"weight": pax.Declared("kernel", ("out", "in"), init=fan_in)}

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = fan_in(self)(pax.next_rng_key(), (outputs, inputs))

    def __call__(self, x):
        return x @ self.weight.T


@pytest.mark.parametrize("sizes", [(5, 3), (4, 4)])
@pytest.mark.parametrize("origin", ["torch", "keras", "flax", "mlx"])
def test_a_kernel_with_outputs_first_is_adopted_by_its_declaration(sizes, origin):
    layer = Turned(*sizes)
    matrix = np.random.default_rng(0).standard_normal(sizes).astype("float32")  # in x out
    file = {"weight": matrix.T} if origin in ("torch", "mlx") else {"kernel": matrix}
    new, _ = pax.weights.adopt(layer, file, origin=origin)
    assert_close(new.weight, matrix.T)


def test_a_role_that_does_not_exist_is_refused():
    with refused(pax.errors.InvalidArgumentError, where="Declared.role", got="'weight'"):
        pax.Declared("weight", ("in", "out"))


class TurnedConv(pax.ParameterModule):
    """A convolution that keeps its outputs before its inputs, as a transposed one does."""

    arrays = {"weight": pax.Declared("kernel", ("height", "width", "out", "in"), init=fan_in)}

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = fan_in(self)(pax.next_rng_key(), (3, 2, outputs, inputs))

    def __call__(self, x):
        numbers = ("NHWC", "HWOI", "NHWC")
        return jax.lax.conv_general_dilated(
            x, self.weight, (1, 1), "SAME", dimension_numbers=numbers
        )


@pytest.mark.parametrize("sizes", [(5, 3), (4, 4)])
@pytest.mark.parametrize("origin", ["torch", "keras"])
def test_only_a_kernel_declared_as_transposed_is_adopted_as_one(sizes, origin):
    inputs, outputs = sizes
    layer = TurnedConv(inputs, outputs)
    kernel = np.random.default_rng(0).standard_normal((3, 2, *sizes)).astype("float32")  # HWIO
    file = {"weight": kernel.transpose(3, 2, 0, 1)} if origin == "torch" else {"kernel": kernel}
    new, _ = pax.weights.adopt(layer, file, origin=origin)
    assert_close(new.weight, kernel.swapaxes(2, 3))
    x = np.ones((1, 4, 4, inputs), "float32")
    numbers = ("NHWC", "HWIO", "NHWC")
    assert_close(
        new(x),
        jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers),
        atol=1e-5,
    )


def test_a_transposed_kernel_ends_with_outputs_and_inputs():
    axes = "('height', 'width', 'in', 'out')"
    with refused(pax.errors.InvalidArgumentError, where="Declared.axes", got=axes):
        pax.Declared("kernel", ("height", "width", "in", "out"), transposed=True)


@pytest.mark.parametrize("name", ["wieght", "inner.wieght"])
def test_a_declared_array_that_the_layer_lacks_is_refused(name):
    class Misspelled(pax.ParameterModule):
        arrays = {name: pax.Declared("kernel", ("in", "out"))}

        def __init__(self):
            super().__init__()
            self.inner = pax.Linear(2, 3)

    with refused(
        pax.errors.InvalidArgumentError,
        where=f"{Misspelled.__qualname__}.arrays[{name!r}]",
        got="no attribute 'wieght' after the constructor",
    ):
        Misspelled()


def test_a_declared_array_may_be_left_out_as_none():
    class Optional(pax.ParameterModule):
        arrays = {
            "bias": pax.Declared("bias", ("out",)), "inner.bias": pax.Declared("bias", ("out",))
        }  # fmt: skip

        def __init__(self):
            super().__init__()
            self.bias = self.inner = None

    assert Optional().bias is None
