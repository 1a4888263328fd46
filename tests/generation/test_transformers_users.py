"""What users of transformers give: its keywords, masks, dtypes of torch."""

from __future__ import annotations

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_export as pax
from pax_export.generation import beam_search, prefill, samplers, speculate
from tests.generation.nets import TinyLM, alone, prompts, write_llama
from tests.refusals import refused

LM = TinyLM()
ROWS = prompts(5, 2, 3)
WRONG_TYPE = pax.errors.InvalidArgumentTypeError


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("temperature", "sampler=temperature(0.8)"),
        ("do_sample", "key=jax.random.key(0)"),
        ("eos_token_id", "stop="),
        ("attention_mask", "mask="),
        ("num_beams", "beam_search(lm"),
        ("seed", "key=jax.random.key(seed)"),
        ("max_new_token", "max_new_tokens=..."),
    ],
)
@pytest.mark.parametrize("function", [pax.generate, pax.generate.stream, beam_search])
def test_keywords_of_transformers_are_refused_with_ours(function, name, written):
    assert issubclass(WRONG_TYPE, TypeError)
    with refused(WRONG_TYPE, f"got: {name}=3") as caught:
        function(LM, ROWS, max_new_tokens=2, **{name: 3})
    assert written in caught.value.write


def test_missing_arguments_are_named():
    with pytest.raises(TypeError, match="max_new_tokens"):
        pax.generate(LM, ROWS, max_length=20)  # pyright: ignore
    with refused(WRONG_TYPE, "max_length="):
        prefill(LM, ROWS, max_new_tokens=20)


def test_signatures_stay_what_they_are():
    assert list(inspect.signature(prefill).parameters)[:4] == ["lm", "tokens", "lengths", "mask"]
    assert "max_new_tokens" in inspect.signature(pax.generate).parameters


@pytest.mark.parametrize("form", [np.array, jnp.array, list])
def test_padding_mask(form):
    left = [[0] * (5 - len(row)) + row for row in ROWS]
    mask = [[0] * (5 - len(row)) + [1] * len(row) for row in ROWS]
    expected = [alone(LM, row, 4) for row in ROWS]
    options = {"mask": form(mask), "max_new_tokens": 4}
    assert pax.generate(LM, form(left), **options).tolist() == expected
    columns = list(pax.generate.stream(LM, form(left), **options))
    assert np.stack(columns, 1).tolist() == expected
    assert speculate(LM, LM, form(left), **options).tolist() == expected
    assert beam_search(LM, form(left), beams=1, **options).tokens[:, 0].tolist() == expected
    logits, cache = prefill(LM, form(left), mask=form(mask), max_length=9)
    assert cache.lengths.tolist() == [5, 2, 3]
    assert logits.argmax(-1).tolist() == [row[0] for row in expected]


def test_a_mask_may_be_traced_and_have_holes():
    tokens, mask = (
        np.array([[7, 0, 8, 9, 0], [1, 2, 3, 4, 5]]),
        np.array([[1, 0, 1, 1, 0], [1] * 5]),
    )
    expected = [alone(LM, [7, 8, 9], 3), alone(LM, [1, 2, 3, 4, 5], 3)]
    reply = jax.jit(lambda tokens, mask: pax.generate(LM, tokens, mask=mask, max_new_tokens=3))
    assert reply(tokens, mask).tolist() == expected
    assert pax.generate(LM, tokens, mask=mask == 1, max_new_tokens=3).tolist() == expected


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"mask": [[1, 1]]}, "shape (1, 2)"),
        ({"mask": [[1.0, 1.0, 1.0]]}, "float64"),
        ({"mask": [[1, 1, 1]], "lengths": [3]}, "lengths"),
        ({"mask": [[0, 0, 0]]}, "row 0"),
    ],
)
def test_invalid_masks_are_refused(options, word):
    with refused(pax.errors.InvalidArgumentError, word):
        pax.generate(LM, [[1, 2, 3]], max_new_tokens=1, **options)


def test_dtypes_of_torch_are_taken_by_their_names():
    def dtype_of_torch(name):
        return type("dtype", (), {"__module__": "torch", "__repr__": lambda _: f"torch.{name}"})()

    config = pax.nets.DecoderConfig.llama(
        vocab_size=9, dim=4, num_layers=1, num_heads=2, hidden_dim=8
    )
    lm = pax.nets.Decoder(config, dtype=dtype_of_torch("bfloat16"))
    assert lm.embed.weight.dtype == jnp.bfloat16
    assert lm.init_cache(1, 4, dtype=dtype_of_torch("int8")).keys.codes.dtype == jnp.int8
    with refused(WRONG_TYPE, "int64"):
        pax.nets.Decoder(config, dtype=dtype_of_torch("int64"))


