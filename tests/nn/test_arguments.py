"""Arguments that layers refuse."""

import jax.numpy as jnp
import pytest

import pax_export as pax
from tests.nn.reference import drawn
from tests.refusals import refused

NORM = pax.GroupNorm(1, 1)


@pytest.mark.parametrize(
    ("where", "got", "call"),
    [
        ("Conv2D.data_format", "'NCWH'", lambda: pax.Conv2D(1, 1, 3, data_format="NCWH")),
        ("Conv2D.stride", "(1, 2, 3)", lambda: pax.Conv2D(1, 1, 3, stride=(1, 2, 3))),
        ("Conv1D.kernel_shape", "0", lambda: pax.Conv1D(1, 1, 0)),
        ("Conv2DTranspose.padding", "[1, 2]", lambda: pax.Conv2DTranspose(1, 1, 3, padding=[1, 2])),
        ("Conv1D.padding", "a tuple, ((1, 1),)", lambda: pax.Conv1D(1, 1, 3, padding=((1, 1),))),
        (
            "Conv2D.feature_group_count",
            "2 groups for 3 features",
            lambda: pax.Conv2D(4, 3, 3, feature_group_count=2),
        ),
        (
            "max_pool.channel_axis",
            "2 for shape (1, 1)",
            lambda: pax.max_pool([[1.0]], (1,), (1,), "SAME", 2),
        ),
        (
            "avg_pool.strides",
            "(1, 1, 1) for shape (1, 1)",
            lambda: pax.avg_pool([[1.0]], (1,), (1, 1, 1), "SAME"),
        ),
        (repr(NORM), "shape ()", lambda: NORM(1.0)),
        ("LSTM.initial_state.batch_size", "-1", lambda: pax.LSTM(1, 1).initial_state(-1)),
        ("GRU.initial_state.batch_size", "str: 'a'", lambda: pax.GRU(1, 1).initial_state("a")),
        (
            "VanillaRNN.initial_state.batch_size",
            "tuple: (2, 3)",
            lambda: pax.VanillaRNN(1, 1).initial_state((2, 3)),
        ),
        ("Linear.rng_key", "int: 3", lambda: pax.Linear(1, 1, rng_key=3)),
        ("Embed.rng_key", "list: [0, 1]", lambda: pax.Embed(1, 1, rng_key=[0, 1])),
        ("Conv1D.rng_key", "str: 'a'", lambda: pax.Conv1D(1, 1, 3, rng_key="a")),
        ("GRU.rng_key", "int: 3", lambda: pax.GRU(1, 1, rng_key=3)),
        ("LayerNorm.rng_key", "int: 3", lambda: pax.LayerNorm(1, -1, True, True, rng_key=3)),
        ("dropout.rng_key", "int: 3", lambda: pax.dropout(3, 0.5, jnp.ones(2))),
        (
            "RngSeq.rng_key",
            f"{type(jnp.ones(2)).__name__}: {jnp.ones(2)!r}",
            lambda: pax.RngSeq(rng_key=jnp.ones(2)),
        ),
    ],
)
def test_invalid_arguments_are_refused(where, got, call):
    with refused(ValueError, where=where, got=got) as error:
        call()
    assert isinstance(error.value, AssertionError)


@pytest.mark.parametrize(("message", "call"), [
    ("0 <= decay_rate <= 1", lambda: pax.BatchNorm1D(3, decay_rate=1.5)),
    ("BatchNorm2D.decay_rate", lambda: pax.BatchNorm2D(3, decay_rate=-0.1)),
    ("'NWC' or 'NCW'", lambda: pax.BatchNorm1D(3, data_format="NHWC")),
    ("BatchNorm2D.num_channels", lambda: pax.BatchNorm2D(0)),
    ("a list of pairs", lambda: pax.Conv2D(1, 1, 3, padding=((1, 1), (1, 1)))),
    ("'SAME' or 'VALID'", lambda: pax.Conv2D(1, 1, 3, padding="same")),
    ("for each of 2", lambda: pax.Conv2D(1, 1, 3, padding=[(1, 1)])),
    ("for each of 1", lambda: pax.Conv1D(1, 1, 3, padding=[1])),
    ("'NWC' or 'NCW'", lambda: pax.Conv1D(1, 1, 3, data_format="NHWC")),
    ("Conv2D.in_features", lambda: pax.Conv2D(0, 3, 3)),
    ("Conv2D.out_features", lambda: pax.Conv2D(3, -1, 3)),
    ("each of 2 spatial", lambda: pax.Conv2D(3, 1, (3,))),
    ("Conv1D.stride", lambda: pax.Conv1D(3, 1, 3, stride=0)),
    ("'SAME' or 'VALID'", lambda: pax.Conv2DTranspose(1, 1, 3, padding="FULL")),
    ("for each of 2", lambda: pax.Conv2DTranspose(1, 1, 3, padding=[(1, 1)])),
    ("'NHWC' or 'NCHW'", lambda: pax.Conv2DTranspose(1, 1, 3, data_format="NWC")),
    ("Conv1DTranspose.in_features", lambda: pax.Conv1DTranspose(0, 3, 3)),
    ("must have 3 axes, NWC", lambda: pax.Conv1DTranspose(2, 3, 3)(drawn(2))),
    ("2 channels on axis 2", lambda: pax.Conv1DTranspose(2, 3, 3)(drawn(1, 2, 4))),
    ("'channels_last' or 'N...C' or", lambda: pax.GroupNorm(2, 4, data_format="NHWC")),
    ("GroupNorm.groups", lambda: pax.GroupNorm(0, 4)),
    ("got: 3 groups for 4 channels", lambda: pax.GroupNorm(3, 4)),
    ("GroupNorm.axis", lambda: pax.GroupNorm(2, 4, axis=None)),
    ("GroupNorm.offset_init", lambda: pax.GroupNorm(2, 4, create_offset=False, offset_init=max)),
    ("[batch, ..., channels", lambda: pax.GroupNorm(2, 4)(1.0)),
    ("must have 4 channels on axis 2", lambda: pax.GroupNorm(2, 4)(drawn(2, 4, 6))),
])  # fmt: skip
def test_what_makes_no_sense_is_named(message, call):
    with refused(ValueError, message) as error:
        call()
    assert isinstance(error.value, AssertionError)


