"""What is not in a file is said to be missing, and nothing else is taken in its place."""

import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from tests.weights.adoption.foreign import Free, N, assert_refused


def of(name, *shape):
    return {f"{name}.weight": N.normal(size=shape).astype(np.float32),
            f"{name}.bias": N.normal(size=shape[0]).astype(np.float32)}  # fmt: skip


@pytest.mark.parametrize("wrong", ["aux", "class_freq"])
def test_arrays_with_other_names_are_no_candidates(wrong):
    file = {**of("conv", 8, 3, 3, 3), **of("fc", 2, 8)}
    net = Free(conv=pax.Conv2D(3, 8, 3), gn=pax.GroupNorm(2, 8), fc=pax.Linear(8, 2))
    error = assert_refused(net, {**file, **of(wrong, 8)})
    assert error.missing == ("gn.scale", "gn.offset")
    assert error.left == (f"{wrong}.weight", f"{wrong}.bias")
    assert error.write.endswith('rename={"name.in.the.file": "path.in.the.module"}')
    new, _ = pax.weights.adopt(net, {**file, **of(wrong, 8)}, origin="torch", rename={wrong: "gn"})
    assert new.gn.scale.shape == (8,)
    new, _ = pax.weights.adopt(net, {**file, **of("norm", 8)}, origin="torch")  # a word for it
    assert new.gn.scale.shape == (8,)


@pytest.mark.parametrize("beside", ["aux_gn", "teacher.gn", "gn_ema", "extra_norm"])
def test_a_word_for_another_part_makes_it_another_array(beside):
    file = {**of("conv", 8, 3, 3, 3), **of("fc", 2, 8), **of(beside, 8)}
    net = Free(conv=pax.Conv2D(3, 8, 3), gn=pax.GroupNorm(2, 8), fc=pax.Linear(8, 2))
    assert assert_refused(net, file).missing == ("gn.scale", "gn.offset")
    pax.weights.adopt(net, file, origin="torch", rename={beside: "gn"})


@pytest.mark.parametrize("usual", ["model_gn", "gn1", "layer.gn"])
def test_other_words_and_words_of_the_whole_file_do_not(usual):
    net = Free(conv=pax.Conv2D(3, 8, 3), gn=pax.GroupNorm(2, 8), fc=pax.Linear(8, 2))
    pax.weights.adopt(net, {**of("conv", 8, 3, 3, 3), **of("fc", 2, 8), **of(usual, 8)},
                      origin="torch")  # fmt: skip
    whole = {**of("ema.conv", 8, 3, 3, 3), **of("ema.fc", 2, 8), **of("ema.gn", 8)}
    pax.weights.adopt(net, {**whole, "step": np.zeros(())}, origin="torch", ignore=["step"])


@pytest.mark.parametrize("slots", [("momentum_buffer",), ("step", "exp_avg", "exp_avg_sq")])
@pytest.mark.parametrize("prefix", ["optimizer_states.0", "optimizer", "optim_state_dict"])
def test_the_state_of_an_optimizer_is_no_weight(slots, prefix):
    """Checkpoints of Lightning and of torch have it beside the net, in the same shapes."""
    net = Free(conv=pax.Conv2D(3, 8, 3), fc=pax.Linear(8, 2))
    weights = {**of("state_dict.conv", 8, 3, 3, 3), **of("state_dict.fc", 2, 8)}
    state = {f"{prefix}.state.{i}.{slot}": np.zeros(() if slot == "step" else w.shape, np.float32)
             for i, w in enumerate(weights.values()) for slot in slots}  # fmt: skip
    new, report = pax.weights.adopt(net, {**weights, **state}, origin="torch")
    np.testing.assert_array_equal(new.fc.weight, weights["state_dict.fc.weight"].T)
    assert {*report.ignored} == {*state}


def test_nor_is_a_single_array():
    file = {**of("conv", 8, 3, 3, 3), **of("fc", 2, 8), "class_freq": np.ones(8, np.float32)}
    net = Free(conv=pax.Conv2D(3, 8, 3), prelu=Free(weight=jnp.ones(8)), fc=pax.Linear(8, 2))
    error = assert_refused(net, file)
    assert error.missing == ("prelu.weight",)
    assert error.left == ("class_freq",)
    # An array without a role has every array looked at by itself.
    net = Free(conv=pax.Conv2D(3, 8, 3), gn=pax.GroupNorm(2, 8), fc=pax.Linear(8, 2),
               class_freq=jnp.ones(8))  # fmt: skip
    assert assert_refused(net, {**file, **of("aux", 8)}).missing == ("gn.scale", "gn.offset")


def test_only_missing_weights_are_named():
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
        error = assert_refused(
            net, {name: array for name, array in file.items() if gone not in name}
        )
        assert set(error.missing) == missing, gone
        assert str(error).count("no array for") == 1
        assert "of these shapes" not in str(error)


def test_biases_that_a_net_does_not_have_become_zeros():
    net = pax.MultiHeadAttention(2, 4)
    file = {"in_proj_weight": N.normal(size=(24, 8)).astype(np.float32),
            "out_proj.weight": N.normal(size=(8, 8)).astype(np.float32)}  # fmt: skip
    error = assert_refused(net, file)
    assert set(error.missing) == {f"{part}_projection.bias" for part in
                                  ("query", "key", "value", "output")}  # fmt: skip
    assert error.write.startswith('zeros="**.bias" for layers that have no bias')
    new, report = pax.weights.adopt(net, file, origin="torch", zeros="**.bias")
    assert np.array_equal(new.key_projection.weight, file["in_proj_weight"][8:16].T)
    assert not np.any(new.key_projection.bias)
    assert len(report.zeros) == 4 and not report.kept
    assert "set to 0: query_projection.bias" in str(report)