# --- generation_config.json ------------------------------------------------------------------


def read(folder, **said):
    (folder / "generation_config.json").write_text(json.dumps(said))
    return pax.nets.Decoder.from_pretrained(folder)


@pytest.fixture
def folder(tmp_path):
    return write_llama(tmp_path, layers=1)


def test_stops_and_padding_of_the_file_are_taken(folder):
    rows = [[3, 1, 4, 1, 5], [9, 2]]
    free = pax.generate(pax.nets.Decoder.from_pretrained(folder), rows, max_new_tokens=6)
    first, second = int(free[0, 2]), int(free[1, 1])
    lm = read(folder, eos_token_id=[first, second, 999], pad_token_id=7, max_length=20)
    assert lm.config.generation.stop == tuple(sorted({first, second}))
    options = {"max_new_tokens": 6}
    expected = pax.generate(lm, rows, stop=[first, second], pad=7, **options)
    assert expected.tolist() != free.tolist()
    assert pax.generate(lm, rows, **options).tolist() == expected.tolist()
    columns = list(pax.generate.stream(lm, rows, **options))
    assert np.stack(columns, 1).tolist() == expected[:, : len(columns)].tolist()
    assert speculate(lm, lm, rows, **options).tolist() == expected.tolist()
    assert beam_search(lm, rows, beams=1, **options).tokens[:, 0].tolist() == expected.tolist()
    # What a caller says counts.
    assert pax.generate(lm, rows, stop=(), **options).tolist() == free.tolist()
    # Programs and trees know no difference but that.
    assert jax.tree.structure(lm) == jax.tree.structure(pax.nets.Decoder(lm.config))


def test_the_sampler_of_the_file_draws_where_there_is_a_key(folder):
    rows, key = [[3, 1, 4, 1, 5]], jax.random.key(1)
    plain = pax.generate(pax.nets.Decoder.from_pretrained(folder), rows, max_new_tokens=8)
    said = {"do_sample": True, "temperature": 3.0, "top_p": 0.9, "top_k": 20, "min_p": 0.001}
    lm = read(folder, **said)
    sampler = (
        samplers.temperature(3.0) | samplers.top_k(20) | samplers.top_p(0.9) | samplers.min_p(0.001)
    )
    drawn = pax.generate(lm, rows, max_new_tokens=8, sampler=sampler, key=key)
    assert pax.generate(lm, rows, max_new_tokens=8, key=key).tolist() == drawn.tolist()
    assert drawn.tolist() != plain.tolist()
    assert pax.generate(lm, rows, max_new_tokens=8).tolist() == plain.tolist()
    # What transformers has for a missing key, and a penalty of the likeliest tokens.
    assert read(folder, do_sample=True).config.generation.top_k == 50
    lm = read(folder, repetition_penalty=1e6, temperature=0.5)
    assert len(set(pax.generate(lm, rows, max_new_tokens=8, key=key)[0].tolist())) == 8


def test_without_the_file_the_end_is_that_of_the_configuration(folder):
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "eos_token_id": 5}))
    assert pax.nets.Decoder.from_pretrained(folder).config.generation.stop == (5,)
    assert read(folder, eos_token_id=None).config.generation.stop == ()


def test_without_the_file_the_rules_are_those_of_the_configuration(folder):
    said = json.loads((folder / "config.json").read_text()) | {"repetition_penalty": 1.3}
    (folder / "config.json").write_text(json.dumps(said | {"no_repeat_ngram_size": 3}))
    with pytest.warns(pax.errors.PaxWarning, match="no_repeat_ngram_size: 3"):
        lm = pax.nets.Decoder.from_pretrained(folder)
    assert lm.config.generation.repetition_penalty == 1.3
    assert read(folder).config.generation.repetition_penalty == 1


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"temperature": "hot"}, "temperature"),
        ({"do_sample": "yes"}, "do_sample"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": 2}, "min_p"),
    ],
)
def test_invalid_values_of_the_file_are_refused(folder, said, word):
    with refused(pax.errors.InvalidArgumentError, f"generation_config.json: {word}"):
        read(folder, **said)


def test_a_damaged_file_and_keys_without_effect_are_named(folder):
    with pytest.warns(pax.errors.PaxWarning, match="no_repeat_ngram_size: 3") as caught:
        read(folder, no_repeat_ngram_size=3, num_beams=1, use_cache=True, typical_p=1.0)
    assert [each.filename for each in caught] == [__file__]
    (folder / "generation_config.json").write_text("[1")
    with refused(pax.errors.WeightsFileError, "generation_config.json"):
        pax.nets.Decoder.from_pretrained(folder)
