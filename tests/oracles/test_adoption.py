"""Modules of torch and transformers adopted: equal outputs, or refused by name."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

import pax_export as pax
from pax_export.nets import Decoder, DecoderConfig
from tests.closeness import assert_close
from tests.oracles.test_families import BASES, TOKENS, drawn, logits_of, model_of
from tests.weights.adoption.foreign import Free

N = np.random.default_rng(0)
gelu = functools.partial(jax.nn.gelu, approximate=False)


def x_of(*shape: int) -> np.ndarray:
    return N.normal(size=shape).astype(np.float32)


def seeded(module: Any) -> Any:
    """In eval mode, with weights of no layer alike, those of norms too."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
    return module.eval()


def arrays_of(module: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in module.state_dict().items()}


def run(module: Any, *xs: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        found = module(*map(torch.from_numpy, xs))
    found = getattr(found, "last_hidden_state", found)
    return (found[0] if isinstance(found, tuple) else found).numpy()


def norm(size: int, eps: float = 1e-5) -> Any:
    return pax.LayerNorm(size, eps=eps)


# Language models into the library's own


@pytest.mark.parametrize("layers", ["scanned", "listed"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"])
def test_language_models(family, layers):
    base = {**BASES[family], "num_hidden_layers": 2, "hidden_act": "gelu_pytorch_tanh"}
    if not family.startswith("gemma"):
        base.pop("hidden_act")
    model = model_of(family, base)
    config = DecoderConfig.from_hf(model.config.to_dict())
    ignore = "lm_head" if config.tied else None
    net, _ = pax.weights.adopt(Decoder(config, layers=layers), arrays_of(model), ignore=ignore)
    assert_close(net(TOKENS), logits_of(model), rtol=1e-3, atol=1e-4)


class Llama(pax.Module):
    """A Llama as somebody may write it, with names of their own for the norms."""

    def __init__(self, norms: tuple[str, str], layers: int = 2, d: int = 8, f: int = 12):
        super().__init__()

        def dense(a, b):
            return pax.Linear(a, b, with_bias=False)

        self.norms = norms
        self.embed = pax.Embed(16, d)
        self.layers = [
            Free(q=dense(d, d), k=dense(d, d), v=dense(d, d), o=dense(d, d), gate=dense(d, f),
                 up=dense(d, f), down=dense(f, d), **{name: pax.RMSNorm(d) for name in norms})
            for _ in range(layers)
        ]  # fmt: skip
        self.norm, self.head = pax.RMSNorm(d), dense(d, 16)

    def __call__(self, tokens):
        x = self.embed(tokens)
        rotary = pax.Rotary(8)
        causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2))
        for block in self.layers:
            y = getattr(block, self.norms[0])(x)
            q, k, v = (layer(y)[:, :, None] for layer in (block.q, block.k, block.v))
            places = jnp.arange(tokens.shape[1])
            q, k = (rotary(each, places) for each in (q, k))
            logits = jnp.einsum("bthd,bThd->bhtT", q, k) / np.sqrt(8)
            weights = jax.nn.softmax(jnp.where(causal, logits, -1e30))
            x = x + block.o(jnp.einsum("bhtT,bThd->bthd", weights, v)[:, :, 0])
            y = getattr(block, self.norms[1])(x)
            x = x + block.down(jax.nn.silu(block.gate(y)) * block.up(y))
        return self.head(self.norm(x))


NORMS = ("attention_norm mlp_norm", "attn_norm mlp_norm", "pre_attention_norm pre_mlp_norm",
         "norm1 norm2", "input_layernorm post_attention_layernorm", "first second")  # fmt: skip


@pytest.mark.parametrize("norms", NORMS)
def test_blocks_of_llama(norms):
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=1, num_key_value_heads=1, pad_token_id=None,
    )  # fmt: skip
    model = drawn(transformers.LlamaForCausalLM, config)
    tokens = N.integers(0, 16, (2, 5))
    expected = logits_of(model, tokens)
    net = Llama(tuple(norms.split()))
    if norms == "first second":
        with pytest.raises(pax.errors.AmbiguousWeightsError, match="input_layernorm"):
            pax.weights.adopt(net, arrays_of(model))
    else:
        new, _ = pax.weights.adopt(net, arrays_of(model))
        assert_close(new(tokens), expected, rtol=1e-4, atol=1e-5)
    new, _ = pax.weights.adopt(net, arrays_of(model), reference=(tokens, expected))
    assert_close(new(tokens), expected, rtol=1e-4, atol=1e-5)


