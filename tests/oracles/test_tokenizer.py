"""Tokenizer beside those of transformers: ids, texts, special tokens, chat templates."""

from __future__ import annotations

import numpy as np
import pytest
import transformers

from pax_export.generation import Tokenizer
from tests.generation.test_tokenizer import BYTES, TEMPLATE

LETTERS = "abch el12\n\t'é€😀ſ.,<s></s>\u0301  "
VOCABULARY = {word: number for number, word in enumerate(BYTES["ggml.tokens"])}
MERGES = [tuple(each.split()) for each in BYTES["ggml.merges"]]
SPECIAL = {"bos_token": "<s>", "eos_token": "<e>", "unk_token": "<s>", "pad_token": "<e>"}
_PIECES = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], *"▁abchel"]
PIECES = {word: number for number, word in enumerate([*_PIECES, "▁a", "he", "▁he"])}


def made(name):
    if name == "llama":
        merges = [("▁", "a"), ("h", "e"), ("▁", "he")]
        return transformers.LlamaTokenizer(vocab=dict(PIECES), merges=merges, pad_token="</s>")
    kinds = {"gpt2": transformers.GPT2Tokenizer, "qwen2": transformers.Qwen2Tokenizer}
    return kinds[name](vocab=dict(VOCABULARY), merges=list(MERGES), **SPECIAL)


@pytest.fixture(params=["llama", "gpt2", "qwen2"])
def pair(request, tmp_path):
    """A tokenizer of transformers, and ours of the folder that it saves."""
    tokenizer = made(request.param)
    tokenizer.chat_template = TEMPLATE + "{{ pad_token }}"
    tokenizer.save_pretrained(tmp_path)
    return transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_pretrained(tmp_path)


def test_ids_and_texts(pair):
    theirs, ours = pair
    random = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(random.choice(list(LETTERS), random.integers(0, 20)))
        for add in (True, False):
            assert ours.encode(text, add) == theirs.encode(text, add_special_tokens=add), text
        ids = random.integers(0, ours.vocab_size, random.integers(0, 9))
        for skip in (True, False):
            said = theirs.decode(ids.tolist(), skip_special_tokens=skip)
            assert ours.decode(ids, skip) == said
            own = ours.encode(text)
            assert "".join(ours.stream(own, skip)) == theirs.decode(own, skip_special_tokens=skip)
    assert ours.stop == (theirs.eos_token_id,)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1


@pytest.mark.parametrize("add", [True, False])
def test_conversations(pair, add):
    theirs, ours = pair
    messages = [{"role": "user", "content": "he <s>"}, {"role": "assistant", "content": "a"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=add)
    options = {"add_generation_prompt": add}
    assert ours.apply_chat_template(messages, tokenize=False, **options) == text
    ids = theirs.apply_chat_template(messages, return_dict=False, **options)
    assert ours.apply_chat_template(messages, **options) == ids


def test_what_is_saved_transformers_reads(pair, tmp_path):
    theirs, ours = pair
    ours.save(tmp_path / "again")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    text = "he a é 12 <s>abc</s>"
    assert again.encode(text) == theirs.encode(text)
    assert (again.eos_token, again.pad_token) == (theirs.eos_token, theirs.pad_token)
    assert again.chat_template == theirs.chat_template
