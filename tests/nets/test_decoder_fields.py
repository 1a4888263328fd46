"""Values of a stranger's configuration: each is judged before anything of its size is made."""

from __future__ import annotations

import numpy as np
import pytest

import pax_export as pax
from pax_export.nets import LayerKind
from pax_export.nets.decoder._fields import shortest_pattern
from tests.nets import decoder_reference as reference
from tests.nets.decoder_gguf import of_gguf, write_gguf
from tests.refusals import refused

INVALID = pax.errors.InvalidArgumentError
MANY = np.array([2, 4], np.int32)  # as lists of a GGUF file are read
SLIDING, FULL = "sliding_attention", "full_attention"


def of_hf(**others):
    return pax.nets.DecoderConfig.from_hf({**reference.LLAMA, **others})


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


def test_layer_types_have_one_entry_per_layer():
    words = [FULL, SLIDING, FULL, FULL]  # of a net of four, cut to two
    window = {"use_sliding_window": True, "sliding_window": 3}
    two = of_hf(model_type="qwen3", layer_types=words, **window)
    assert [two.kind_of(i).window for i in range(two.num_layers)] == [None, 3]
    with refused(INVALID, where="config.json: layer_types", got="['full_attention']"):
        of_hf(model_type="gemma2", layer_types=[FULL], hidden_act=None)


@pytest.mark.parametrize(
    ("call", "where", "got"),
    [
        (lambda: of_hf(rope_theta=1.0, rope_scaling={"type": "yarn", "factor": 2.0}),
         "DecoderConfig.rotary_base", "1.0"),
        (lambda: of_gguf(attention__head_count=MANY), "head_count", "[2, 4]"),
        (lambda: of_gguf(expert_count=MANY), "expert_count", "[2, 4]"),
        (lambda: of_gguf(rope__scaling__type=MANY), "scaling.type", "[2, 4]"),
        (lambda: of_gguf(embedding_length=MANY), "embedding_length", "[2, 4]"),
    ],
)  # fmt: skip
def test_invalid_numbers_are_refused(call, where, got):
    with refused(INVALID, f"{where}\n  got: {got}\n"):
        call()
    assert of_hf(rope_theta=1.0).rotary_base == 1.0  # without yarn


def test_messages_are_short_whatever_they_show():
    deep = []
    for _ in range(5000):
        deep = [deep]
    for value in ("x" * 10**6, deep, {"a" * 10**6: deep}):
        for name in ("model_type", "hidden_size", "hidden_act", "rope_theta", "layer_types"):
            config = {"model_type": "qwen3", name: value}
            with refused(INVALID) as caught:
                of_hf(**config)
            assert len(str(caught.value)) < 600
    keys = {"model_type": "llama", **{f"{'k' * 10**5}{i}": 1 for i in range(9)}}
    with refused(INVALID) as caught:
        pax.nets.DecoderConfig.from_hf(keys)
    assert len(str(caught.value)) < 1200


def test_invalid_frequency_tables_are_refused(tmp_path):
    config = reference.CONFIGS["smollm2"]
    weights, path = reference.random_weights(config), tmp_path / "net.gguf"
    for table, text in (
        (np.ones(3, np.float32), "got: 3 numbers for 4 rotated channels"),
        (np.zeros(2, np.float32), f"where: RotaryScaling.table, in {path}\n  got: 0.0"),
        (np.ones((2, 2), np.float32), f"where: RotaryScaling.table, in {path}\n  got: [1.0, 1.0]"),
    ):
        write_gguf(path, config, weights, rope_freqs=table)
        with refused(INVALID, text):
            pax.nets.Decoder.from_gguf(path)
