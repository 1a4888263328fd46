"""Where channels of an image are flattened, or come from numbers: torch has them first."""

import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.closeness import assert_close
from tests.refusals import refused
from tests.weights.adoption.foreign import Free, Maker, convolved, dense, spread


class Own(pax.Module):
    """A dense layer of another class, whose weight lies as in torch."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = jnp.zeros((outputs, inputs)), jnp.zeros(outputs)

    def __call__(self, x):
        return x @ self.weight.T + self.bias


def flat(x):
    """Channels first, as torch flattens: from channels last."""
    return x.transpose(0, 3, 1, 2).reshape(len(x), -1)


def classifier(layer=pax.Linear):
    """A net, what torch would write of it, inputs and outputs."""
    make = Maker(0)
    a, b, c, d = (make.of("conv", 3, 3, 3, 4), make.of("conv", 3, 3, 4, 8),
                  make.of("linear", 48, 5), make.of("linear", 5, 2))  # fmt: skip
    file = {"conv1.weight": a["w"].transpose(3, 2, 0, 1), "conv1.bias": a["b"],
            "conv2.weight": b["w"].transpose(3, 2, 0, 1), "conv2.bias": b["b"],
            "fc1.weight": c["w"].T, "fc1.bias": c["b"],
            "fc2.weight": d["w"].T, "fc2.bias": d["b"]}  # fmt: skip
    file = {name: array.astype(np.float32) for name, array in file.items()}
    x = make.normal(2, 3, 2, 3)
    y = dense(np.tanh(dense(flat(convolved(np.tanh(convolved(x, a)), b)), c)), d)
    net = Free(conv1=pax.Conv2D(3, 4, 3), conv2=pax.Conv2D(4, 8, 3), fc1=layer(48, 5),
               fc2=pax.Linear(5, 2))  # fmt: skip
    return net, file, x, y


def call(net, x):
    x = net.conv2(jnp.tanh(net.conv1(x)))
    return net.fc2(jnp.tanh(net.fc1(x.reshape(len(x), -1))))


@pytest.mark.parametrize("layer", [pax.Linear, Own])
def test_a_flatten_is_not_guessed(layer):
    net, file, x, y = classifier(layer)
    with pytest.raises(pax.errors.AmbiguousWeightsError) as caught:
        pax.weights.adopt(net, file, origin="torch")
    assert list(caught.value.candidates) == ["fc1.weight"]
    assert 'flatten={"fc1": 8}' in caught.value.write and "axes=" not in caught.value.write
    for said in ({"flatten": {"fc1": 8}}, {"reference": (x, y, call)}):
        new, report = pax.weights.adopt(net, file, origin="torch", **said)
        assert_close(call(new, x), y, rtol=1e-4)
        how = {row.leaf: row.how for row in report.rows}["fc1.weight"]
        assert how.endswith("8 channels last")


def test_modules_that_flatten_as_torch(tmp_path):
    net, file, _, _ = classifier()
    new, _ = pax.weights.adopt(net, file, flatten="as it is")
    assert np.array_equal(new.fc1.weight, file["fc1.weight"].T)
    new, _ = pax.weights.adopt(net, file, flatten={"fc1": 8})
    pax.weights.save_as(new, tmp_path / "back.npz", like=file, flatten={"fc1": 8})
    back = np.load(tmp_path / "back.npz")
    assert all(np.array_equal(back[name], file[name]) for name in file)


def test_the_convolution_just_before_is_proposed():
    net, file, _, _ = classifier()
    net = Free(last=net.fc2, conv1=net.conv1, conv2=net.conv2, fc1=net.fc1)
    names = ("conv2", "fc2", "fc1", "conv1")
    file = {name: file[name] for word in names for name in file if name.startswith(word)}
    with refused(pax.errors.AmbiguousWeightsError, 'flatten={"fc1"', "8}"):
        pax.weights.adopt(net, file, origin="torch")


def test_several_counts_of_channels_are_not_chosen_from():
    net, file, _, _ = classifier()
    with refused(pax.errors.AmbiguousWeightsError, 'flatten={"fc1"', "8}"):
        pax.weights.adopt(net, file, flatten="channels_first")


def test_numbers_that_become_an_image():
    make = Maker(1)
    a, b = make.of("linear", 3, 24), make.of("up", 4, 2)
    file = {"fc.weight": a["w"].T, "fc.bias": a["b"], "up.weight": b["w"], "up.bias": b["b"]}
    z = make.normal(2, 3)
    y = spread(dense(z, a).reshape(2, 4, 2, 3).transpose(0, 2, 3, 1), b)
    net = Free(fc=pax.Linear(3, 24), up=pax.Conv2DTranspose(4, 2, 2, 2, "VALID"))
    with pytest.raises(pax.errors.AmbiguousWeightsError) as caught:
        pax.weights.adopt(net, file, origin="torch")
    assert set(caught.value.candidates) == {"fc.weight", "fc.bias"}
    new, _ = pax.weights.adopt(net, file, origin="torch", flatten="channels_first")
    assert_close(new.up(new.fc(z).reshape(2, 2, 3, 4)), y, rtol=1e-4)


def _weights(**shapes):
    return {f"{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("shapes", "layers"),
    [  # pooled; between dense layers; behind a gate
        ({"conv": (8, 3, 3, 3), "fc": (2, 8)}, {"fc": (8, 2)}),
        ({"conv": (8, 3, 3, 3), "up": (32, 8), "down": (8, 32)}, {"up": (8, 32), "down": (32, 8)}),
        ({"conv": (8, 3, 3, 3), "gated": (64, 8), "down": (8, 32)},
         {"gated": (8, 64), "down": (32, 8)}),
    ],
)  # fmt: skip
def test_dense_layers_without_a_flatten_are_as_before(shapes, layers):
    net = Free(
        conv=pax.Conv2D(3, 8, 3, with_bias=False),
        **{name: pax.Linear(*sizes, with_bias=False) for name, sizes in layers.items()},
    )
    _, report = pax.weights.adopt(net, _weights(**shapes), origin="torch")
    assert not any("channels last" in row.how for row in report.rows)


def test_norms_decide_the_number_of_channels():
    net = Free(conv=pax.Conv2D(3, 8, 3, with_bias=False), norm=pax.BatchNorm2D(32),
               fc=pax.Linear(32, 2, with_bias=False))  # fmt: skip
    file = _weights(conv=(8, 3, 3, 3), norm=(32,), fc=(2, 32))
    file |= {f"norm.{name}": np.ones(32, np.float32) for name in ("bias", "running_mean",
             "running_var")}  # fmt: skip
    _, report = pax.weights.adopt(net, file, origin="torch")
    assert report.rows


def test_frameworks_with_channels_last_flatten_as_here():
    net, file, _, _ = classifier()
    file = {name.replace("weight", "kernel"): array for name, array in file.items()}
    file = {name: array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
            for name, array in file.items()}  # fmt: skip
    for origin in ("keras", "flax"):
        new, _ = pax.weights.adopt(net, file, origin=origin)
        assert np.array_equal(new.fc1.weight, file["fc1.kernel"])


@pytest.mark.parametrize("said", ["channels first", {"fc1": 0}, {"fc1": "8"}, {"fc1": 7}, 8])
def test_the_argument_flatten_is_checked(said):
    net, file, _, _ = classifier()
    with refused(pax.errors.InvalidArgumentError, "flatten="):
        pax.weights.adopt(net, file, flatten=said)
