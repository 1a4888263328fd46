"""Language models for the runtimes of others: what is written, and what is refused.

The runtimes themselves continue texts in tests/oracles/test_runtimes.py.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import pax_export as pax
from pax_export.generation import Tokenizer
from pax_export.generation._tokenizer_files import of_gguf
from tests.adapters.layers import disturbed
from tests.closeness import assert_close
from tests.generation.test_tokenizer import LETTERS, TEMPLATE, byte_level
from tests.nets import decoder_reference as reference
from tests.refusals import refused

pytest.importorskip("tokenizers")
export = pax.generation.export
#: The others are run in tests/oracles.
some_families = pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt2"])
pytestmark = pytest.mark.filterwarnings("ignore::pax_export.errors.NotValidatedWarning")


def net(family: str, folder: Path, **changes: object) -> pax.nets.Decoder:
    """A tiny random net whose vocabulary is larger than that of `byte_level`."""
    few = {"num_hidden_layers": 2, "sliding_window_pattern": 2} if family == "gemma3" else {}
    config = {**reference.CONFIGS[family], "vocab_size": 270, **few, **changes}
    path = reference.write_folder(folder, config, reference.random_weights(config))
    return pax.nets.Decoder.from_pretrained(path)


def ascii_tokenizer() -> Tokenizer:
    """One whose tokens are all letters: a runtime that gives texts shows each of them."""
    letters = [chr(each) for each in range(33, 127)]
    pairs = [(one, other) for one in "abcdefgh" for other in letters[-30:]]
    words = ["<s>", "<e>", *letters, "Ġ", "Ċ", *("".join(pair) for pair in pairs)][:270]
    merges = [pair for pair in pairs if "".join(pair) in words]
    made = byte_level(tuple(words), tuple(merges))
    template = TEMPLATE.replace("{% else %}{% break %}", "")  # which LiteRT-LM does not know
    return Tokenizer(made._inner, made.special_tokens, template)


def contents(folder: Path) -> dict[str, bytes]:
    files = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    return {str(each.relative_to(folder)): each.read_bytes() for each in files if each.is_file()}


# --- genai ----------------------------------------------------------------------------------


@some_families
@pytest.mark.parametrize("is_fused", [False, True])
def test_onnxruntime_reads_texts_of_several_lengths_padded_on_the_left(family, is_fused, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    # Kernels of onnxruntime take heads of multiples of 8; then one of several rows takes one token.
    changes = ({"n_embd": 24} if family == "gpt2" else {"head_dim": 8}) if is_fused else {}
    lm = net(family, tmp_path / "hf", **changes)
    options = {"tokenizer": byte_level(), "max_length": 16, "validate": False}
    report = export(lm, tmp_path / "served", format="genai", **options)
    assert report.target == "genai" and report.validated is None
    session = onnxruntime.InferenceSession(tmp_path / "served" / "onnx" / "model.onnx")
    said = json.loads((tmp_path / "served" / "genai_config.json").read_text())
    assert said["search"]["past_present_share_buffer"] is is_fused
    config = lm.config
    tokens = np.random.default_rng(0).integers(0, 270, (2, 7))
    expected = np.asarray(lm(tokens))
    mask = np.ones((2, 7), np.int64)
    padded, mask[1, :3] = tokens.copy(), 0
    padded[1] = np.roll(tokens[1], 3)  # its first four tokens stand at the end
    cache = {
        f"past_key_values.{i}.{name}": np.zeros((2, config.num_kv_heads, 0, config.head_size), "f")
        for i in range(config.num_layers)
        for name in ("key", "value")
    }
    found = []
    for first, last in ((0, 4), (4, 5), (5, 6), (6, 7)) if is_fused else ((0, 4), (4, 6), (6, 7)):
        given = {"input_ids": padded[:, first:last], "attention_mask": mask[:, :last], **cache}
        names = [each.name for each in session.get_outputs()]
        made = dict(zip(names, session.run(names, given)))
        found.append(made.pop("logits"))
        cache = {name.replace("present", "past_key_values"): value for name, value in made.items()}
    found = np.concatenate(found, 1)
    assert_close(found[0], expected[0], rtol=1e-5)
    assert_close(found[1, 3:], expected[1, :4], rtol=1e-5)


def test_the_folder_for_onnxruntime_genai(tmp_path):
    onnx = pytest.importorskip("onnx")
    lm = net("smollm2", tmp_path / "hf")
    options = {"tokenizer": byte_level(), "max_length": 16, "validate": False, "format": "genai"}
    for name in ("one", "other"):
        export(lm, tmp_path / name, **options)
    files = contents(tmp_path / "one")
    assert files == contents(tmp_path / "other")  # byte for byte
    assert {"genai_config.json", "config.json", "tokenizer.json", "onnx/model.onnx"} <= set(files)
    said = json.loads(files["genai_config.json"])
    assert said["model"]["eos_token_id"] == 1 and said["model"]["bos_token_id"] == 0
    assert said["model"]["context_length"] == said["search"]["max_length"] == 16
    assert json.loads(files["generation_config.json"])["eos_token_id"] == 1
    assert Tokenizer.from_pretrained(tmp_path / "one").stop == (1,)
    graph = onnx.load(tmp_path / "one" / "onnx" / "model.onnx", load_external_data=False).graph
    rows = {each.type.tensor_type.shape.dim[0].dim_param for each in (*graph.input, *graph.output)}
    assert rows == {"batch_size"}  # the one name of which transformers.js makes an empty cache
    assert pax.export.Report.read(tmp_path / "one").details["files"] == sorted(
        {*files} - {"pax_export.json"}
    )
    with refused(pax.errors.ExportPathError):
        export(lm, tmp_path / "one", **options)
    export(lm, tmp_path / "one", overwrite=True, **options)
    (tmp_path / "one" / "mine.txt").write_text("")
    with refused(pax.errors.ExportPathError, "mine.txt"):
        export(lm, tmp_path / "one", overwrite=True, **options)


def test_a_base_model_continues_texts(tmp_path):
    """A tokenizer without a chat template, as those of GPT-2 and of SmolLM2's base model."""
    pytest.importorskip("gguf")
    whole, lm = byte_level(), net("smollm2", tmp_path / "hf")
    base = Tokenizer(whole._inner, whole.special_tokens)
    options = {"tokenizer": base, "max_length": 16, "validate": False}
    for format in ("gguf", "genai"):
        report = export(lm, tmp_path / f"base.{format}", format=format, **options)
        assert "no chat template" in report.differs[0] and len(report.differs) == 1
    drawn = dataclasses.replace(lm.config.generation, do_sample=True, min_p=0.1)
    lm = lm.set_attribute("config", dataclasses.replace(lm.config, generation=drawn))
    report = export(lm, tmp_path / "drawn", format="genai", **options)
    assert "no min_p" in report.differs[0]
    assert Tokenizer.from_gguf(tmp_path / "base.gguf").chat_templates == {}
    assert Tokenizer.from_pretrained(tmp_path / "base.genai").chat_templates == {}