@pytest.mark.parametrize(("message", "call"), [
    ("a list such as", lambda: pax.Conv1D(1, 1, 3, padding=())),
    ("Conv1D.rate", lambda: pax.Conv1D(3, 1, 3, rate=1.5)),
])  # fmt: skip
def test_other_types_are_refused(message, call):
    with refused(TypeError, message):
        call()


Q = drawn(2, 5, 6, 4)
HALVES = tuple(x.astype("float16") for x in (Q, Q[:, :, :2], Q[:, :, :2]))


@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("BatchNorm1D.eps", lambda: pax.BatchNorm1D(3, eps="small")),
        ("LayerNorm.eps", lambda: pax.LayerNorm(3, eps="small")),
        ("RMSNorm.scale_offset", lambda: pax.RMSNorm(3, scale_offset=None)),
        ("LSTM.forget_gate_bias", lambda: pax.LSTM(3, 4, forget_gate_bias="one")),
        ("GroupedQueryAttention.scale", lambda: pax.GroupedQueryAttention(4, 2, scale="a")),
        ("GroupedQueryAttention.rotary", lambda: pax.GroupedQueryAttention(4, 2, rotary=2)),
        ("Rotary.base", lambda: pax.Rotary(4, base="a")),
        ("alibi_slopes.num_heads", lambda: pax.alibi_slopes(1.5)),
        ("dot_product_attention.mask", lambda: pax.dot_product_attention(Q, Q, Q, mask=Q[0, :, 0])),
    ],
)
def test_arguments_of_another_type_are_refused(where, call):
    with refused(pax.errors.InvalidArgumentTypeError, where=where):
        call()


@pytest.mark.parametrize(
    ("where", "call"),
    [
        (repr(pax.LayerNorm(3, 2)), lambda: pax.LayerNorm(3, 2)(drawn(5, 3))),
        ("alibi_slopes.num_heads", lambda: pax.alibi_slopes(0)),
        ("sinusoidal_positions.dim", lambda: pax.sinusoidal_positions([1], 5)),
        ("rotary_frequencies: size", lambda: pax.rotary_frequencies(3)),
        ("Rotary.base", lambda: pax.Rotary(4, base=-1.0)),
        (repr(pax.Rotary(8)), lambda: pax.Rotary(8)(drawn(2, 5, 3, 4), range(5))),
        (
            "RotaryScaling.attention_factor",
            lambda: pax.RotaryScaling("yarn", 2.0, 64, attention_factor=-1.0),
        ),
        (
            "GroupedQueryAttention.rotary",
            lambda: pax.GroupedQueryAttention(4, 2, rotary=pax.Rotary(4)),
        ),
        (
            "GroupedQueryAttention.implementation",
            lambda: pax.GroupedQueryAttention(4, 2, implementation="flash"),
        ),
        ("GroupedQueryAttention.softcap", lambda: pax.GroupedQueryAttention(4, 2, softcap=0.0)),
        ("dot_product_attention.softcap", lambda: pax.dot_product_attention(Q, Q, Q, softcap=-1)),
        ("dot_product_attention.window", lambda: pax.dot_product_attention(Q, Q, Q, window=2)),
        ("dot_product_attention", lambda: pax.dot_product_attention(Q, Q, Q[..., :3])),
        (
            "dot_product_attention.mask",
            lambda: pax.dot_product_attention(Q, Q, Q, mask=Q[:, :4, 0] > 0),
        ),
        (
            "dot_product_attention.bias",
            lambda: pax.dot_product_attention(*HALVES, bias=drawn(2, 2, 5, 5)),
        ),
    ],
)
def test_arguments_out_of_range_are_refused(where, call):
    with refused(pax.errors.InvalidArgumentError, where=where):
        call()


def test_a_type_error_of_a_constructor_is_its_own():
    class Failing(pax.Module):
        def __init__(self, width):
            super().__init__()
            self.width = width + 1

    with pytest.raises(TypeError, match="concatenate"):
        Failing("3")
