"""Values of a stranger's configuration: each is judged before anything of its size is made."""

from __future__ import annotations

import numpy as np
import pytest

import pax_export as pax
from pax_export.nets._layer_kind import LayerKind, shortest_pattern
from tests.nets import decoder_reference as reference
from tests.nets.decoder_gguf import write_gguf

GGUF = {
    "general.architecture": "llama", "tokenizer.ggml.tokens": ["a"] * 9,
    "llama.embedding_length": 8, "llama.block_count": 2, "llama.attention.head_count": 2,
    "llama.feed_forward_length": 8, "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"


def refused(call) -> str:
    with pytest.raises(pax.errors.InvalidArgumentError) as raised:
        call()
    return str(raised.value)


def of_hf(**others):
    return pax.nets.DecoderConfig.from_hf({**reference.LLAMA, **others})


def of_gguf(**others):
    values = {f"llama.{name.replace('__', '.')}": value for name, value in others.items()}
    return pax.nets.DecoderConfig.from_gguf(GGUF | values)


class Counted(LayerKind):
    """A kind that counts how often it is compared."""

    compared = 0

    def __eq__(self, other):
        Counted.compared += 1
        return self.window == other.window

    __hash__ = LayerKind.__hash__


@pytest.mark.parametrize("windows", [[3] * 999 + [4], [3, 3, 4] * 333 + [3], [3, 4] * 500])
def test_a_pattern_is_found_by_few_comparisons(windows):
    Counted.compared = 0
    pattern = shortest_pattern([Counted(window) for window in windows])
    assert Counted.compared <= 4 * len(windows)
    assert [pattern[i % len(pattern)].window for i in range(len(windows))] == windows
    shorter = [windows[i % n] for n in range(1, len(pattern)) for i in range(len(windows))]
    rows = np.reshape(shorter, (-1, len(windows)))
    assert not (rows == windows).all(1).any()


def test_there_is_a_word_for_each_layer():
    words = [FULL, SLIDING, FULL, FULL]  # of a net of four, cut to two
    window = {"use_sliding_window": True, "sliding_window": 3}
    two = of_hf(model_type="qwen3", layer_types=words, **window)
    assert [two.kind_of(i).window for i in range(two.num_layers)] == [None, 3]
    text = refused(lambda: of_hf(model_type="gemma2", layer_types=[FULL], hidden_act=None))
    assert text.endswith(
        "  where: config.json: layer_types\n  got: ['full_attention']\n"
        "  write: a word for each of the 2 layers"
    )


@pytest.mark.parametrize(
    ("call", "where", "got"),
    [
        (lambda: of_hf(rms_norm_eps=1e-320), "rms_norm_eps", "1e-320"),
        (lambda: of_hf(rope_scaling={"type": "linear", "factor": 1e-320}), "factor", "1e-320"),
        (
            lambda: of_hf(rope_scaling={"type": "yarn", "factor": 2.0, "beta_fast": 1e308}),
            "beta_fast",
            "1e+308",
        ),
        (lambda: of_gguf(rope__freq_base=1e-310), "rope.freq_base", "1e-310"),
    ],
)
def test_numbers_with_which_sums_have_no_end_are_named(call, where, got):
    text = refused(call)
    assert text.startswith("A configuration has a number that no net has.\n")
    assert f"{where}\n  got: {got}\n" in text


def test_a_base_that_yarn_cannot_count_by_is_named():
    text = refused(lambda: of_hf(rope_theta=1.0, rope_scaling={"type": "yarn", "factor": 2.0}))
    assert "where: DecoderConfig.rotary_base\n  got: 1.0\n  write: a base above 1" in text
    assert of_hf(rope_theta=1.0).rotary_base == 1.0


def test_arrays_of_a_gguf_file_are_judged_as_lists():
    """numpy's arrays, as which they are read, are neither equal nor unequal to a word."""
    many = np.array([2, 4], np.int32)
    for name in ("attention__head_count", "expert_count"):
        text = refused(lambda: of_gguf(**{name: many}))  # noqa: B023
        assert text.startswith("The configuration has a value that Decoder does not support.")
        assert text.endswith("got: [2, 4]\n  write: a model without it")
    assert "got: [2, 4]" in refused(lambda: of_gguf(rope__scaling__type=many))
    assert "got: [2, 4]" in refused(lambda: of_gguf(embedding_length=many))
    assert "got: 9.22e+18" in refused(lambda: of_gguf(embedding_length=np.int64(2**63 - 1)))


def test_messages_are_short_whatever_they_show():
    deep = []
    for _ in range(5000):
        deep = [deep]
    for value in ("x" * 10**6, [10**5000], deep, {"a" * 10**6: deep}):
        for name in ("model_type", "hidden_size", "hidden_act", "rope_theta", "layer_types"):
            config = {"model_type": "qwen3", name: value}
            assert len(refused(lambda: of_hf(**config))) < 600  # noqa: B023
    keys = {"model_type": "llama", **{f"{'k' * 10**5}{i}": 1 for i in range(9)}}
    assert len(refused(lambda: pax.nets.DecoderConfig.from_hf(keys))) < 1200


def test_a_table_of_frequencies_of_another_size_is_named(tmp_path):
    config = reference.CONFIGS["smollm2"]
    weights = reference.random_weights(config)
    for table, text in (
        (np.ones(3, np.float32), "got: 3 numbers for 4 channels that turn\n  write: 2 numbers"),
        (np.zeros(2, np.float32), "where: RotaryScaling.table\n  got: 0.0"),
        (np.ones((2, 2), np.float32), "where: RotaryScaling.table\n  got: [1.0, 1.0]"),
    ):
        path = write_gguf(tmp_path / "net.gguf", config, weights, rope_freqs=table)
        assert text in refused(lambda: pax.nets.Decoder.from_gguf(path))  # noqa: B023