# --- what is refused --------------------------------------------------------------------------

each_format = pytest.mark.parametrize("format", sorted(pax.generation._export.RUNTIMES))


@each_format
def test_invalid_arguments_are_refused_before_any_work(format, tmp_path, monkeypatch):
    lm = net("smollm2", tmp_path / "hf")
    monkeypatch.setattr(pax.nets.Decoder, "listed", lambda self: pytest.fail("work was done"))
    tokenizer = byte_level()
    value, kind = pax.errors.InvalidArgumentError, pax.errors.InvalidArgumentTypeError
    words = pax.errors.TokenizerError
    small = pax.nets.Decoder(dataclasses.replace(lm.config, vocab_size=200))
    for error, where, got, options in (
        (words, "export: tokenizer", "200", {"lm": small}),
        (words, "export: tokenizer", "", {"tokenizer": None}),
        (value, "export: max_length", "here 64", {"max_length": 65}),
        (value, "export: max_length", "'room'", {"max_length": "room"}),
        (value, "export: prompts", "16", {"prompts": [[1] * 16]}),
        (value, "export: prompts: tokens[0, 0]", "270", {"prompts": [[270]]}),
        (kind, "export: prompts: tokens", "float64", {"prompts": [[1.5]]}),
        (kind, "export: prompts: tokens", "input_ids", {"prompts": {"input_ids": [[1]]}}),
        (kind, "tokenizer", "int: 3", {"tokenizer": 3}),
        (kind, "export", "Linear", {"lm": pax.Linear(2, 3)}),
        (value, "validate", "'process'", {"validate": "process"}),
        (value, "overwrite", "'no'", {"overwrite": "no"}),
        (kind, "export: sampler", "greedy()", {"sampler": pax.generation.samplers.greedy()}),
        (kind, "export: signatures", "['decode']", {"signatures": ["decode"]}),
        (kind, "export: opset", "20", {"opset": 20}),
    ):
        given = {"lm": lm, "tokenizer": tokenizer, "max_length": 16, **options}
        with refused(error, got, where=where):
            export(path=tmp_path / f"served.{format}", format=format, **given)
    assert not (tmp_path / f"served.{format}").exists()


def test_prompts_for_a_runtime_that_reads_texts_are_texts(tmp_path):
    pytest.importorskip("ai_edge_litert")
    options = {"format": "litertlm", "tokenizer": byte_level(), "max_length": 16}
    prompts = ["Hello", [100] * 5]  # bytes of no letter
    with refused(pax.errors.InvalidArgumentError, "prompts, row 1"):
        export(net("smollm2", tmp_path / "hf"), tmp_path / "a.litertlm", prompts=prompts, **options)
    assert not (tmp_path / "a.litertlm").exists()