# Layers of torch


@pytest.mark.parametrize("bias", [True, False])
def test_attention(bias):
    theirs = seeded(nn.MultiheadAttention(8, 2, bias=bias, batch_first=True))
    x = x_of(2, 5, 8)
    more = {} if bias else {"zeros": "**.bias"}
    net, _ = pax.weights.adopt(pax.MultiHeadAttention(2, 4), arrays_of(theirs), **more)
    assert_close(net(x, x, x), run(theirs, x, x, x), rtol=1e-4, atol=1e-5)


class Block(pax.Module):
    """A block of an encoder or of a decoder, after torch's."""

    def __init__(self, names: str, first: bool, cross: bool = False):
        super().__init__()
        self.first, self.cross, self.names = first, cross, names.split()
        for name in self.names:
            setattr(self, name, norm(8))
        self.attention = pax.MultiHeadAttention(2, 4)
        if cross:
            self.cross_attention = pax.MultiHeadAttention(2, 4)
        self.fc1, self.fc2 = pax.Linear(8, 12), pax.Linear(12, 8)

    def __call__(self, x, memory=None):
        parts = [lambda y: self.attention(y, y, y)]
        parts += [lambda y: self.cross_attention(y, memory, memory)] if self.cross else []
        parts += [lambda y: self.fc2(jax.nn.relu(self.fc1(y)))]
        for name, part in zip(self.names, parts):
            own = getattr(self, name)
            x = x + part(own(x)) if self.first else own(x + part(x))
        return x


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("names", ["norm1 norm2", "attention_norm mlp_norm"])
def test_encoder_layers(first, names):
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=first)
    theirs = seeded(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x = x_of(2, 5, 8)
    net, _ = pax.weights.adopt(Free(layers=[Block(names, first) for _ in range(2)]),
                               arrays_of(theirs))  # fmt: skip
    assert_close(net.layers[1](net.layers[0](x)), run(theirs, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [True, False])
def test_decoder_layers(first):
    theirs = seeded(nn.TransformerDecoderLayer(8, 2, 12, batch_first=True, norm_first=first))
    x, memory = x_of(2, 5, 8), x_of(2, 3, 8)
    net = Block("attention_norm cross_norm mlp_norm", first, cross=True)
    with pytest.raises(pax.errors.AmbiguousWeightsError, match="multihead_attn.in_proj_weight"):
        pax.weights.adopt(net, arrays_of(theirs))  # no word says which one looks at the memory
    new, _ = pax.weights.adopt(net, arrays_of(theirs), rename={"multihead_attn": "cross_attention"})
    assert_close(new(x, memory), run(theirs, x, memory), rtol=1e-4, atol=1e-5)


def through(cell, x):
    return pax.scan(cell, cell.initial_state(x.shape[1]), x)[1]


@pytest.mark.parametrize(("theirs", "ours"), [(nn.LSTM, pax.LSTM), (nn.RNN, pax.VanillaRNN)])
def test_both_directions(theirs, ours):
    theirs = seeded(theirs(3, 4, num_layers=2, bidirectional=True))
    x = x_of(6, 2, 3)
    net = Free(layers=[Free(forward=ours(n, 4), backward=ours(n, 4)) for n in (3, 8)])
    net, _ = pax.weights.adopt(net, arrays_of(theirs))
    y = x
    for layer in net.layers:
        back = through(layer.backward, y[::-1])[::-1]
        y = jnp.concatenate([through(layer.forward, y), back], -1)
    assert_close(y, run(theirs, x), rtol=1e-4, atol=1e-5)


def test_cells_of_other_functions_are_refused():
    for theirs, ours, word in (
        (nn.GRU(3, 4, bidirectional=True), pax.GRU, "fills a pax.GRU with reset_after=True"),
        (nn.LSTM(3, 4, proj_size=2), pax.LSTM, "no place for weight_hr_l0"),
    ):
        net = Free(forward=ours(3, 4), backward=ours(3, 4))
        with pytest.raises(pax.errors.AdoptionError, match=word):
            pax.weights.adopt(net, arrays_of(theirs))


# Whole nets of strangers


class TorchDigits(nn.Module):
    def __init__(self, pooled=False):
        super().__init__()
        self.pooled = pooled
        self.conv1, self.act = nn.Conv2d(3, 4, 3, padding=1), nn.PReLU()
        self.gn, self.conv2 = nn.GroupNorm(2, 4), nn.Conv2d(4, 6, 3, padding=1)
        self.bn, self.fc = nn.BatchNorm2d(6), nn.Linear(6 if pooled else 6 * 20, 5)

    def forward(self, x):
        x = torch.relu(self.bn(self.conv2(self.gn(self.act(self.conv1(x))))))
        return self.fc(x.mean((2, 3)) if self.pooled else x.flatten(1))


class Digits(pax.Module):
    def __init__(self, pooled=False):
        super().__init__()
        self.pooled = pooled
        self.conv1, self.act = pax.Conv2D(3, 4, 3), Free(weight=jnp.zeros(1))
        self.gn, self.conv2 = pax.GroupNorm(2, 4), pax.Conv2D(4, 6, 3)
        self.bn, self.fc = pax.BatchNorm2D(6), pax.Linear(6 if pooled else 6 * 20, 5)

    def __call__(self, x):
        x = self.conv1(x)
        x = self.gn(jnp.where(x > 0, x, self.act.weight * x))
        x = jax.nn.relu(self.bn(self.conv2(x)))
        return self.fc(x.mean((1, 2)) if self.pooled else x.reshape(len(x), -1))


@pytest.mark.parametrize("pooled", [True, False])
def test_convolutions_and_what_is_behind_them(pooled, tmp_path):
    theirs, x = seeded(TorchDigits(pooled)), x_of(2, 3, 5, 4)
    torch.save(theirs.state_dict(), tmp_path / "net.pt")
    net, images, expected = Digits(pooled), x.transpose(0, 2, 3, 1), run(theirs, x)
    if not pooled:
        with pytest.raises(pax.errors.AmbiguousWeightsError, match="fc.weight: transposed"):
            pax.weights.adopt(net, tmp_path / "net.pt")
    for said in ({},) if pooled else ({"flatten": {"fc": 6}}, {"reference": (images, expected)}):
        new, _ = pax.weights.adopt(net, tmp_path / "net.pt", **said)
        assert_close(new.eval()(images), expected, rtol=1e-4, atol=1e-5)


def test_a_missing_norm_takes_no_other_array():
    file = {name: array for name, array in arrays_of(TorchDigits(True)).items() if "gn" not in name}
    file |= {"aux.weight": x_of(4), "aux.bias": x_of(4), "class_freq": x_of(4)}
    with pytest.raises(pax.errors.AdoptionError) as caught:
        pax.weights.adopt(Digits(True), file, origin="torch")
    assert caught.value.missing == ("gn.scale", "gn.offset")


class Encoder(pax.Module):
    """Blocks of attention as BERT and ViT have them."""

    def __init__(self, first: bool, eps: float = 1e-12, **around: Any):
        super().__init__()
        self.first = first
        for name, layer in around.items():
            setattr(self, name, layer)
        self.layers = [
            Free(attention=pax.MultiHeadAttention(2, 4), attention_norm=norm(8, eps),
                 up=pax.Linear(8, 12), down=pax.Linear(12, 8), mlp_norm=norm(8, eps))
            for _ in range(2)
        ]  # fmt: skip

    def encoded(self, x):
        for block in self.layers:
            for own, part in (
                (block.attention_norm, lambda y, b=block: b.attention(y, y, y)),
                (block.mlp_norm, lambda y, b=block: b.down(gelu(b.up(y)))),
            ):
                x = x + part(own(x)) if self.first else own(x + part(x))
        return x


SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 12}  # fmt: skip


class Bert(Encoder):
    def __call__(self, ids):
        positions, types = jnp.arange(ids.shape[1]), jnp.zeros(ids.shape[1], int)
        x = self.word_embed(ids) + self.position_embed(positions) + self.type_embed(types)
        return self.encoded(self.embed_norm(x))


def bert() -> tuple[Any, Any]:
    """The class of transformers, and ours with its weights and the report of `adopt`."""
    config = transformers.BertConfig(vocab_size=11, max_position_embeddings=7, **SIZES)
    theirs = seeded(transformers.BertModel(config, add_pooling_layer=False))
    net = Bert(False, word_embed=pax.Embed(11, 8), position_embed=pax.Embed(7, 8),
               type_embed=pax.Embed(2, 8), embed_norm=norm(8, 1e-12))  # fmt: skip
    return theirs, pax.weights.adopt(net, arrays_of(theirs))


def test_a_bert():
    theirs, (net, _) = bert()
    ids = N.integers(0, 11, (2, 5))
    assert_close(net(ids), run(theirs, ids), rtol=1e-4, atol=1e-5)


def test_a_bert_trained_in_jax_and_in_torch_goes_back_into_its_class(tmp_path):
    theirs, (net, report) = bert()
    ids, goal = N.integers(0, 11, (2, 5)).astype(np.int32), x_of(2, 5, 8)

    @jax.jit
    def step(net):
        def loss(weights):
            return ((net.update_parameters(weights)(ids) - goal) ** 2).mean()

        weights = net.parameters()
        moved = jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))
        return net.update_parameters(moved)

    net = step(step(net))
    module = pax.export.as_torch(net, pax.export.spec("batch, 5", "int32"))
    optimizer = torch.optim.Adam(module.parameters(), 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        ((module(torch.from_numpy(ids)) - torch.from_numpy(goal)) ** 2).mean().backward()
        optimizer.step()
    trained, _ = pax.weights.adopt(net, arrays_of(module), origin="pax")
    path = tmp_path / "bert.safetensors"
    pax.weights.save_as(trained, path, like=arrays_of(theirs), report=report)
    before = run(theirs, ids)
    theirs.load_state_dict(safetensors.torch.load_file(path), strict=True)
    after = run(theirs, ids)
    assert_close(after, run(module, ids), rtol=1e-4, atol=1e-5)
    assert abs(after - before).max() > 0.01


def test_a_vit():
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=3, **SIZES)
    theirs = seeded(transformers.ViTModel(config, add_pooling_layer=False))
    images = x_of(2, 3, 8, 8)
    net = Encoder(True, 1e-12, patches=pax.Conv2D(3, 8, 4, 4, padding="VALID"),
                  cls_token=jnp.zeros((1, 1, 8)), positions=jnp.zeros((1, 5, 8)),
                  last_norm=norm(8, 1e-12))  # fmt: skip
    net, _ = pax.weights.adopt(net, arrays_of(theirs))
    x = net.patches(images.transpose(0, 2, 3, 1)).reshape(2, 4, 8)
    x = jnp.concatenate([jnp.broadcast_to(net.cls_token, (2, 1, 8)), x], 1) + net.positions
    assert_close(net.last_norm(net.encoded(x)), run(theirs, images), rtol=1e-4, atol=1e-5)


