"""What is not in a file is said to be missing, and nothing else is taken in its place."""

import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.weights.adoption.foreign import Free

N = np.random.default_rng(0)


def of(name, *shape):
    return {f"{name}.weight": N.normal(size=shape).astype(np.float32),
            f"{name}.bias": N.normal(size=shape[0]).astype(np.float32)}  # fmt: skip


def refused(net, file, **options):
    with pytest.raises(pax.errors.AdoptionError) as caught:
        pax.weights.adopt(net, file, origin="torch", **options)
    return caught.value


@pytest.mark.parametrize("wrong", ["aux", "class_freq"])
def test_an_array_that_is_called_otherwise_is_no_candidate(wrong):
    file = {**of("conv", 8, 3, 3, 3), **of("fc", 2, 8)}
    net = Free(conv=pax.Conv2D(3, 8, 3), gn=pax.GroupNorm(2, 8), fc=pax.Linear(8, 2))
    error = refused(net, {**file, **of(wrong, 8)})
    assert error.missing == ("gn.scale", "gn.offset")
    assert error.left == (f"{wrong}.weight", f"{wrong}.bias")
    assert f'of the shape of gn: rename={{"{wrong}": "gn"}}' in str(error)
    new, _ = pax.weights.adopt(net, {**file, **of(wrong, 8)}, origin="torch", rename={wrong: "gn"})
    assert new.gn.scale.shape == (8,)
    new, _ = pax.weights.adopt(net, {**file, **of("norm", 8)}, origin="torch")  # a word for it
    assert new.gn.scale.shape == (8,)


def test_nor_is_a_single_array():
    file = {**of("conv", 8, 3, 3, 3), **of("fc", 2, 8), "class_freq": np.ones(8, np.float32)}
    net = Free(conv=pax.Conv2D(3, 8, 3), prelu=Free(weight=jnp.ones(8)), fc=pax.Linear(8, 2))
    error = refused(net, file)
    assert error.missing == ("prelu.weight",)
    assert error.left == ("class_freq",)


def test_only_what_is_missing_is_named():
    def block():
        return Free(attention_norm=pax.LayerNorm(4), mlp_norm=pax.LayerNorm(4),
                    fc=pax.Linear(4, 4))  # fmt: skip

    net = Free(layers=[block() for _ in range(3)], norm=pax.LayerNorm(4))
    file = of("model.ln_f", 4)
    for i in range(3):
        file |= {**of(f"model.h.{i}.ln_1", 4), **of(f"model.h.{i}.ln_2", 4),
                 **of(f"model.h.{i}.fc", 4, 4)}  # fmt: skip
    for gone, missing in (
        ("h.1.ln_2", {"layers.1.mlp_norm.scale", "layers.1.mlp_norm.offset"}),
        ("h.1.fc", {"layers.1.fc.weight", "layers.1.fc.bias"}),
        ("h.1.fc.bias", {"layers.1.fc.bias"}),
        ("ln_f", {"norm.scale", "norm.offset"}),
    ):
        error = refused(net, {name: array for name, array in file.items() if gone not in name})
        assert set(error.missing) == missing, gone
        assert str(error).count("no array for") == 1
        assert "of these shapes" not in str(error)


def test_biases_that_a_net_does_not_have_stay_zero():
    net = pax.MultiHeadAttention(2, 4)
    file = {"in_proj_weight": N.normal(size=(24, 8)).astype(np.float32),
            "out_proj.weight": N.normal(size=(8, 8)).astype(np.float32)}  # fmt: skip
    error = refused(net, file)
    assert set(error.missing) == {f"{part}_projection.bias" for part in
                                  ("query", "key", "value", "output")}  # fmt: skip
    assert error.write == 'keep=["**.bias"] for what stays as it is'
    new, _ = pax.weights.adopt(net, file, origin="torch", keep="**.bias")
    assert np.array_equal(new.key_projection.weight, file["in_proj_weight"][8:16].T)
    assert not np.any(new.key_projection.bias)


def test_what_is_renamed_is_decided():
    net = Free(a=pax.Linear(4, 4), b=pax.Linear(4, 4), c=pax.Linear(4, 4))
    error = refused(net, {**of("x", 4, 4), **of("y", 4, 4), **of("z", 4, 4)}, rename={"x": "b"})
    assert error.candidates["y.weight"] == ("a", "c")
    assert not any(name.startswith("x") for name in error.candidates)