def test_a_text_that_ends_inside_a_letter_is_compared(job):
    ids = job.tokenizer.encode("naïve é")
    decode, part = job.tokenizer.decode, ids[:-1]  # the last letter has two bytes
    assert decode(part).endswith("\N{REPLACEMENT CHARACTER}")
    for text in (decode(part), decode(part).rstrip("\N{REPLACEMENT CHARACTER}")):
        assert pax.generation._proof._ids_of(job, part, text) == part


def test_a_tokenizer_is_for_whole_models(tmp_path):
    lm = net("smollm2", tmp_path / "hf")
    with refused(pax.errors.InvalidArgumentTypeError, "'genai'"):
        export(lm, tmp_path / "served", max_length=8, tokenizer=byte_level())


# --- the proof --------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path):
    lm = net("smollm2", tmp_path / "hf")
    return pax.generation._job.Job(lm, byte_level(), 32, "export")


def proved(job, monkeypatch, change, prompts=((5, 6, 7), (8, 9))):
    """What the proof says of a runtime whose tokens are those of jax, changed."""
    room = pax.generation._proof
    said = pax.generation._proof._greedy_tokens(job, prompts, 24)
    made = {"prompts": change(said), "conversation": room.chat_prompt(job)}
    monkeypatch.setattr(pax.generation._proof, "run_runtime", lambda *_: made)
    return room.prove_continuations(
        pax.generation._export.RUNTIMES["gguf"], job, Path("served"), prompts
    )


def test_tokens_of_a_runtime_are_compared(job, monkeypatch):
    details, ties = proved(job, monkeypatch, lambda said: said)
    assert details["tokens"].startswith("48 of 48") and not ties

    def other(said):
        said[1][4] = (said[1][4] + 1) % 270
        return said

    with refused(pax.errors.ValidationError, "prompt 1, token 4"):
        proved(job, monkeypatch, other)
    with refused(pax.errors.ValidationError, "token 15"):
        proved(job, monkeypatch, lambda said: [said[0][:15], said[1]])


def with_stops(lm: pax.nets.Decoder, *stop: int) -> pax.nets.Decoder:
    ends = pax.nets.GenerationDefaults(stop=stop)
    return lm.set_attribute("config", dataclasses.replace(lm.config, generation=ends))


def test_a_runtime_that_does_not_stop_is_refused(job, monkeypatch):
    prompts = ((5, 6, 7), (8, 9))
    said = pax.generation._proof._greedy_tokens(job, prompts, 24)
    stop = next(each for each in said[1][:-2] if each not in said[0])
    job = dataclasses.replace(job, lm=with_stops(job.lm, stop))
    ended = said[1][: said[1].index(stop) + 1]
    assert not proved(job, monkeypatch, lambda _: [said[0], ended])[1]
    with refused(pax.errors.ValidationError, "behind a stop"):
        proved(job, monkeypatch, lambda _: said)


def test_a_gguf_file_has_all_stop_tokens(tmp_path):
    """That of the tokenizer keeps its name, which templates use."""
    pytest.importorskip("gguf")
    tokenizer, lm = byte_level(), net("smollm2", tmp_path / "hf")
    options = {"format": "gguf", "tokenizer": tokenizer, "max_length": 16, "validate": False}
    export(with_stops(lm, 0, 1, 7), tmp_path / "served.gguf", **options)
    with pax.weights.open_source(tmp_path / "served.gguf") as source:
        ids = [source.metadata[f"tokenizer.ggml.{each}_token_id"] for each in ("eos", "eot", "eom")]
    assert ids == [1, 0, 7] and Tokenizer.from_gguf(tmp_path / "served.gguf").stop == (0, 1, 7)
    with refused(pax.errors.InvalidArgumentError, "3 stop tokens"):
        export(with_stops(lm, 0, 7, 8), tmp_path / "other.gguf", **options)
    # Templates of llama.cpp write that of the file, which is the tokenizer's, not the net's.
    report = export(with_stops(lm, 7), tmp_path / "served.gguf", overwrite=True, **options)
    assert report.differs == ("llama.cpp also ends texts at '<e>', the tokenizer's eos_token",)
    again = Tokenizer.from_gguf(tmp_path / "served.gguf")
    assert again.special_tokens["eos_token"] == "<e>" and again.stop == (1, 7)
    with refused(pax.errors.InvalidArgumentError, "3 stop tokens"):
        export(with_stops(lm, 0, 1, 7, 8), tmp_path / "other.gguf", **options)


