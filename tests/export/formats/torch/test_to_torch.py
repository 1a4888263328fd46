"""Models through `to_torch` and `as_torch`, run by torch where it is installed.

Without torch (`tox -e torch` has it) what does not need it is tested: errors, and the table of
rules.
"""

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export import errors
from pax_export.export import as_torch, load, spec, to_torch
from pax_export.export.formats.torch import rules
from pax_export.export.formats.torch.values import RULES
from tests.closeness import assert_close
from tests.export.targets import TARGETS, mlp
from tests.processes import printed

HAS_TORCH = importlib.util.find_spec("torch") is not None
with_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")


def random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


# --- without torch ----------------------------------------------------------


@pytest.mark.skipif(HAS_TORCH, reason="torch is installed")
@pytest.mark.parametrize("write", [to_torch, as_torch])
def test_without_torch_the_extra_is_named(write, tmp_path):
    path = [tmp_path / "net.pt2"] if write is to_torch else []
    with pytest.raises(errors.MissingPackageError, match=r"the extra \[torch\]"):
        write(mlp(), *path, spec("batch, 3"))


def test_there_is_a_rule_for_what_onnx_has_one_for():
    pytest.importorskip("onnx")
    from pax_export.export.formats.onnx import rules as onnx_rules
    from pax_export.export.formats.onnx.graph import RULES as ONNX_RULES

    ONNX_RULES.load(onnx_rules)
    RULES.load(rules)
    # What these are made of has rules.
    composed = "cached_attention clip hard_sigmoid hard_swish rotary"
    quantized = "dequantize quantized_dot quantized_rows round_inputs round_rows"
    assert ONNX_RULES.keys() - RULES.keys() <= {*composed.split(), *quantized.split()}


def test_rules_do_not_import_torch():
    code = "import sys; sys.modules['torch'] = None; import pax_export.export.formats.torch.export"
    code += "; from pax_export.export.formats.torch import rules, values; values.RULES.load(rules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- with torch -------------------------------------------------------------


@with_torch
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_models_run_in_torch_with_any_batch(target, tmp_path):
    target.check(to_torch, tmp_path / "model.pt2")


@with_torch
def test_torch_alone_loads_and_trains_it(tmp_path):
    import torch

    path, net = tmp_path / "net.pt2", mlp()
    report = to_torch(net, path, spec("batch, 3"), validate="process")
    assert report.validated == "process"
    module = torch.export.load(path).module()
    assert_close(module(torch.ones(4, 3)).detach().numpy(), net(jnp.ones((4, 3))), rtol=1e-5)
    names = [name for name, each in module.named_parameters() if each.requires_grad]
    assert sorted(names) == [f"modules_.{n}.{kind}" for n in (0, 2) for kind in ("bias", "weight")]


@with_torch
def test_a_module_has_the_leaves_and_the_gradients():
    import torch

    class Net(pax.Module):
        def __init__(self):
            super().__init__()
            self.encoder = pax.Linear(3, 4)
            self.head = pax.Linear(4, 2)

        def __call__(self, x):
            return self.head(jax.nn.relu(self.encoder(x)))

    net = Net()
    module = as_torch(net, spec("batch, 3"))
    assert sorted(module.state_dict()) == [
        "encoder.bias", "encoder.weight", "head.bias", "head.weight",
    ]  # fmt: skip
    assert "(encoder): TorchPart(weight=float32[3, 4], bias=float32[4])" in repr(module)
    x = random(5, 3)
    x[0] = 0  # where `relu` has a derivative of its own
    slopes = jax.grad(lambda net: (net(x) ** 2).sum())(net)
    (module(torch.from_numpy(x)) ** 2).sum().backward()
    assert_close(module.encoder.weight.grad.numpy(), slopes.encoder.weight, rtol=1e-5, atol=1e-6)
    other = as_torch(Net(), spec("batch, 3"), validate=False)
    other.load_state_dict(module.state_dict())
    given = torch.from_numpy(x)
    assert torch.equal(other(given), module(given))
    assert module.to(torch.float64)(given.double()).dtype == torch.float64


