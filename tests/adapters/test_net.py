"""Adapters over a whole net: which layers, what trains, switched, merged, taken back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import pax_export as pax
from pax_export import adapters
from tests.adapters.layers import disturbed, names_of, same
from tests.closeness import assert_close
from tests.refusals import refused


class Net(pax.Module):
    """Some of everything: an embedding, attention, a norm, a head."""

    def __init__(self):
        super().__init__()
        self.embed = pax.Embed(12, 8)
        self.attention = pax.MultiHeadAttention(2, 4)
        self.norm = pax.LayerNorm(8, -1)
        self.layers = [pax.Linear(8, 8), pax.Linear(8, 8)]
        self.head = pax.Linear(8, 3)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = self.norm(x + self.attention(x, x, x))
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return self.head(x)


TOKENS = jnp.array([[1, 2, 3, 4], [5, 6, 7, 11]])


def adapted_paths(net):
    return {name.split(".adapters")[0] for name in names_of(net.parameters()) if "lora" in name}


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        ("attention", {f"attention.{n}_projection" for n in ("query", "key", "value", "output")}),
        ("*query_projection", {"attention.query_projection"}),
        ("layers", {"layers.0", "layers.1"}),
        ((pax.Embed, "layers.0"), {"embed", "layers.0"}),
        (lambda module: getattr(module, "out_dim", 0) == 3, {"head"}),
    ],
)
def test_targets_are_what_at_selects(targets, wanted):
    net = Net()
    assert adapted_paths(adapters.add(net, targets, 2)) == wanted
    assert adapted_paths(adapters.add(net, net.at(targets), 2)) == wanted
    assert adapted_paths(net.at(targets).lora(2)) == wanted


def test_base_weights_keep_their_names():
    net = Net()
    adapted = adapters.add(net, pax.Linear, 2)
    own = [name for name in names_of(adapted) if ".adapters." not in name]
    assert sorted(own) == sorted(names_of(net))
    assert adapted.layers[0].weight is net.layers[0].weight


def test_a_head_can_be_trained_too():
    net = adapters.add(Net(), pax.Linear, 2, train="head")
    trained = names_of(net.parameters())
    assert trained[-2:] == ["head.weight", "head.bias"]
    assert all(".adapters." in name for name in trained[:-2])
    again = adapters.add(net, "layers.0", 3, name="more")
    assert "head.weight" in names_of(again.parameters())
    froze = pax.freeze_parameters(Net())
    assert "head.bias" in names_of(adapters.add(froze, "layers", 2, train="head").parameters())


def test_it_learns_and_the_base_stays_as_it_was():
    net = Net()
    adapted = adapters.add(net, pax.Linear, 2, key=jax.random.key(0), train="head")
    optimizer = pax.optim.from_optax(optax.adam(0.1))(adapted.parameters())
    labels = jnp.array([[0, 1, 2, 0], [1, 2, 0, 1]])

    @jax.jit
    def step(net, optimizer):
        def loss(params):
            logits = net.update_parameters(params)(TOKENS)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(net.parameters())
        optimizer, updates = optimizer % (grads, net.parameters())
        params = jax.tree_util.tree_map(jnp.subtract, net.parameters(), updates)
        return net.update_parameters(params), optimizer, value

    states = names_of(optimizer)
    losses = []
    for _ in range(60):
        adapted, optimizer, value = step(adapted, optimizer)
        losses.append(float(value))
    assert losses[-1] < losses[0] / 2 and step._cache_size() == 1
    assert not any("embed" in name or "norm" in name for name in states)
    merged = adapters.merge(adapted)
    assert_close(merged(TOKENS), adapted(TOKENS), 1e-5)
    assert same(adapters.remove(adapted, "default").replace(head=net.head), net)
    assert jax.tree_util.tree_structure(merged) == jax.tree_util.tree_structure(net)
    assert same(adapters.unmerge(merged, adapted), adapted)


def test_several_adapters_add_up_and_are_switched_by_name():
    net = Net()
    two = adapters.add(net, "layers", 2, name="french")
    two = disturbed(adapters.add(two, ("layers.0", "embed"), 3, name="german"))
    assert adapters.names(two) == ["german", "french"] or adapters.names(two) == [
        "french",
        "german",
    ]
    of_one = adapters.remove(two, "german")
    assert same(adapters.activate(two, "french")(TOKENS), of_one(TOKENS))
    assert same(adapters.activate(two, ())(TOKENS), net(TOKENS))
    weighted = adapters.activate(two, {"french": 0.25, "german": 2})
    assert_close(weighted(TOKENS), adapters.merge(weighted)(TOKENS), 1e-5)
    assert all("german" in name for name in names_of(adapters.activate(two, "german").parameters()))
    assert same(adapters.activate(adapters.activate(two, ()), ["french", "german"]), two)
    assert same(adapters.merge(adapters.activate(two, ())), net)


def test_unmerge_keeps_changes_of_other_layers():
    net = disturbed(adapters.add(Net(), "layers", 2))
    merged = adapters.merge(net)
    other = merged.replace(head=pax.Linear(8, 5))
    back = adapters.unmerge(other, net)
    assert same(back.layers, net.layers) and back.head.weight is other.head.weight
    assert names_of(back.parameters()) == names_of(net.parameters())


def test_a_tied_head_sees_the_adapters_of_its_embedding():
    config = pax.nets.DecoderConfig.llama(
        vocab_size=20, dim=8, num_layers=2, num_heads=2, hidden_dim=16, tied=True
    )
    lm = pax.nets.Decoder(config)
    adapted = disturbed(adapters.add(lm, ("embed", "layers.attention"), 2, dora=True))
    assert_close(adapted(TOKENS), adapters.merge(adapted)(TOKENS), 2e-5)
    assert (adapters.weight_of(adapted.embed) == adapters.merge(adapted).embed.weight).all()
    assert adapters.weight_of(lm.embed) is lm.embed.weight
    listed = adapted.listed()
    assert_close(listed(TOKENS), adapted(TOKENS), 2e-5)


@pytest.mark.parametrize(
    ("call", "where", "got"),
    [
        (lambda net, _: adapters.add(net, "layer.0", 2), "add.targets, in Net", "'layer.0'"),
        (lambda net, _: adapters.add(net, "norm", 2), "add.targets", "'norm'"),
        (lambda net, _: adapters.add(net, "layers", 2, train="head.bias"), "add.train", ""),
        (lambda net, _: adapters.add(net, "head", 2, train="head"), "add.targets", "head"),
        (lambda net, _: adapters.add(net, pax.Linear, 4), "head", "rank 4 for 3"),
        (lambda _, net: adapters.add(net, "layers", 2, name="french"), "layers.0: Linear", ""),
        (lambda _, net: adapters.activate(net, "frensh"), "adapters.activate", "'frensh'"),
        (lambda _, net: adapters.remove(net, "x"), "adapters.remove", "'x'"),
        (lambda _, net: adapters.activate(net, {"french": "much"}), "activate: french", ""),
        (lambda _, net: adapters.activate(net, 3), "which", "3"),
        (lambda _, net: adapters.merge(adapters.merge(net)), "", ""),
    ],
)
def test_invalid_arguments_are_refused(call, where, got):
    net = Net()
    kinds = (pax.errors.InvalidArgumentError, pax.errors.InvalidArgumentTypeError)
    with refused(kinds, where, f"got: {got}" if got else ""):
        call(net, adapters.add(net, "layers", 2, name="french"))


# --- mistakes -----------------------------------------------------------------------


def test_unmerge_refuses_weights_trained_after_merging():
    net = disturbed(adapters.add(Net(), "layers", 2))
    merged = adapters.merge(net)
    changed = merged.at("layers.1.weight").apply(lambda w: w + 1)
    with refused(pax.errors.InvalidArgumentError, "adapters.unmerge", where="layers.1"):
        adapters.unmerge(changed, net)


def test_adapters_of_several_ranks_are_stacked_after_padding():
    config = pax.nets.DecoderConfig.llama(
        vocab_size=7, dim=8, num_layers=3, num_heads=2, num_kv_heads=1, hidden_dim=8, tied=True
    )
    lm = pax.nets.Decoder(config, layers="listed")
    ranks = {0: (1, 3.0), 1: (3, 3.0), 2: (2, 5.0)}
    for layer, (rank, alpha) in ranks.items():
        lm = pax.adapters.add(lm, f"layers.{layer}.attention.query", rank=rank, alpha=alpha)
    lm = lm.at("layers.*.attention.query.adapters.*.lora_b").apply(lambda b: b + 0.5)
    tokens = jnp.array([[3, 1, 4]])
    with refused(ValueError, "rank", "adapters.pad_ranks(net) before"):
        lm.scanned()
    padded = pax.adapters.pad_ranks(lm)
    assert_close(padded(tokens), lm(tokens), rtol=1e-5)
    scanned = padded.scanned()
    assert_close(scanned(tokens), lm(tokens), rtol=1e-5)
    adapter = padded.layers[0].attention.query.adapters["default"]
    assert (adapter.rank, adapter.alpha) == (3, 3.0)
    zeros = jax.grad(lambda net: (net(tokens) ** 2).sum())(padded)
    zeros = zeros.layers[0].attention.query.adapters["default"]
    assert not zeros.lora_a[..., 1:].any() and not zeros.lora_b[..., 1:, :].any()


def test_what_was_frozen_before_is_frozen_after_adapters_are_removed():
    """Biases that train beside adapters, PEFT's ``bias="all"``."""
    trained = adapters.add(Net(), "layers", 2).at("**.bias").unfreeze()
    assert "layers.0.bias" in names_of(trained.parameters())
    assert "layers.0.weight" not in names_of(trained.parameters())
    for removed in (adapters.remove(trained, "default"), adapters.merge(trained)):
        assert names_of(removed.parameters()) == names_of(Net().parameters())
    partly = Net().at("head.weight").freeze()
    again = adapters.remove(adapters.add(partly, "layers", 2).at("head.bias").unfreeze(), "default")
    assert names_of(again.parameters()) == names_of(partly.parameters())
    later = adapters.remove(adapters.add(Net(), "layers", 2).at("head.bias").freeze(), "default")
    assert "head.bias" not in names_of(later.parameters())