def test_texts_of_a_runtime_are_compared(job, monkeypatch):
    """onnxruntime-genai has tokenizers and templates of its own, other than those of Python."""
    runtime, ids = pax.generation._export.RUNTIMES["genai"], job.tokenizer.encode
    prompts = [ids("help"), ids("he 12")]
    theirs = {
        "prompts": pax.generation._proof._greedy_tokens(job, prompts, 24),
        "texts": prompts,
        "conversation": job.tokenizer.apply_chat_template(
            pax.generation._proof.HELLO, add_generation_prompt=True, tokenize=False
        ),
    }
    prove = pax.generation._proof.prove_continuations
    for key, other, said in (
        ("texts", prompts, None),
        ("texts", [*prompts[:1], [2]], "The tokenizer .* onnxruntime-genai"),
        ("conversation", "user", "The chat template .* onnxruntime-genai"),
    ):
        made = {**theirs, key: other}
        monkeypatch.setattr(pax.generation._proof, "run_runtime", lambda *_, made=made: made)
        if said is None:
            assert prove(runtime, job, Path("served"), prompts)[0]["tokens"].startswith("48 of 48")
            continue
        with pytest.raises(pax.errors.ValidationError, match=said):
            prove(runtime, job, Path("served"), prompts)
    monkeypatch.setattr(pax.generation._proof, "run_runtime", lambda *_: made)
    with refused(pax.errors.ValidationError, "The chat template", "llama.cpp"):
        prove(pax.generation._export.RUNTIMES["gguf"], job, Path("served"), prompts)


def test_a_template_for_onnxruntime_genai_has_its_whitespace(job):
    """The same text with jinja's `trim_blocks` and `lstrip_blocks`, and without."""
    template = (
        "{% for m in messages %}\n    {%- if m.x %}\n\n  a\n  {% else %}\n\n"
        "{{ m.role }}:\n  {%+ if 1 %}b{% endif +%}\n  {# c #}\n{% endif -%}\n\n d\n{% endfor %}\ne"
    )
    written = pax.generation._genai._write_whitespace(template)
    messages = [{"role": "u", "x": 1}, {"role": "a", "x": 0}]
    expected = Tokenizer(job.tokenizer._inner, {}, template).apply_chat_template(
        messages, tokenize=False
    )
    again = Tokenizer(job.tokenizer._inner, {}, written)
    assert again.apply_chat_template(messages, tokenize=False) == expected
    jinja2 = pytest.importorskip("jinja2")
    assert jinja2.Environment().from_string(written).render(messages=messages) == expected


def test_a_template_for_litert_lm_takes_parts_of_texts(job, monkeypatch):
    """LiteRT-LM hands it lists of parts, and no special tokens."""
    messages = [{"role": "u", "content": "he"}, {"role": "a", "content": "l"}]
    parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    tokenizer = Tokenizer(job.tokenizer._inner, {}, pax.generation._litertlm._template(job))
    expected = job.tokenizer.apply_chat_template(messages, tokenize=False)
    for given in (messages, parts):
        assert tokenizer.apply_chat_template(given, tokenize=False) == expected
    prompts = [job.tokenizer.encode("help")]
    said = pax.generation._proof._greedy_tokens(job, prompts, 24)
    theirs = {"prompts": said, "conversation": "user: [{"}
    monkeypatch.setattr(pax.generation._proof, "run_runtime", lambda *_: theirs)
    runtime = pax.generation._export.RUNTIMES["litertlm"]
    with pytest.raises(pax.errors.ValidationError, match="The chat template .* LiteRT-LM"):
        pax.generation._proof.prove_continuations(runtime, job, Path("served"), prompts)


def test_ties_may_differ_and_are_reported(job, monkeypatch):
    lm = job.lm
    twins = np.asarray(lm.embed.weight).copy()
    twins[200:] = twins[:70]  # tokens 200 to 269 are 0 to 69 once more
    lm = lm.set_attribute("embed", lm.embed.set_attribute("weight", jax.numpy.asarray(twins)))
    job = dataclasses.replace(job, lm=lm)
    prompts = ((5, 6, 7),)
    own = pax.generation._proof._greedy_tokens(job, prompts, 24)[0]
    at = next((at for at, each in enumerate(own) if each < 70), None)
    if at is None:
        pytest.skip("no token of these has a twin")
    said = [*own]
    said[at] += 200
    details, ties = proved(job, monkeypatch, lambda _: [said], prompts)
    assert details["tokens"].startswith("23 of 24")
    assert len(ties) == 1 and f"token {at}: another token" in ties[0] and "differ by 0" in ties[0]


def test_a_runtime_that_does_not_end_is_stopped(job, monkeypatch, tmp_path):
    room = pax.generation._proof
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.setattr(room._runtime_calls, "__file__", str(tmp_path / "sleeps.py"))
    monkeypatch.setattr(room, "_SECONDS", 0.5)
    with refused(pax.errors.ValidationError, "1 prompts"):
        room.prove_continuations(
            pax.generation._export.RUNTIMES["genai"], job, tmp_path, ((5, 6, 7),)
        )