@with_torch
def test_scales_and_biases_join_what_torch_has_whole():
    class Net(pax.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = pax.Conv2D(2, 4, 3, padding="SAME"), pax.BatchNorm2D(4)
            self.head, self.bias = pax.Linear(4, 6, with_bias=False), jnp.arange(3.0)

        def __call__(self, x):
            x = jax.nn.relu(self.norm(self.conv(x)))
            return self.head(x).reshape(-1, 2, 3) + self.bias  # no bias of the product's columns

    net = jax.jit(pax.purecall)(Net(), random(8, 5, 5, 2))[0]
    module = as_torch(net, spec("batch, 5, 5, 2"))  # outputs and gradients are compared
    calls = module.code()
    assert calls.count("batch_norm(") == 1 and "addmm" not in calls
    assert len(re.findall(r"clip_between\(\w+, \(0\.0, None\), \(None, None\)\)", calls)) == 1
    assert as_torch(mlp(), spec("batch, 3")).code().count("addmm(") == 2
    # A convolution reads its kernel as it lies in memory.
    assert module.conv.weight.shape == (3, 3, 2, 4)
    assert module.conv.weight.permute(3, 0, 1, 2).is_contiguous()


@with_torch
def test_a_derivative_of_its_own_is_kept(tmp_path):
    import torch

    @jax.custom_vjp
    def straight(x):
        return jnp.round(x)

    straight.defvjp(lambda x: (straight(x), None), lambda _, g: (2.0 * g,))

    def model(params, x):
        return straight(params["w"] * x)

    params = {"w": jnp.ones(3)}
    module = as_torch((params, model), spec("n, 3"))
    x = torch.ones(2, 3, requires_grad=True)
    module(x).sum().backward()
    assert x.grad.tolist() == [[2.0] * 3] * 2
    # A file has no function of autograd: validation compares its gradients with jax.
    report = to_torch((params, model), tmp_path / "net.pt2", spec("n, 3"))
    assert report.largest_error["serving_default: gradient:w"] < 1e-6


class Dense(pax.Module):
    def __init__(self):
        super().__init__()
        self.norm = pax.BatchNorm1D(8)
        self.body = pax.Linear(3, 8, with_bias=False)  # Adam moves a bias of gradient 0
        self.drop, self.head = pax.Dropout(0.1), pax.Linear(8, 2)

    def __call__(self, x):
        return self.head(self.drop(jax.nn.gelu(self.norm(self.body(x)))))


class Convolutions(pax.Module):
    def __init__(self):
        super().__init__()
        self.blocks = [pax.Conv2D(i, 8, 3, padding="SAME", with_bias=False) for i in (3, 8, 8)]
        self.norms, self.head = [pax.BatchNorm2D(8) for _ in range(3)], pax.Linear(8, 2)

    def __call__(self, x):
        for block, norm in zip(self.blocks, self.norms):
            x = jax.nn.relu(norm(block(x)))
        return self.head(x.mean((1, 2)))


def losses_of_adam(net, x, y, validate):
    """The losses of 200 steps in torch, and in jax; the module and the net after them."""
    import optax
    import torch

    inputs = spec(("batch", *x.shape[1:]), str(x.dtype))
    module = as_torch(net, inputs, train=True, validate=validate)
    assert module.training
    optimizer, theirs = torch.optim.Adam(module.parameters(), 0.01), []
    for _ in range(200):
        optimizer.zero_grad()
        loss = ((module(torch.from_numpy(x)) - torch.from_numpy(y)) ** 2).mean()
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())

    def loss_of(weights, net):
        net, out = net.update_parameters(weights) % x
        return ((out - y) ** 2).mean(), net

    @jax.jit
    def step(net, state):
        (loss, net), slopes = jax.value_and_grad(loss_of, has_aux=True)(net.parameters(), net)
        updates, state = adam.update(slopes, state)
        return net.update_parameters(optax.apply_updates(net.parameters(), updates)), state, loss

    adam, ours = optax.adam(0.01), []
    state = adam.init(net.parameters())
    for _ in range(200):
        net, state, loss = step(net, state)
        ours.append(float(loss))
    return theirs, ours, module, net


@with_torch
def test_200_steps_of_adam_in_train_mode_give_the_losses_of_jax():
    import torch

    x = random(16, 3)
    theirs, ours, module, net = losses_of_adam(Dense(), x, random(16, 2) ** 2, validate=True)
    assert_close(theirs, ours, rtol=1e-4)
    found = module.eval()(torch.from_numpy(x)).detach().numpy()
    assert_close(found, net.eval()(x), rtol=1e-3, atol=1e-4)