# Nets whose leaves are listed in the order of torch's arrays


def dense(inputs: int, outputs: int, bias: bool = True) -> Any:
    return pax.Linear(inputs, outputs, with_bias=bias)


def attention(**leaves: Any) -> Any:
    return Free(**{name: dense(8, 8, bias) for name, bias in leaves.items()})


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=20, d_model=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=12, decoder_ffn_dim=12, num_mel_bins=4,
        max_source_positions=6, max_target_positions=5, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip

    def layer(*parts: str):
        made = {}
        for part in parts:
            made[part] = attention(k=False, v=True, q=True, o=True)
            made[f"{part}_norm"] = norm(8)
        return Free(**made, fc1=dense(8, 12), fc2=dense(12, 8), mlp_norm=norm(8))

    encoder = Free(conv1=pax.Conv1D(4, 8, 3), conv2=pax.Conv1D(8, 8, 3),
                   positions=jnp.zeros((6, 8)),
                   layers=[layer("self_attention") for _ in range(2)], norm=norm(8))  # fmt: skip
    decoder = Free(embed=pax.Embed(20, 8), positions=jnp.zeros((5, 8)),
                   layers=[layer("self_attention", "cross_attention") for _ in range(2)],
                   norm=norm(8))  # fmt: skip
    return transformers.WhisperModel(config), Free(encoder=encoder, decoder=decoder), {}