def test_another_runtime_of_a_folder_is_compared_or_missed_by_name(job, monkeypatch):
    genai, room = pax.generation._genai, pax.generation._proof
    runtime, prompts = pax.generation._export.RUNTIMES["genai"], ((5, 6, 7), (8, 9))
    monkeypatch.setattr(genai.shutil, "which", lambda name: None)
    details, _, left_out = room.prove_beside(runtime, job, Path("served"), prompts)
    assert not details and "npm install @huggingface/transformers" in left_out[0]
    monkeypatch.setattr(genai.shutil, "which", str)
    monkeypatch.setattr(genai, "_PROGRAM", (sys.executable, "-c", ""))
    said = pax.generation._proof._greedy_tokens(job, prompts, 24)
    theirs = {"prompts": said * 2, "texts": [], "conversation": room.chat_prompt(job)}
    monkeypatch.setattr(room, "run_runtime", lambda *_: theirs)
    details, ties, left_out = room.prove_beside(runtime, job, Path("served"), prompts)
    assert details["transformers.js"].startswith("96 of 96") and not ties and not left_out
    theirs["prompts"] = [*said, said[0], [(each + 1) % 270 for each in said[1]]]
    with refused(pax.errors.ValidationError, "transformers.js continues", "prompt 3"):
        room.prove_beside(runtime, job, Path("served"), prompts)


def test_a_missing_runtime_is_reported(tmp_path, monkeypatch):
    pytest.importorskip("onnx")
    lm = net("smollm2", tmp_path / "hf")
    monkeypatch.setattr(pax.generation._runtimes, "is_installed", lambda name: False)
    with pytest.warns(pax.errors.NotValidatedWarning, match="genai"):
        report = export(
            lm, tmp_path / "served", format="genai", tokenizer=byte_level(), max_length=16
        )
    assert report.validated is None and report.left_out == ("not validated",)
    with refused(pax.errors.InvalidArgumentError, "'process'", where="validate"):
        pax.generation.save_pretrained(lm, tmp_path / "saved", validate="process")
    with refused(pax.errors.ExportPathError, "onnxruntime-genai"):
        pax.export.load(tmp_path / "served")


# --- gguf and transformers --------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["smollm2", "llama", "gemma", "phi4", "smollm3", "granite", "gpt2"]
)
def test_a_gguf_file_and_a_folder_of_transformers_hold_the_net(family, tmp_path):
    pytest.importorskip("gguf")
    lm, tokens = net(family, tmp_path / "hf"), np.arange(9)[None]
    expected, tokenizer = lm(tokens), ascii_tokenizer()
    options = {"format": "gguf", "tokenizer": tokenizer, "max_length": 16, "validate": False}
    for name in ("one", "other"):
        listed = lm.listed() if name == "other" else lm
        file = export(listed, tmp_path / f"{name}.gguf", **options)
        report = pax.generation.save_pretrained(
            lm, tmp_path / name, tokenizer=tokenizer, validate=False
        )
    assert file.graph_bytes == (tmp_path / "one.gguf").stat().st_size
    assert "0 B" not in str(report)
    parameters = [each.name for each in report.variables if each.parameter]
    assert parameters == [name for name, _ in pax.core.named_leaves(lm)]
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "other.gguf").read_bytes()
    assert contents(tmp_path / "one") == contents(tmp_path / "other")
    for path in ("one.gguf", "one"):
        again, read = pax.generation.from_pretrained(tmp_path / path)
        assert_close(again(tokens), expected, rtol=5e-6)
        assert read.encode("a bc") == tokenizer.encode("a bc")
        assert read.chat_template == tokenizer.chat_template
        assert again.config.generation.stop == (1,)
    with refused(pax.errors.ExportPathError):
        export(lm, tmp_path / "one.gguf", **options)
    export(lm, tmp_path / "one.gguf", overwrite=True, **options)
    (tmp_path / "mine.gguf").write_bytes(b"GGUF of somebody")
    with refused(pax.errors.ExportPathError, "mine.gguf"):
        export(lm, tmp_path / "mine.gguf", overwrite=True, **options)


@pytest.mark.parametrize("cut", ["gpt-2", "llama-bpe", "gpt-4o", "qwen2", "smollm", "tekken"])
def test_a_gguf_file_cuts_texts_as_the_tokenizer(cut, tmp_path):
    """Also where few texts show it: the merge of two spaces counts before a digit of SmolLM."""
    pytest.importorskip("gguf")
    words = ["<s>", "<e>", *LETTERS, "ĠĠ"]
    said = {"model": "gpt2", "pre": cut, "tokens": words, "merges": ["Ġ Ġ"]}
    told = {f"tokenizer.ggml.{name}": value for name, value in said.items()}
    inner, special, _ = of_gguf(told, "a file")
    tokenizer = Tokenizer(inner, special, "")
    options = {"tokenizer": tokenizer, "max_length": 16, "validate": False, "format": "gguf"}
    export(net("smollm2", tmp_path / "hf"), tmp_path / "served.gguf", **options)
    with pax.weights.open_source(tmp_path / "served.gguf") as source:
        assert source.metadata["tokenizer.ggml.pre"] == cut
    again = Tokenizer.from_gguf(tmp_path / "served.gguf")
    assert again.encode("a  1") == tokenizer.encode("a  1")


