"""Beams, samplers and speculation, beside those of transformers."""

from __future__ import annotations

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.generation import logits_process as processors

import pax_export as pax
from pax_export.generation import beam_search, samplers, speculate
from tests.closeness import assert_close

VOCABULARY, COUNT, PAD = 29, 7, 1
ROWS = [np.random.default_rng(n).integers(3, VOCABULARY, n).tolist() for n in (6, 2, 4, 1)]
SIZES = {
    "llama": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
    },
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
}
KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "gpt2": (GPT2Config, GPT2LMHeadModel)}


@pytest.fixture(scope="module", params=SIZES)
def nets(request, tmp_path_factory):
    """A net of transformers with random weights, and the Decoder of its files."""
    config, net = KINDS[request.param]
    torch.manual_seed(0)
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    # Probabilities so even that texts of any length are among the best.
    sizes = {**SIZES[request.param], "vocab_size": VOCABULARY, "initializer_range": 0.15}
    theirs = net(config(**sizes, **special)).eval()
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, pax.nets.Decoder.from_pretrained(folder)


def generated(net, rows, **options):
    """What transformers generates; rows are padded on the left there."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    options = {"max_new_tokens": COUNT, "pad_token_id": PAD, "do_sample": False, **options}
    with torch.no_grad():
        made = net.generate(
            ids, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **options
        )
    tokens = made.sequences[:, width:].numpy()
    missing = COUNT - tokens.shape[1]
    return np.pad(tokens, ((0, 0), (0, missing)), constant_values=PAD), made


@pytest.mark.parametrize(
    ("beams", "early_stopping", "stop"),
    [(2, False, [5]), (3, True, [4, 9]), (4, "never", [8, 3, 20]), (5, False, [7, 11, 12, 25])],
)
def test_all_beams_are_those_of_transformers(nets, beams, early_stopping, stop):
    theirs, lm = nets
    options = {"early_stopping": early_stopping}
    for penalty in (-1.0, 0.0, 0.5, 1.0, 2.0):
        found = beam_search(
            lm, ROWS, max_new_tokens=COUNT, beams=beams, stop=stop, pad=PAD,
            length_penalty=penalty, **options,
        )  # fmt: skip
        tokens, made = generated(
            theirs, ROWS, num_beams=beams, num_return_sequences=beams, eos_token_id=stop,
            length_penalty=penalty, **options,
        )  # fmt: skip
        assert np.array_equal(found.tokens, tokens.reshape(len(ROWS), beams, COUNT))
        scores = made.sequences_scores.numpy().reshape(len(ROWS), beams)
        assert_close(found.scores, scores, rtol=1e-5, atol=1e-5)


LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "ab", "cd", "ee"]


@pytest.fixture(scope="module")
def letters():
    """A tokenizer of transformers whose tokens are letters, and some pairs."""
    model = tokenizers.models.BPE({each: i for i, each in enumerate(LETTERS)}, merges=[])
    inner = tokenizers.Tokenizer(model)
    inner.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=LETTERS[PAD])


#: transformers looks for strings in prompts too: no string here has the last letter of these.
OF_LETTERS = [[*row, LETTERS.index("z")] for row in ROWS]


def likely_strings(lm, tokenizer):
    """Strings of one letter, of two and of half a token among the likeliest texts."""
    found = beam_search(lm, OF_LETTERS, max_new_tokens=COUNT, beams=5, stop=())
    texts = [tokenizer.decode(text) for row in found.tokens.tolist() for text in row]
    pairs = sorted({text[i : i + 2] for text in texts for i in range(1, 5)})
    return [each for each in [*pairs[::4], "ee", "d", texts[0][2:5]] if "z" not in each]


@pytest.mark.parametrize("beams", [2, 5])
def test_beams_that_end_at_strings_are_those_of_transformers(nets, letters, beams):
    theirs, lm = nets
    strings, ended = likely_strings(lm, letters), 0
    for (chosen, stop), (penalty, early) in itertools.product(
        ((strings[:2], []), (strings[-3:], [5, 9])), ((0.0, False), (1.0, True))
    ):
        found = beam_search(
            lm, OF_LETTERS, max_new_tokens=COUNT, beams=beams, stop=[*chosen, *stop],
            tokenizer=letters, pad=PAD, length_penalty=penalty, early_stopping=early,
        )  # fmt: skip
        tokens, made = generated(
            theirs, OF_LETTERS, num_beams=beams, num_return_sequences=beams, stop_strings=chosen,
            tokenizer=letters, eos_token_id=stop or None, length_penalty=penalty,
            early_stopping=early,
        )  # fmt: skip
        tokens = np.where(tokens < 0, PAD, tokens)  # what it writes where there is no stop token
        assert np.array_equal(found.tokens, tokens.reshape(len(ROWS), beams, COUNT))
        scores = made.sequences_scores.numpy().reshape(len(ROWS), beams)
        assert_close(found.scores, scores, rtol=1e-5, atol=1e-5)
        texts = [letters.decode(text) for row in found.tokens.tolist() for text in row]
        ended += sum([any(each in text for each in chosen) for text in texts])
    assert ended > 4 * beams  # of 16 * beams texts


def test_greedy_texts_that_end_at_strings_are_those_of_transformers(nets, letters):
    theirs, lm = nets
    for strings in (likely_strings(lm, letters)[:2], ["d"]):
        options = {"max_new_tokens": COUNT, "stop": strings, "tokenizer": letters, "pad": PAD}
        made = pax.generate(lm, OF_LETTERS, **options)
        for row, text in zip(OF_LETTERS, made.tolist()):
            expected, _ = generated(theirs, [row], stop_strings=strings, tokenizer=letters)
            assert text == expected[0].tolist()
        for draft in (lm, jax.tree.map(lambda x: -x if x.ndim > 2 else x, lm)):
            guessed = speculate(lm, draft, OF_LETTERS, **options)
            assert np.array_equal(guessed, made)


def test_greedy_tokens_are_those_of_transformers(nets):
    theirs, lm = nets
    for stop in ([], [5, 9, 13, 20]):
        expected, _ = generated(theirs, ROWS, eos_token_id=stop or None)
        made = pax.generate(lm, ROWS, max_new_tokens=COUNT, stop=stop, pad=PAD)
        assert np.array_equal(made, expected)
        draft = jax.tree.map(lambda x: -x if x.ndim > 2 else x, lm)
        guessed = speculate(lm, draft, ROWS, max_new_tokens=COUNT, stop=stop, pad=PAD)
        assert np.array_equal(guessed, expected)
    # transformers counts padding on the left as seen, so rows are of one length.
    rows = [ROWS[0], ROWS[0][::-1]]
    expected, _ = generated(theirs, rows, repetition_penalty=3.0)
    sampler = samplers.repetition_penalty(3.0) | samplers.greedy()
    assert np.array_equal(pax.generate(lm, rows, max_new_tokens=COUNT, sampler=sampler), expected)


WARPERS = [
    *[(samplers.temperature(t), [processors.TemperatureLogitsWarper(t)]) for t in (0.5, 0.7, 3.0)],
    *[(samplers.top_k(k), [processors.TopKLogitsWarper(k)]) for k in (1, 7, 60)],
    *[(samplers.top_p(p), [processors.TopPLogitsWarper(p)]) for p in (0.01, 0.5, 0.9, 0.999)],
    *[(samplers.min_p(p), [processors.MinPLogitsWarper(p)]) for p in (0.01, 0.3, 1.0)],
    *[
        (samplers.repetition_penalty(r), [processors.RepetitionPenaltyLogitsProcessor(r)])
        for r in (0.5, 1.3)
    ],
    (
        samplers.repetition_penalty(1.2) | samplers.temperature(0.8)
        | samplers.top_k(20) | samplers.top_p(0.9) | samplers.min_p(0.05),
        [
            processors.RepetitionPenaltyLogitsProcessor(1.2),
            processors.TemperatureLogitsWarper(0.8),
            processors.TopKLogitsWarper(20),
            processors.TopPLogitsWarper(0.9),
            processors.MinPLogitsWarper(0.05),
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sampler", "theirs"), WARPERS, ids=lambda x: str(x) if isinstance(x, samplers.Sampler) else ""
)
def test_samplers_are_processors_of_transformers(sampler, theirs):
    random = np.random.default_rng(0)
    for scale in (0.3, 2.0, 5.0):
        logits = random.normal(size=(64, 50), scale=scale).astype(np.float32)
        ids = random.integers(0, 50, (64, 9))
        seen = np.zeros((64, 50), bool)
        np.put_along_axis(seen, ids, True, axis=1)
        expected = torch.tensor(logits)
        for each in theirs:
            expected = each(torch.tensor(ids), expected)
        made = sampler.adjust(jnp.asarray(logits), jnp.asarray(seen))
        assert np.array_equal(np.isfinite(made), np.isfinite(expected.numpy()))
        assert_close(jax.nn.softmax(made), torch.softmax(expected, -1).numpy(), rtol=0, atol=1e-6)


def test_left_padded_prompts_with_a_mask_give_the_tokens_of_transformers(nets):
    theirs, lm = nets
    width = max(map(len, ROWS))
    tokens = np.array([[0] * (width - len(row)) + row for row in ROWS])
    mask = np.array([[0] * (width - len(row)) + [1] * len(row) for row in ROWS])
    expected, _ = generated(theirs, ROWS, eos_token_id=[5, 9])
    options = {"max_new_tokens": COUNT, "stop": [5, 9], "pad": PAD}
    assert np.array_equal(pax.generate(lm, tokens, mask=mask, **options), expected)
    given = torch.tensor(tokens), torch.tensor(mask)  # as a tokenizer gives them
    assert np.array_equal(pax.generate(lm, given[0], mask=given[1], **options), expected)
    assert np.array_equal(speculate(lm, lm, tokens, mask=mask, **options), expected)
    found = beam_search(lm, tokens, mask=mask, beams=3, **options)
    beams, _ = generated(theirs, ROWS, num_beams=3, num_return_sequences=3, eos_token_id=[5, 9])
    assert np.array_equal(found.tokens, beams.reshape(len(ROWS), 3, COUNT))


def _refused(function, name):
    with pytest.raises(TypeError) as caught:
        function(**{name: None})
    assert isinstance(caught.value, pax.errors.PaxError)
    return caught.value.write


#: Arguments that nothing here corresponds to, so that their error lists ours.
WITHOUT_COUNTERPART = frozenset(
    """
    assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
    assistant_lookbehind compile_config continuous_batching_config custom_generate disable_compile
    dola_layers encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id is_assistant
    max_matching_ngram_size num_assistant_tokens_schedule penalty_alpha remove_invalid_values
    renormalize_logits speculation_type synced_gpus target_lookbehind token_healing
    transformers_version use_mtp watermarking_config
    """.split()
)


def test_every_argument_of_transformers_with_a_counterpart_has_a_sentence():
    arguments = inspect.signature(GenerationMixin.generate).parameters
    names = {*arguments, *GenerationConfig().__dict__, "attention_mask", "input_ids"}
    ours = inspect.signature(pax.generate).parameters
    for name in names - {"self", "kwargs", *ours} - WITHOUT_COUNTERPART:
        if not name.startswith("_"):
            assert "one of lm" not in _refused(pax.generate, name), name


def test_dtypes_of_torch_are_taken(nets, tmp_path):
    nets[0].save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.half, torch.float32):
        lm = pax.nets.Decoder.from_pretrained(tmp_path, dtype=dtype)
        assert str(lm.embed.weight.dtype) == str(dtype).removeprefix("torch.")
        assert lm.init_cache(1, 4, dtype=dtype).keys.dtype == lm.embed.weight.dtype


def test_texts_end_at_the_strings_of_transformers(nets):
    theirs, lm = nets
    words = {"abcdefghijklmnopqrstuvwxyz.,!"[i]: i for i in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    free = pax.generate(lm, ROWS, max_new_tokens=COUNT)
    ended = 0
    for start, size in ((1, 1), (2, 2), (0, 3)):
        stop = [tokenizer.decode(row[start : start + size].tolist()) for row in free[:3]]
        # Ours begin among the new tokens; those of transformers may begin in the prompt.
        ends = [tokenizer.decode(row)[-size:] for row in ROWS]
        begun = [end[-i:] for end in ends for i in range(1, size)]
        stop = [each for each in stop if not each.startswith(tuple(begun))]
        # Without the id of an end transformers pads no row.
        expected, _ = generated(
            theirs, ROWS, stop_strings=stop, tokenizer=wrapped, eos_token_id=[5]
        )
        for given in (tokenizer, wrapped):
            options = {"stop": [*stop, 5], "tokenizer": given, "pad": PAD, "max_new_tokens": COUNT}
            assert np.array_equal(pax.generate(lm, ROWS, **options), expected)
        ended += (expected != free).any()
    assert ended == 3


@pytest.mark.parametrize(
    "said",
    [
        {"eos_token_id": [5, 9], "pad_token_id": PAD},
        {"eos_token_id": 11, "pad_token_id": PAD, "repetition_penalty": 3.0},
    ],
)
def test_defaults_of_a_file_are_those_of_transformers(nets, tmp_path, said):
    theirs, _ = nets
    theirs.save_pretrained(tmp_path)
    GenerationConfig(**said).save_pretrained(tmp_path)
    lm = pax.nets.Decoder.from_pretrained(tmp_path)
    again = type(theirs).from_pretrained(tmp_path).eval()
    rows = [ROWS[0], ROWS[0][::-1]]  # transformers counts padding on the left as seen
    with torch.no_grad():
        made = again.generate(torch.tensor(rows), max_new_tokens=COUNT)[:, len(rows[0]) :].numpy()
    expected = np.pad(made, ((0, 0), (0, COUNT - made.shape[1])), constant_values=PAD)
    assert np.array_equal(pax.generate(lm, rows, max_new_tokens=COUNT), expected)


def test_every_key_of_generation_is_taken_or_known(tmp_path):
    from pax_export.nets.decoder import _generation as ours

    known = {*ours._READ, *ours._WITHOUT_EFFECT}
    # These change tokens, and are named by a warning.
    changing = {*GenerationConfig().__dict__} - known
    assert {"no_repeat_ngram_size", "suppress_tokens", "stop_strings", "num_beams"} <= changing