def gpt2():
    config = transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=2, n_head=2, n_positions=6,
                                     bos_token_id=0, eos_token_id=0)  # fmt: skip
    blocks = [
        Free(attention_norm=norm(8), attention=Free(qkv=dense(8, 24), out=dense(8, 8)),
             mlp_norm=norm(8), up=dense(8, 32), down=dense(32, 8))
        for _ in range(2)
    ]  # fmt: skip
    net = Free(
        tokens=pax.Embed(11, 8), positions=pax.Embed(6, 8), blocks=blocks, final_norm=norm(8)
    )
    return transformers.GPT2Model(config), net, {"fused": "blocks"}


def distilbert():
    config = transformers.DistilBertConfig(vocab_size=11, dim=8, n_layers=2, n_heads=2,
                                           hidden_dim=12, max_position_embeddings=6)  # fmt: skip
    layers = [
        Free(attention=attention(q=True, k=True, v=True, o=True), attention_norm=norm(8),
             fc1=dense(8, 12), fc2=dense(12, 8), mlp_norm=norm(8))
        for _ in range(2)
    ]  # fmt: skip
    net = Free(word=pax.Embed(11, 8), position=pax.Embed(6, 8), embed_norm=norm(8), layers=layers)
    return transformers.DistilBertModel(config), net, {}