def test_a_gguf_file_has_as_much_context_as_learned_positions(tmp_path):
    """llama.cpp makes the table of GPT-2 by it; others offer what is asked for."""
    pytest.importorskip("gguf")
    for family, expected in (("gpt2", None), ("smollm2", 8)):
        lm, path = net(family, tmp_path / family), tmp_path / f"{family}.gguf"
        options = {"tokenizer": ascii_tokenizer(), "max_length": 8, "validate": False}
        export(lm, path, format="gguf", **options)
        with pax.weights.open_source(path) as source:
            found = source.metadata[f"{lm.config.family}.context_length"]
        assert found == (expected or lm.config.max_positions)


def test_unsupported_nets_are_refused_before_any_work(tmp_path):
    pytest.importorskip("gguf")
    tokenizer = ascii_tokenizer()
    lm = net("mistral", tmp_path / "hf")
    with refused(pax.errors.InvalidArgumentError, "llama.cpp", "layer 0"):
        export(lm, tmp_path / "a", format="gguf", tokenizer=tokenizer, max_length=8)
    apart = net("gemma", tmp_path / "gemma", tie_word_embeddings=False)
    with refused(pax.errors.InvalidArgumentError, "llama.cpp", "tied=False"):
        export(apart, tmp_path / "a", format="gguf", tokenizer=tokenizer, max_length=8)
    scaled = {"rope_scaling": reference.CONFIGS["llama"]["rope_scaling"]}
    table, yarn = "a table of rotary factors", reference.CONFIGS["qwen2"]["rope_scaling"]
    for family, changes, name in (
        ("qwen3", scaled, table),
        ("qwen2", {"rope_scaling": {**yarn, "beta_fast": 16.0}}, "beta_fast (1.0, 16.0)"),
        ("smollm3", scaled, table),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0, 1]}, "the kind of layer 1"),
        ("smollm3", {"attention_bias": True}, "output_bias=True"),
        ("smollm3", {"mlp_bias": True}, "dense_bias=True"),
        ("phi3", {"head_dim": 2, "partial_rotary_factor": 1.0}, "the kind of layer 0"),
        ("phi3", {"sliding_window": None}, "num_heads * head_size is not dim"),
        ("granite", {"hidden_act": "gelu"}, "activation='gelu'"),
        ("granite", {"rope_scaling": reference.LONGROPE}, "longrope"),
        ("olmo2", {"head_dim": 2, "tie_word_embeddings": True}, "lm.untied()"),
        ("olmo2", {"head_dim": 2, "attention_bias": True}, "projection_bias=True"),
        ("starcoder2", {"head_dim": 2, "sliding_window": None, "use_bias": False}, "output_bias"),
    ):
        lacking = net(family, tmp_path / "lacking", **changes)
        with refused(pax.errors.InvalidArgumentError, "llama.cpp", name, 'format="genai"'):
            export(lacking, tmp_path / "a", format="gguf", tokenizer=tokenizer, max_length=8)
    config = dataclasses.replace(lm.config, positions="alibi")
    with refused(pax.errors.InvalidArgumentError, "transformers", "'alibi'"):
        pax.generation.save_pretrained(pax.nets.Decoder(config), tmp_path / "a")
    plain = net("smollm2", tmp_path / "other")
    with refused(pax.errors.InvalidArgumentTypeError, "dequantize"):
        pax.generation.save_pretrained(pax.quantize(plain)[0], tmp_path / "a")
    scaled = pax.RotaryScaling("table", attention_factor=1.5, table=(1.0, 1.0))
    for changes, name in (({"rotary_scaling": scaled}, table), ({"rotary_size": 2}, "rotary_size")):
        lacking = plain.set_attribute("config", dataclasses.replace(plain.config, **changes))
        with refused(pax.errors.InvalidArgumentError, "llama.cpp", name):
            export(lacking, tmp_path / "a", format="gguf", tokenizer=tokenizer, max_length=8)
    words = tokenizer_of_words()
    with refused(pax.errors.TokenizerError):
        export(plain, tmp_path / "a", format="gguf", tokenizer=words, max_length=8)
    assert not (tmp_path / "a").exists()


#: Sizes of which groups of 32 can be made.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
WIDE_GPT2 = {"n_embd": 64, "n_head": 4}


