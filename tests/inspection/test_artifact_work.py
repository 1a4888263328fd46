"""The arithmetic of an export, counted in what was written, is that of the net."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pax_export as pax
from pax_export.export import spec
from tests.closeness import assert_close


class Rounds(pax.Module):
    """A scan, a loop of unknown length left out, and a branch."""

    def __init__(self):
        super().__init__()
        self.cell = pax.Linear(4, 4)

    def __call__(self, x):
        def step(carry, _):
            carry = jnp.tanh(self.cell(carry))
            return carry, carry.sum(-1)

        last, sums = jax.lax.scan(step, x, None, length=7)
        return jax.lax.cond(sums.sum() > 0, lambda: last @ last.T, lambda: jnp.zeros((3, 3)))


def _image():
    return pax.Sequential(
        pax.Conv2D(3, 8, 3, stride=2, padding="SAME"),
        pax.BatchNorm2D(8),
        jax.nn.gelu,
        lambda x: jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        ),
        lambda x: x.mean((1, 2)),
        pax.Linear(8, 4),
        jax.nn.softmax,
    )


def _words():
    config = pax.nets.DecoderConfig.llama(
        vocab_size=20, dim=8, num_layers=2, num_heads=2, hidden_dim=16
    )
    return pax.nets.Decoder(config)


NETS = {
    "image": (_image, spec("2, 12, 12, 3")),
    "images": (_image, spec("batch, 12, 12, 3")),
    "words": (_words, spec("batch, length", "int32")),
    "rounds": (Rounds, spec("3, 4")),
    "order": (lambda: pax.Lambda(lambda x: jnp.sort(x)[:, ::-1] + jnp.argmax(x)), spec("n, 6")),
}
SIZES = {"batch": 5, "length": 9, "n": 4}


def number(count):
    return eval(str(count).replace("^", "**"), dict(SIZES))


@pytest.mark.parametrize("name", NETS)
def test_a_bundle_does_what_the_net_does(tmp_path, name):
    build, inputs = NETS[name]
    net = build().eval()
    pax.export.to_stablehlo(net, tmp_path / "net", inputs, validate=False, card=False)
    found, known = pax.inspect(tmp_path / "net"), pax.inspect(net, inputs)
    assert abs(number(found.flops) / number(known.flops) - 1) < 0.02
    new, old = found.rows[0].transcendentals, known.rows[0].transcendentals
    assert_close(number(new), number(old), rtol=0.02)
    assert found.rows[0].computed_in == known.rows[0].computed_in
    assert found.uncounted == known.uncounted


def test_a_saved_model_has_the_work_of_each_signature(tmp_path):
    methods = {
        "serving_default": lambda p, x: x @ p["w"],
        "twice": lambda p, x: x @ p["w"] @ p["w"],
    }
    inputs = {"serving_default": spec("batch, 4"), "twice": spec("batch, 4")}
    params = {"w": jnp.ones((4, 4))}
    pax.export.to_saved_model(
        (params, methods["twice"]), tmp_path / "net", inputs, methods=methods, validate=False
    )
    found = pax.inspect(tmp_path / "net")
    assert found["serving_default"].flops == "32*batch"
    assert found["twice"].flops == "64*batch"
    (tmp_path / "net/pax_export.json").unlink()  # as somebody else would have written it
    foreign = pax.inspect(tmp_path / "net")
    assert foreign["twice"].flops == "64*x_0"


def test_what_cannot_be_counted_is_said(tmp_path):
    pax.export.to_stablehlo(
        pax.Linear(3, 2), tmp_path / "net", spec("batch, 3"), validate=False, card=False
    )
    (tmp_path / "net/serving_default.mlirbc").write_bytes(b"no module")
    found = pax.inspect(tmp_path / "net")
    assert found.flops is None and found.parameters == 8
    assert found.uncounted[0].startswith("all of it: ")


def test_a_graph_that_is_cut_short_is_told(tmp_path):
    model = {"w": jnp.ones((4, 4))}, lambda p, x: x @ p["w"]
    pax.export.to_saved_model(model, tmp_path / "net", spec("batch, 4"), validate=False)
    file = tmp_path / "net/saved_model.pb"
    file.write_bytes(file.read_bytes()[:-100])
    found = pax.inspect(tmp_path / "net")
    (said,) = found.uncounted
    assert said.startswith("all of it: ValueError: this protocol buffer is cut short: a field of ")
    file.unlink()
    assert pax.inspect(tmp_path / "net").uncounted[0].startswith("all of it: FileNotFoundError")