def clip():
    config = transformers.CLIPVisionConfig(image_size=8, patch_size=4, **SIZES)
    layers = [
        Free(attention=attention(k=True, v=True, q=True, o=True), norm1=norm(8), fc1=dense(8, 12),
             fc2=dense(12, 8), norm2=norm(8))
        for _ in range(2)
    ]  # fmt: skip
    net = Free(class_token=jnp.zeros(8), patches=pax.Conv2D(3, 8, 4, 4, with_bias=False),
               positions=jnp.zeros((5, 8)), pre_norm=norm(8), layers=layers,
               post_norm=norm(8))  # fmt: skip
    return transformers.CLIPVisionModel(config), net, {}


def text_in_images():
    theirs = nn.ModuleDict({"conv": nn.Conv2d(1, 8, 3), "rnn": nn.LSTM(8, 8, bidirectional=True),
                            "fc": nn.Linear(16, 3)})  # fmt: skip
    cells = Free(forward=pax.LSTM(8, 8), backward=pax.LSTM(8, 8))
    return theirs, Free(conv=pax.Conv2D(1, 8, 3), rnn=cells, fc=dense(16, 3)), {}


def dense_net():
    parts = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(8)
    theirs = nn.Sequential(*parts, nn.Linear(8, 3))  # two outputs of four channels together
    parts = pax.Conv2D(3, 4, 3), pax.BatchNorm2D(4), pax.Conv2D(4, 4, 3), pax.BatchNorm2D(8)
    return theirs, pax.Sequential(*parts, dense(8, 3)), {}


@pytest.mark.parametrize("made", [whisper, gpt2, distilbert, clip, text_in_images, dense_net])
def test_arrays_go_where_they_stand(made):
    theirs, net, options = made()
    file = arrays_of(seeded(theirs))
    _, report = pax.weights.adopt(net, file, origin="torch", **options)
    found = [name for row in report.rows for name in row.arrays]
    assert found == [name for name in file if "num_batches" not in name]
