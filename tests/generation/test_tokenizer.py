"""Tokenizer: files in, ids and texts out; chat templates; letters that come in parts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import pax_export as pax
from pax_export.generation import Tokenizer
from pax_export.generation._tokenizer_files import of_gguf
from tests.generation.nets import write_llama
from tests.refusals import refused

tokenizers = pytest.importorskip("tokenizers")
LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
TEMPLATE = (
    "{{ bos_token }}{% for each in messages %}{{ each.role }}: {{ each.content }}"
    "{% if not loop.last %}{{ '\n' }}{% else %}{% break %}{% endif %}{% endfor %}"
    "{% generation %}{% if add_generation_prompt %}{{ '\nA:' }}{% endif %}{% endgeneration %}"
)


def byte_level(words=("<s>", "<e>", *LETTERS, "he", "hel"), merges=(("h", "e"), ("he", "l"))):
    ids = {word: number for number, word in enumerate(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(ids, list(merges)))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "<e>"])
    return Tokenizer(inner, {"bos_token": "<s>", "eos_token": "<e>"}, TEMPLATE)


def gguf_file(path, fields):
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        name = f"tokenizer.{name}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


BYTES = {
    "ggml.model": "gpt2",
    "ggml.pre": "smollm",
    "ggml.tokens": ["<s>", "<e>", *LETTERS, "he", "hel", "12"],
    "ggml.token_type": [3, 3] + [1] * (len(LETTERS) + 3),
    "ggml.merges": ["h e", "he l", "1 2"],
    "ggml.bos_token_id": 0,
    "ggml.eos_token_id": 1,
    "chat_template": TEMPLATE,
}
_WORDS = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", *"▁abc", "ab", "▁ab", "bc", "▁abc"]
PIECES = {
    "ggml.model": "llama",
    "ggml.tokens": _WORDS,
    "ggml.scores": [0.0] * 5 + [-9.0] * 4 + [-2.0, -1.0, -3.0, -4.0],
    "ggml.token_type": [2, 3, 3, 6, 6] + [1] * 8,
    "ggml.bos_token_id": 1,
    "ggml.eos_token_id": 2,
    "ggml.unknown_token_id": 0,
}


def test_ids_texts_and_special_tokens():
    tokenizer = byte_level()
    text = "<s>help é<e>"
    ids = tokenizer.encode(text)
    assert [tokenizer.id_to_token(i) for i in ids[:3]] == ["<s>", "hel", "p"]
    assert tokenizer.decode(np.array(ids)) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "help é"
    assert tokenizer.stop == (1,) and tokenizer.vocab_size == len(LETTERS) + 4
    assert tokenizer.token_to_id("<e>") == 1 and tokenizer.token_to_id("none") is None


def test_pieces_of_a_stream_are_whole_letters_and_together_the_text():
    tokenizer = byte_level()
    text = "né€😀hello"
    assert list(tokenizer.stream(tokenizer.encode(text))) == ["n", "é", "€", "😀", "hel", "l", "o"]
    random = np.random.default_rng(0)
    for _ in range(50):  # bytes that are no letters, too
        ids = random.integers(0, tokenizer.vocab_size, 12)
        for skip in (False, True):
            assert "".join(tokenizer.stream(ids, skip)) == tokenizer.decode(ids, skip)


def test_a_folder_is_read_as_it_was_saved(tmp_path):
    tokenizer = byte_level()
    tokenizer.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = Tokenizer.from_pretrained(path)
        assert again.encode("<s>help") == tokenizer.encode("<s>help")
        assert again.special_tokens == tokenizer.special_tokens
        assert again.chat_template == TEMPLATE
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "</s>"}')
    Tokenizer(tokenizer._inner).save(tmp_path)  # the template and tokens of before are gone
    again = Tokenizer.from_pretrained(tmp_path)
    assert (again.chat_template, again.special_tokens) == (None, {})
    both = {"default": "d", "tool_use": "{{ tools[0].name }}"}
    two = Tokenizer(tokenizer._inner, {"image_token": "<s>"}, both)
    two.save(tmp_path / "two")
    again = Tokenizer.from_pretrained(tmp_path / "two")
    assert again.chat_templates == both and again.special_tokens == {"image_token": "<s>"}
    said = again.apply_chat_template([], tools=[{"name": "he"}], tokenize=False)
    assert said == "he"


def test_truncation_and_padding_of_a_file_are_ignored(tmp_path):
    tokenizer = byte_level()
    tokenizer._inner.enable_truncation(2)
    tokenizer._inner.enable_padding(length=9)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.json())
    assert len(Tokenizer.from_pretrained(tmp_path).encode("hhhh")) == 4


def test_older_files_describe_tokens_in_mappings(tmp_path):
    tokenizer = byte_level()
    inner = json.loads(tokenizer.json())
    inner["added_tokens"] = [each for each in inner["added_tokens"] if each["content"] == "<s>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(inner))
    said = {"eos_token": {"content": "<e>", "lstrip": False}, "chat_template": "x"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    found = Tokenizer.from_pretrained(tmp_path)
    assert found.stop == (1,) and found.chat_template == "x"
    assert found.encode("a<e>")[-1] == 1 and found.decode([1], skip_special_tokens=True) == ""


def test_tokens_that_only_the_configuration_describes_are_tokens(tmp_path):
    """As transformers has them: those with an id, then those without; with what they swallow."""
    tokenizer = byte_level()
    size = tokenizer.vocab_size
    tokenizer.save(tmp_path)
    said = {
        "added_tokens_decoder": {
            str(size + 1): {"content": "<b>", "special": False, "rstrip": True},
            str(size): {"content": "<a>", "special": True},
        },
        "extra_special_tokens": ["<s>", "<c>"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    found = Tokenizer.from_pretrained(tmp_path)
    assert found.encode("<a><b>  <c><s>") == [size, size + 1, size + 2, 0]
    assert found.decode([size, size + 1, size + 2], skip_special_tokens=True) == "<b>"
    (tmp_path / "tokenizer_config.json").write_text('{"split_special_tokens": true}')
    split = Tokenizer.from_pretrained(tmp_path)
    assert split.encode("<s>") != [0]
    split.save(tmp_path)
    assert Tokenizer.from_pretrained(tmp_path).encode("<s>") == split.encode("<s>")
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"a": 1}}')
    with refused(pax.errors.TokenizerError, "added_tokens_decoder"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("kind", "spaced", "plain"),
    [("GPT2Tokenizer", "Ġa", "a"), ("Qwen2TokenizerFast", "Ġa", "a"),
     ("PreTrainedTokenizerFast", "a", "a"), ("LlamaTokenizer", "▁a", "a")],
)  # fmt: skip
def test_the_space_before_a_text_is_that_of_the_configuration(kind, spaced, plain, tmp_path):
    byte_level().save(tmp_path)
    if kind == "LlamaTokenizer":
        before, after = tokenizers.pre_tokenizers, tokenizers.decoders
        ids = {each: number for number, each in enumerate(["?", "▁", "a", "▁a"])}
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [("▁", "a")], unk_token="?"))
        inner.pre_tokenizer = before.Metaspace(prepend_scheme="first", split=False)
        inner.decoder = after.Sequence([after.Replace("▁", " "), after.Strip(" ", 1, 0)])
        inner.save(str(tmp_path / "tokenizer.json"))
    for is_added, first in ((True, spaced), (False, plain)):
        said = {"tokenizer_class": kind, "add_prefix_space": is_added}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
        tokenizer = Tokenizer.from_pretrained(tmp_path)
        ids = tokenizer.encode("a")
        assert "".join(map(tokenizer._inner.id_to_token, ids)) == first
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_a_gguf_file_of_bytes(tmp_path):
    tokenizer = Tokenizer.from_gguf(gguf_file(tmp_path / "a.gguf", BYTES))
    ids = tokenizer.encode("<s>help é 12<e>")
    assert [tokenizer.id_to_token(i) for i in (ids[1], ids[-3], ids[-2])] == ["hel", "1", "2"]
    assert tokenizer.decode(ids) == "<s>help é 12<e>"
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<e>"}
    assert tokenizer.chat_template == TEMPLATE
    for cut, word in (
        ("gpt-2", ["12"]), ("llama-bpe", ["<s>", "12"]), ("qwen2", ["1", "2"]), ("olmo", ["12"]),
        ("dbrx", ["12"]), ("smaug-bpe", ["12"]), ("gpt-4o", ["12"]), ("refact", ["1", "2"]),
        ("starcoder", ["1", "2"]), ("deepseek-r1-qwen", ["1", "2"]), ("megrez", ["1", "2"]),
        ("kormo", ["1", "2"]), ("mellum", ["12"]), ("phi-2", ["12"]), ("a.x-4.0", ["12"]),
        ("exaone4", ["12"]), ("gigachat", ["12"]), *((name, ["<s>", "12"]) for name in (
            "llama-v3", "falcon3", "pixtral", "lfm2", "midm-2.0",
        )),
    ):  # fmt: skip
        path = gguf_file(tmp_path / f"{cut}.gguf", BYTES | {"ggml.pre": cut})
        other = Tokenizer.from_gguf(path)
        assert [other.id_to_token(i) for i in other.encode("12")] == word
        composed = "é" if cut in ("qwen2", "deepseek-r1-qwen", "megrez", "kormo") else "e\u0301"
        assert other.decode(other.encode("e\u0301"), True) == composed


def test_a_gguf_file_of_sentence_pieces(tmp_path):
    tokenizer = Tokenizer.from_gguf(gguf_file(tmp_path / "a.gguf", PIECES))

    def words(text):
        return [tokenizer.id_to_token(i) for i in tokenizer.encode(text)]

    assert words("abc") == ["<s>", "▁abc"]
    assert words("é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert words("c ab</s>") == ["<s>", "▁", "c", "▁ab", "</s>"]
    ids = tokenizer.encode("a éb", add_special_tokens=False)
    assert tokenizer.decode(ids) == "a éb" == "".join(tokenizer.stream(ids))
    bare = PIECES | {"ggml.add_space_prefix": False, "ggml.add_bos_token": False}
    tokenizer = Tokenizer.from_gguf(
        gguf_file(tmp_path / "b.gguf", bare | {"ggml.add_eos_token": True})
    )
    assert words("abc") == ["ab", "c", "</s>"]  # the better pair first


def test_chat_template():
    tokenizer = byte_level()
    messages = [{"role": "u", "content": "he"}, {"role": "a", "content": "l"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<s>u: he\na: l"
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenizer.decode(asked) == text + "\nA:"
    keys = Tokenizer(
        tokenizer._inner, {}, "{% for m in messages %}{{ m.keys() | list }}{% endfor %}"
    )
    called: list = [
        {"role": "a", "content": None, "tool_calls": []}
    ]  # as OpenAI's clients write it
    assert keys.apply_chat_template(called, tokenize=False) == "['role', 'tool_calls']"


TINY = pax.nets.DecoderConfig.llama(
    vocab_size=300, dim=4, num_layers=1, num_heads=2, hidden_dim=8, tied=True
)


def test_a_net_and_its_tokenizer_of_one_folder(tmp_path, monkeypatch):
    byte_level().save(tmp_path)
    monkeypatch.setattr(
        pax.nets.Decoder, "from_pretrained", lambda folder, **kw: pax.nets.Decoder(TINY, **kw)
    )
    lm, tokenizer = pax.generation.from_pretrained(tmp_path, layers="listed")
    assert not lm.is_scanned and lm.config.generation.stop == tokenizer.stop == (1,)
    small = pax.nets.DecoderConfig.llama(
        vocab_size=100, dim=4, num_layers=1, num_heads=2, hidden_dim=8
    )
    monkeypatch.setattr(pax.nets.Decoder, "from_pretrained", lambda f: pax.nets.Decoder(small))
    with refused(pax.errors.TokenizerError, where="from_pretrained: tokenizer"):
        pax.generation.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        ("{{ raise_exception('system first') }}", "TemplateError: system first"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_failing_templates_are_refused(template, said):
    tokenizer = Tokenizer(byte_level()._inner, None, template)
    with refused(pax.errors.TokenizerError, said):
        tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])


def test_each_missing_piece_of_a_language_model_is_named(tmp_path):
    folder = tmp_path / "lm"
    with refused(pax.errors.MissingWeightsFileError, got="no file and no folder"):
        pax.generation.from_pretrained(folder)
    byte_level().save(folder)
    with refused(pax.errors.WeightsFileError, "config.json", "tokenizer.json"):
        pax.generation.from_pretrained(folder)
    write_llama(folder)
    (folder / "model.safetensors").unlink()
    with refused(pax.errors.WeightsFileError, "config.json"):
        pax.generation.from_pretrained(folder)
    (folder / "config.json").write_text("[1]")
    with refused(pax.errors.WeightsFileError, got="ValueError: a list"):
        pax.generation.from_pretrained(folder)
    with refused(pax.errors.WeightsFileError, got="no folder"):
        pax.nets.Decoder.from_pretrained(tmp_path / "none")


@pytest.mark.parametrize(
    "call",
    [
        lambda tokenizer, wrong: tokenizer.decode(wrong),
        lambda tokenizer, wrong: list(tokenizer.stream([wrong])),
        lambda tokenizer, wrong: tokenizer.id_to_token(wrong),
    ],
)
@pytest.mark.parametrize("wrong", [None, "ab", 1.5, [1.5], [[1, 2]], [-1], [2**40], [None]])
def test_ids_are_integers(call, wrong):
    with pytest.raises((TypeError, OverflowError)):
        call(byte_level(), wrong)


def test_a_tokenizer_is_not_called():
    with refused(pax.errors.InvalidArgumentTypeError, "tokenizer.encode(text)"):
        byte_level()("hello", return_tensors="np")


@pytest.mark.parametrize(
    ("name", "entry", "value"),
    [
        ("tokenizer_config.json", "chat_template", [1.5]),
        ("tokenizer_config.json", "chat_template", [{"name": "default"}]),
        ("tokenizer_config.json", "chat_template", 5),
        ("tokenizer_config.json", "additional_special_tokens", 3),
        ("tokenizer_config.json", "added_tokens_decoder", [3]),
        ("tokenizer_config.json", "eos_token", "</s>"),
        ("chat_template.json", "chat_template", 5),
    ],
)
def test_wrong_entries_are_refused_with_their_file(name, entry, value, tmp_path):
    byte_level().save(tmp_path)
    (tmp_path / name).write_text(json.dumps({entry: value}), encoding="utf-8")
    with refused(pax.errors.TokenizerError, entry, str(tmp_path)):
        Tokenizer.from_pretrained(tmp_path)


def test_damaged_files_of_a_tokenizer_are_refused(tmp_path):
    byte_level().save(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with refused(
        pax.errors.TokenizerError, "UnicodeDecodeError", where=str(tmp_path / "chat_template.jinja")
    ):
        Tokenizer.from_pretrained(tmp_path)


def test_a_tokenizer_is_saved_whole_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("mine")
    byte_level().save(tmp_path)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    other = Tokenizer(byte_level()._inner, {}, "another")
    write = Path.write_bytes

    def full(self, content):
        if self.name == "tokenizer_config.json":
            write(self, content[:3])
            raise OSError(28, "No space left on device")
        return write(self, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    for folder in (tmp_path, tmp_path / "new"):
        with refused(pax.errors.ExportPathError, "No space", where=str(folder)):
            other.save(folder)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
    with refused(pax.errors.ExportPathError, str(tmp_path / "mine.txt")):
        other.save(tmp_path / "mine.txt")
    for use in (other.save, Tokenizer.from_pretrained, pax.generation.from_pretrained):
        with refused(pax.errors.InvalidArgumentTypeError, got="int: 3"):
            use(3)  # pyright: ignore[reportArgumentType]


def test_invalid_tokenizers_and_texts_are_refused(tmp_path):
    error = pax.errors.TokenizerError
    with refused(error, where="Tokenizer.apply_chat_template", got="templates (none)"):
        Tokenizer(byte_level()._inner).apply_chat_template([])
    with refused(pax.errors.InvalidArgumentTypeError, "takes JSON"):
        byte_level().apply_chat_template([{"role": "user", "content": object()}])
    with refused(pax.errors.InvalidArgumentTypeError, "one conversation"):
        byte_level().apply_chat_template([[{"role": "user", "content": "a"}]])  # pyright: ignore
    for wrong in ("Hello", {}, None):
        with refused(pax.errors.InvalidArgumentTypeError, "one conversation"):
            byte_level().apply_chat_template(wrong)  # pyright: ignore[reportArgumentType]
    with refused(pax.errors.InvalidArgumentTypeError, "tools"):
        byte_level().apply_chat_template([], tools="search")  # pyright: ignore
    with pytest.raises(TypeError, match="'int' object"):
        byte_level().token_to_id(3)  # pyright: ignore[reportArgumentType]
    for options in ({"special_tokens": 3}, {"special_tokens": "<s>"}, {"chat_template": 3}):
        with refused(pax.errors.InvalidArgumentTypeError, *options):
            Tokenizer(byte_level()._inner, **options)
    for keyword in ("continue_final_message", "return_tensors"):
        with refused(pax.errors.InvalidArgumentTypeError, f"no argument `{keyword}`"):
            byte_level().apply_chat_template([], **{keyword: True})
    with pytest.raises(TypeError, match="must be str"):
        byte_level().encode(["a"])  # pyright: ignore
    with refused(pax.errors.InvalidArgumentTypeError, where="Tokenizer", got="str"):
        Tokenizer("folder")
    with refused(error, where="Tokenizer: eos_token", got="'</s>'"):
        Tokenizer(byte_level()._inner, {"eos_token": "</s>"})
    with refused(error, got="a folder with nothing in it"):
        Tokenizer.from_pretrained(tmp_path)
    with refused(error, got="no file and no folder"):
        Tokenizer.from_pretrained(tmp_path / "none")
    for name, advice in (("tokenizer.model", "AutoTokenizer"), ("lm.gguf", "lm.gguf")):
        (tmp_path / name).write_bytes(b"")
        with refused(error, "tokenizer.json", advice):
            Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(error):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").rmdir()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(error):
        Tokenizer.from_pretrained(tmp_path)
    byte_level().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with refused(error, got="TypeError: a JSON object was expected, not [1]"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ggml.pre": "viking"}, "tokenizer.ggml.pre: 'viking', where a.x-4.0, dbrx"),
        ({"ggml.model": "t5"}, "tokenizer.ggml.model: 't5'"),
        ({"ggml.merges": ["he"]}, "Merges"),
        ({"ggml.merges": ["h q7"]}, "q7"),
        ({"ggml.token_type": [1]}, "1 kinds of"),
        ({"ggml.model": "llama"}, "KeyError: 'scores'"),
        ({"ggml.tokens": ["a", "a"]}, "twice"),
    ],
)
def test_unknown_vocabularies_are_refused(tmp_path, changed, said):
    path = gguf_file(tmp_path / "a.gguf", BYTES | changed)
    with refused(pax.errors.TokenizerError, said):
        Tokenizer.from_gguf(path)


@pytest.mark.parametrize("name", ["model", "tokens", "token_type", "scores"])
@pytest.mark.parametrize("wrong", [3, [[1]], {"a": 1}, ["1", float("nan")], None])
def test_metadata_of_another_type_is_refused(name, wrong):
    metadata = {f"tokenizer.{key}": value for key, value in PIECES.items()}
    with refused(pax.errors.TokenizerError, where="a.gguf"):
        of_gguf({**metadata, f"tokenizer.ggml.{name}": wrong}, "a.gguf")


def test_half_a_surrogate_pair_is_no_text():
    with pytest.raises(TypeError, match="must be str"):
        byte_level().encode("a\ud800")