@with_torch
@pytest.mark.parametrize(("dtype", "apart"), [("float32", 1e-4), ("float64", 1e-12)])
def test_200_steps_of_convolutions_give_the_losses_of_jax(dtype, apart):
    pax.seed_rng_key(1)
    with jax.enable_x64(dtype == "float64"):
        x, y = random(8, 6, 6, 3).astype(dtype), (random(8, 2) ** 2).astype(dtype)
        theirs, ours, *_ = losses_of_adam(Convolutions(), x, y, validate=False)
    assert_close(theirs, ours, rtol=apart)  # of the first, which is the largest


@with_torch
def test_state_is_updated_in_buffers(tmp_path):
    import torch

    class Counter(pax.Module):
        def __init__(self):
            super().__init__()
            self.calls = jnp.zeros((), jnp.int32)

        def __call__(self, x):
            self.calls = self.calls + 1
            return x * self.calls

    module = as_torch(Counter(), spec("n"), state="update")
    to_torch(Counter(), tmp_path / "net.pt2", spec("n"), state="update")
    program, loaded = torch.export.load(tmp_path / "net.pt2").module(), load(tmp_path / "net.pt2")
    assert [module(torch.ones(1)).item() for _ in range(3)] == [1, 2, 3]
    assert [program(torch.ones(1)).item() for _ in range(3)] == [1, 2, 3]
    assert [float(loaded(np.ones(1, np.float32))[0]) for _ in range(3)] == [1, 2, 3]
    assert module.state_dict()["calls"].item() == 3
    both = {"a": "__call__", "b": lambda net, x: x + net.calls}
    with pytest.raises(errors.StateChangeError, match="do not share the state"):
        to_torch(Counter(), tmp_path / "two", dict.fromkeys(both, spec("n")), methods=both,
                 state="update")  # fmt: skip


@with_torch
def test_methods_and_nested_arguments(tmp_path):
    net = pax.Linear(3, 2)
    methods = {"a": "__call__", "b": lambda net, x: {"y": net(x["x"]), "more": [x["n"] + 1]}}
    inputs = {"a": spec("batch, 3"), "b": {"x": spec("batch, 3"), "n": spec("batch", "int32")}}
    inputs["b"] = (inputs["b"],)
    to_torch(net, tmp_path / "net.pt2", inputs, methods=methods)
    loaded = load(tmp_path / "net.pt2")
    x = random(4, 3)
    assert_close(loaded.signatures["a"](x), net(x), rtol=1e-5)
    found = loaded.signatures["b"]({"x": x, "n": np.arange(4, dtype=np.int32)})
    assert_close(found["y"], net(x), rtol=1e-5)
    assert found["more"][0].tolist() == [1, 2, 3, 4]


@with_torch
def test_loops_of_any_length(tmp_path):
    def model(_, x):
        last, sums = jax.lax.scan(lambda c, r: (c * 0.5 + jnp.sin(r), c.sum()), x[0], x)
        grown = jax.lax.while_loop(lambda s: (s**2).sum() < 100, lambda s: s * 1.5 + 1, last)
        return sums, jax.lax.cond(grown.sum() > 0, jnp.sin, jnp.cos, grown)

    path = tmp_path / "net.pt2"
    report = to_torch(({}, model), path, spec("n, 3"), trainable=False)
    assert report.validated == "here"
    with zipfile.ZipFile(path) as file:
        content = b"".join(map(file.read, file.namelist()))
    assert str(Path(pax.__file__).parent).encode() not in content


@with_torch
def test_loops_with_integers_in_their_state_are_trained(tmp_path):
    """Of which autograd of torch's `scan` knows floats alone."""

    def model(params, x):
        def step(state, row):
            ring, at, is_odd = state
            past = ring[at % 2]
            row = jnp.where(is_odd, jnp.tanh(row @ params + past), row)
            return (ring.at[at % 2].set(row), at + 1, ~is_odd), (row, at)

        return jax.lax.scan(step, (jnp.zeros((2, 3)), 0, False), x)

    report = to_torch((jnp.asarray(random(3, 3)), model), tmp_path / "net.pt2", spec("n, 3"))
    assert sum(" gradient:" in each for each in report.largest_error) == 2