@pytest.mark.parametrize(
    "family, kind, told",
    [
        ("smollm2", "Q8_0", {"bits": 8, "group": 32}),
        ("gpt2", "Q4_0", {"bits": 4}),
        ("llama", "Q4_1", {"bits": 4, "scheme": "asymmetric"}),
    ],
)
def test_a_gguf_file_holds_the_integers_of_a_quantized_net(family, kind, told, tmp_path):
    gguf = pytest.importorskip("gguf")
    lm = net(family, tmp_path / "hf", **(WIDE_GPT2 if family == "gpt2" else WIDE))
    small, _ = pax.quantize(lm, **told)
    options = {"format": "gguf", "tokenizer": ascii_tokenizer(), "max_length": 16}
    options["validate"] = False
    report = export(small, tmp_path / "one.gguf", **options)
    with refused(pax.errors.ExportPathError, "llama.cpp"):
        pax.export.load(tmp_path / "one.gguf")
    assert len(report.variables) == len(jax.tree.leaves(small))
    assert report.details["quantized"]["bits"] == [told["bits"]]
    assert f"weights in int{told['bits']}, the integers of the model" in str(report)
    listed, _ = pax.quantize(lm.listed(), **told)
    export(listed, tmp_path / "other.gguf", **options)
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "other.gguf").read_bytes()
    kinds = {each.name: each.tensor_type.name
             for each in gguf.GGUFReader(tmp_path / "one.gguf").tensors}  # fmt: skip
    assert kinds["token_embd.weight"] == kind and kinds["output_norm.weight"] == "F32"
    assert {each for name, each in kinds.items() if "ffn_down.weight" in name} == {kind}
    # The package gguf makes the numbers of the blocks: those that the integers stand for.
    again = pax.nets.Decoder.from_gguf(tmp_path / "one.gguf")
    expected = dict(pax.core.named_leaves(pax.quantization.dequantize(small)))
    for name, leaf in pax.core.named_leaves(again):
        if name.endswith("weight"):
            # The minima of Q4_1 are halves.
            least = np.abs(expected[name]).max() * 2.0**-10 if kind == "Q4_1" else 0
            assert_close(leaf, expected[name], rtol=0, atol=least)


def test_a_gguf_file_that_holds_other_integers_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    room = pax.generation._gguf
    small, _ = pax.quantize(net("smollm2", tmp_path / "hf", **WIDE), bits=4)
    whole = room._blocks

    def damaged(tensor):
        made = whole(tensor)
        if tensor.name == "blk.1.attn_k.weight":
            made[3, 20] ^= 1
        return made

    monkeypatch.setattr(room, "_blocks", damaged)
    options = {"format": "gguf", "tokenizer": ascii_tokenizer(), "max_length": 16}
    with refused(pax.errors.ValidationError, "blk.1.attn_k.weight", "1 others"):
        export(small, tmp_path / "a.gguf", validate=False, **options)
    assert not (tmp_path / "a.gguf").exists()


def test_merged_adapters_are_exported(tmp_path):
    pytest.importorskip("gguf")
    onnxruntime = pytest.importorskip("onnxruntime")
    tokens, options = np.arange(9)[None], {"tokenizer": ascii_tokenizer(), "validate": False}
    lm = net("smollm2", tmp_path / "hf", num_key_value_heads=1, num_hidden_layers=1).listed()
    tuned = disturbed(pax.adapters.add(lm, "layers.*.attention.*", 2, dora=True))
    expected = np.asarray(tuned(tokens))
    assert np.abs(expected - lm(tokens)).max() > 0.1
    merged = pax.adapters.merge(tuned)
    export(merged, tmp_path / "one.gguf", format="gguf", max_length=16, **options)
    pax.generation.save_pretrained(merged.scanned(), tmp_path / "other", **options)
    for name in ("one.gguf", "other"):
        again, _ = pax.generation.from_pretrained(tmp_path / name)
        assert_close(again(tokens), expected, rtol=1e-4)
    export(merged, tmp_path / "served", format="genai", max_length=16, **options)
    session = onnxruntime.InferenceSession(tmp_path / "served" / "onnx" / "model.onnx")
    config = merged.config
    empty = np.zeros((1, config.num_kv_heads, 0, config.head_size), "f")
    given = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    given |= {f"past_key_values.{i}.{name}": empty
              for i in range(config.num_layers) for name in ("key", "value")}  # fmt: skip
    assert_close(session.run(["logits"], given)[0], expected, rtol=1e-4)