@pytest.mark.parametrize("framework", ["torch", "keras", "onnx"])
def test_a_cell_without_biases(framework):
    w, u = (N.normal(size=(16, size)).astype(np.float32) for size in (3, 4))  # i f g o
    file = {"weight_ih_l0": w, "weight_hh_l0": u}
    if framework == "torch":
        assert 'zeros="**.bias"' in str(assert_refused(pax.LSTM(3, 4), file))
    if framework == "keras":
        file = {"lstm_cell/kernel": w.T, "lstm_cell/recurrent_kernel": u.T}
    if framework == "onnx":  # i o f g
        i, f, g, o = (slice(4 * n, 4 * n + 4) for n in range(4))
        file = {f"lstm.{name}": np.concatenate([a[i], a[o], a[f], a[g]])[None]
                for name, a in (("W", w), ("R", u))}  # fmt: skip
    new, _ = pax.weights.adopt(pax.LSTM(3, 4), file, origin=framework, zeros="fc.bias")
    weight = np.concatenate([w, u], 1).T
    ours = np.split(np.asarray(new.fc.weight), 4, 1)  # i g f o
    assert np.array_equal(np.stack(ours)[[0, 2, 1, 3]], np.stack(np.split(weight, 4, 1)))
    with pytest.raises(pax.errors.AdoptionError):
        pax.weights.adopt(
            pax.LSTM(3, 4, forget_gate_bias=1.0), file, origin=framework, zeros="fc.bias"
        )


def _bidirectional(layers):
    file = {}
    for i in range(layers):
        for way in ("", "_reverse"):
            file[f"lstm.weight_ih_l{i}{way}"] = N.normal(size=(8, 4)).astype(np.float32)
            file[f"lstm.weight_hh_l{i}{way}"] = N.normal(size=(8, 2)).astype(np.float32)
            for part in ("bias_ih", "bias_hh"):
                file[f"lstm.{part}_l{i}{way}"] = N.normal(size=8).astype(np.float32)
    return file


@pytest.mark.parametrize(("forward", "backward"), [("forward", "backward"), ("fwd", "bwd_cell")])
def test_both_directions_of_a_cell(forward, backward):
    file = _bidirectional(2)
    net = Free(layers=[Free(**{forward: pax.LSTM(4, 2), backward: pax.LSTM(4, 2)})
                       for _ in range(2)])  # fmt: skip
    _, report = pax.weights.adopt(net, file)
    found = {row.leaf: row.arrays[0] for row in report.rows}
    for i in range(2):
        assert found[f"layers.{i}.{forward}.fc.weight"] == f"lstm.weight_ih_l{i}"
        assert found[f"layers.{i}.{backward}.fc.weight"] == f"lstm.weight_ih_l{i}_reverse"


def test_directions_without_names_are_renamed_as_proposed():
    net, file = Free(left=pax.LSTM(4, 2), right=pax.LSTM(4, 2)), _bidirectional(1)
    assert 'rename={"lstm.*_l0": "left", ...}' in assert_refused(net, file).write
    _, report = pax.weights.adopt(net, file, rename={"lstm.*_l0_reverse": "left"})
    found = {row.leaf: row.arrays[0] for row in report.rows}
    assert found["left.fc.weight"] == "lstm.weight_ih_l0_reverse"
    assert found["right.fc.weight"] == "lstm.weight_ih_l0"


@pytest.mark.parametrize("sizes", [((1, 1, 4), (1, 3, 4), (1,)), ((4,), (3, 4), ())])
def test_leaves_whose_first_axis_is_one(sizes):
    file = {"cls_token": N.normal(size=(1, 1, 4)), "dist_token": N.normal(size=(1, 1, 4)),
            "pos_embed": N.normal(size=(1, 3, 4)), "act.weight": np.full(1, 0.25)}  # fmt: skip
    file = {name: array.astype(np.float32) for name, array in file.items()}
    token, positions, slope = map(jnp.zeros, sizes)
    net = Free(cls_token=token, dist_token=1 * token, pos_embed=positions, act=Free(weight=slope))
    new, _ = pax.weights.adopt(net, file)
    assert np.array_equal(new.cls_token.ravel(), file["cls_token"].ravel())
    assert np.array_equal(new.dist_token.ravel(), file["dist_token"].ravel())
    assert np.array_equal(new.pos_embed.ravel(), file["pos_embed"].ravel())
    assert float(new.act.weight.ravel()[0]) == 0.25


def test_renamed_weights_are_decided():
    net = Free(a=pax.Linear(4, 4), b=pax.Linear(4, 4), c=pax.Linear(4, 4))
    file = {**of("x", 4, 4), **of("y", 4, 4), **of("z", 4, 4)}
    error = assert_refused(net, file, origin="torch", rename={"x": "b"})
    assert error.candidates["y.weight"] == ("a", "c")
    assert not any(name.startswith("x") for name in error.candidates)


def test_renaming_does_not_decide_other_names():
    net = Free(left=pax.Linear(4, 4), right=pax.Linear(4, 4))
    file = {**of("x", 4, 4), **of("y", 4, 4)}
    new, _ = pax.weights.adopt(net, file, origin="torch", rename={"x": "left"})
    assert np.array_equal(new.right.weight, file["y.weight"].T)