@with_torch
def test_loops_over_a_batch_of_one(tmp_path):
    """Integers have no derivative, which torch's `scan` would ask for; bodies take any batch."""
    import torch

    def tokens(params, x):
        def step(token, _):
            return jnp.argmax(params[token] * x.sum(1, keepdims=True), -1), token

        return jax.lax.scan(step, jnp.zeros(x.shape[0], int), jnp.arange(x.shape[1]))[1]

    params = jnp.asarray(random(4, 4))
    to_torch((params, tokens), tmp_path / "net.pt2", spec("batch, length"))
    program = torch.export.load(tmp_path / "net.pt2").module()
    for shape in ((1, 3), (2, 5)):
        found = program(torch.from_numpy(random(*shape)))
        assert found.tolist() == tokens(params, random(*shape)).tolist()


@with_torch
def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "net.pt2"
    to_torch(mlp(), path, spec("batch, 3"), validate=False)
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    with pytest.raises(errors.ExportPathError, match="corrupted"):
        load(path)


@with_torch
def test_a_callback_is_refused(tmp_path):
    with pytest.raises(errors.PaxError) as caught:
        to_torch(({}, lambda _, x: jax.pure_callback(np.sin, x, x)), tmp_path / "a", spec("n, 3"))
    assert "calls back into Python" in caught.value.what


@with_torch
def test_sizes_on_which_a_model_depends(tmp_path):
    def model(_, x):
        return x.sum(0) if x.shape[0] > 4 else x[0]

    with pytest.raises(errors.SymbolicDimensionError) as caught:
        to_torch(({}, model), tmp_path / "net.pt2", spec("n, 3"))
    assert "n >= 5" in caught.value.write and "test_to_torch.py" in caught.value.where
    to_torch(({}, model), tmp_path / "net.pt2", spec("n, 3"), constraints=["n >= 5"])


@with_torch
def test_a_strided_convolution_takes_images_of_any_size(tmp_path):
    """Of one channel, torch asserts that there is more than one pixel."""
    net = pax.Conv2D(1, 1, 3, stride=2, padding="SAME")
    report = to_torch(net, tmp_path / "net.pt2", spec("batch, height, width, 1"))
    assert report.validated == "here"


@with_torch
def test_a_pool_along_one_axis_takes_any_size(tmp_path):
    def model(_, x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3, 1), (2, 1), "SAME")

    report = to_torch(({}, model), tmp_path / "net.pt2", spec("n, 2"))
    assert report.validated == "here"


@with_torch
def test_branches_with_slices_take_a_batch_of_one(tmp_path):
    import torch

    def model(_, x):
        return jax.lax.cond(x.sum() > 0, lambda x: x[:, :1], lambda x: x[:, :1] * 2, x)

    to_torch(({}, model), tmp_path / "net.pt2", spec("batch, 3, 4"))
    program = torch.export.load(tmp_path / "net.pt2").module()
    for batch in (1, 2):
        assert program(torch.ones(batch, 3, 4)).shape == (batch, 1, 4)


@with_torch
def test_an_old_torch_is_refused(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "__version__", "2.5.1")
    with pytest.raises(errors.MissingPackageError) as caught:
        as_torch(mlp(), spec("batch, 3"))
    assert caught.value.got == "2.5.1" and "torch>=2.8" in caught.value.write


@with_torch
def test_nan_weights_and_small_dtypes_are_taken():
    import torch

    params = {
        "nan": jnp.array([1.0, jnp.nan, 2.0]),
        "eight": jnp.ones(3, jnp.float8_e4m3fn),
        "four": jnp.ones(3, jnp.int4),
    }
    module = as_torch(
        (params, lambda p, x: sum(each.astype(jnp.float32) * x for each in p.values())),
        spec("n, 3"),
    )
    assert module(torch.ones(1, 3)).isnan().tolist() == [[False, True, False]]


@with_torch
def test_a_dtype_that_torch_lacks_is_named():
    def model(_, x):
        return x.astype(jnp.float4_e2m1fn).astype(jnp.float32)

    with pytest.raises(errors.UnsupportedOperationError, match="float4_e2m1fn, which torch lacks"):
        as_torch(({}, model), spec("n"))


BESIDE_TENSORFLOW = """
import sys
import jax.numpy as jnp
from pax_export import export
export.to_saved_model(jnp.sin, sys.argv[1] + "/saved", export.spec("3"))
print(export.to_torch(jnp.sin, sys.argv[1] + "/sine.pt2", export.spec("3")).validated)
"""


@with_torch
def test_torch_is_loaded_after_tensorflow(tmp_path):
    assert printed(BESIDE_TENSORFLOW, tmp_path) == "here\n"