def test_unsupported_integers_are_refused_before_any_work(tmp_path):
    pytest.importorskip("gguf")
    lm = net("smollm2", tmp_path / "hf", **WIDE)
    odd = net("smollm2", tmp_path / "odd", **WIDE | {"intermediate_size": 40})
    gpt2 = net("gpt2", tmp_path / "gpt2", **WIDE_GPT2).at("layers.attention.query")
    options = {"format": "gguf", "tokenizer": ascii_tokenizer(), "max_length": 16}
    error, merge = pax.errors.InvalidArgumentError, "adapters.merge(lm)"
    trained, _ = pax.quantize(lm, bits=4, train=True)
    adapted = pax.adapters.add(lm, pax.Linear, rank=2)
    for wrong, *names in (
        (pax.quantize(lm)[0], "blk.0.attn_k.weight", "group=None, rows of 64",
         "pax.quantize(lm, bits=8, group=32)"),
        (pax.quantize(odd, bits=4)[0], "blk.0.ffn_down.weight", "rows of 40", "at=..."),
        (pax.quantize(gpt2, bits=4)[0], "blk.0.attn_qkv.weight", "4 bits, symmetric, float32"),
        (trained, "lm.embed.weight", merge),
        (adapted, "lora", merge),
    ):  # fmt: skip
        with refused(error, *names):
            export(wrong, tmp_path / "a.gguf", **options)
    for wrong in (trained, adapted):
        with refused(error, "adapters.merge"):
            pax.generation.save_pretrained(wrong, tmp_path / "a", tokenizer=ascii_tokenizer())
    assert not list(tmp_path.glob("a*"))


def tokenizer_of_words() -> Tokenizer:
    import tokenizers

    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<e>": 0, "a": 1, "b": 2}, unk_token="<e>")
    )
    return Tokenizer(inner, {"eos_token": "<e>"}, "{{ messages }}")


def test_products_in_float32(tmp_path):
    pytest.importorskip("onnx")
    small, _ = pax.quantize(net("smollm2", tmp_path / "hf", **WIDE, num_hidden_layers=1), bits=4)
    options = {"tokenizer": ascii_tokenizer(), "max_length": 16, "validate": False}
    for format in ("litertlm", "genai"):
        found = []
        for level in (1, 4):
            path = tmp_path / f"{level}.{format}"
            report = export(small, path, format=format, accuracy_level=level, **options)
            assert report.details["quantized"]["accuracy_level"] == level
            found.append(b"".join(contents(path).values()))
        assert found[0] != found[1]
        if format == "genai":
            assert b"DequantizeLinear" in found[1] and b"DequantizeLinear" not in found[0]
    report = export(small, tmp_path / "web", format="web", **options)
    assert report.details["quantized"]["accuracy_level"] == 1  # by default
    with refused(pax.errors.InvalidArgumentError, where="accuracy_level", got="0"):
        export(small, tmp_path / "a", format="genai", accuracy_level=0, **options)
    with refused(pax.errors.InvalidArgumentError, where="accuracy_level", got="1", write="4"):
        export(small, tmp_path / "a.gguf", format="gguf", accuracy_level=1, **options)


def test_the_file_for_litert_lm(tmp_path):
    pytest.importorskip("ai_edge_litert")
    lm, tokens = net("gemma3", tmp_path / "hf"), np.arange(3, 12, dtype=np.int32)
    options = {"format": "litertlm", "tokenizer": ascii_tokenizer(), "validate": False}
    for name in ("one", "other"):
        export(lm, tmp_path / f"{name}.litertlm", max_length=16, **options)
    content = (tmp_path / "one.litertlm").read_bytes()
    assert content == (tmp_path / "other.litertlm").read_bytes()
    assert content.startswith(b"LITERTLM") and b"tf_lite_prefill_decode" in content[:16384]
    with refused(pax.errors.InvalidArgumentError, ".litertlm"):
        export(lm, tmp_path / "one.bin", max_length=16, **options)
    options["tokenizer"] = Tokenizer(ascii_tokenizer()._inner, {}, None)  # a bare tokenizer.json
    endless = dataclasses.replace(lm.config, generation=pax.nets.GenerationDefaults())
    with refused(pax.errors.InvalidArgumentError, "ends texts at a token", "no eos_token"):
        lm = lm.set_attribute("config", endless)
        export(lm, tmp_path / "base.litertlm", max_length=16, **options)
    begin = content.index(b"TFL3") - 4
    (tmp_path / "model.tflite").write_bytes(content[begin:])
    interpreter = pytest.importorskip("ai_edge_litert.interpreter").Interpreter(
        str(tmp_path / "model.tflite")
    )
    assert sorted(interpreter.get_signature_list()) == ["decode", "prefill_8"]
    config = lm.config
    shape = (1, config.num_kv_heads, 16, config.head_size)
    cache = {f"kv_cache_{k}_{i}": np.zeros(shape, "f") for k in "kv" for i in range(2)}
    read, say = map(interpreter.get_signature_runner, ("prefill_8", "decode"))
    # Five tokens of eight are meant: what stands behind them changes nothing.
    ids, places = np.zeros((1, 8), np.int32), np.zeros(8, np.int32)
    ids[0, :5], places[:5] = tokens[:5], np.arange(5)
    cache = read(tokens=ids, input_pos=places, **cache)
    expected = np.asarray(lm(tokens[None]))[0]
    for place in range(5, 9):
        made = say(tokens=tokens[None, place : place + 1], input_pos=np.int32([place]), **cache)
        assert_close(made.pop("logits")[0, 0], expected[place], rtol=1e-5)
        cache = made
