"""Adapters on disk: PEFT's files read, files that PEFT reads written, everything else refused.

``peft_0_21`` holds what PEFT 0.21.2 wrote under torch 2.13, with the weights of the base and the
outputs that torch gave.  (Folders that `save` wrote were loaded there as well: the outputs agreed
to 1e-6.)
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import pax_export as pax
from pax_export import adapters
from pax_export import transforms as T
from tests.adapters.layers import disturbed, names_of, same
from tests.closeness import assert_close
from tests.core.models import Free
from tests.refusals import refused

PEFT = Path(__file__).parent / "peft_0_21"
INPUTS = jnp.array([[1, 2, 3], [4, 0, 1]])


class Net(pax.Module):
    """The net of the files."""

    def __init__(self):
        super().__init__()
        self.embed = pax.Embed(5, 3)
        self.conv1 = pax.Conv1D(3, 4, 3)
        self.conv2 = pax.Conv2D(1, 2, 3, data_format="NCHW")
        self.layers = [pax.Linear(8, 6), pax.Linear(6, 6, with_bias=False)]
        self.head = pax.Linear(6, 2)

    def __call__(self, tokens):
        x = self.conv1(self.embed(tokens))
        x = jax.nn.relu(self.conv2(x[:, None]))
        x = x.transpose(0, 2, 1, 3).reshape(*tokens.shape, 8)
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.head(x)


def base():
    """The net with the weights that it had in torch."""
    arrays = np.load(PEFT / "base.npz")
    net = Net()
    for name in arrays:
        array = arrays[name]
        if name.endswith("weight") and not name.startswith("embed"):
            array = np.moveaxis(array, (0, 1), (-1, -2))
        net = net.at(name).set(jnp.asarray(array))
    return net


@pytest.mark.parametrize("case", ["plain", "rslora", "dora"])
def test_what_peft_wrote(case, tmp_path):
    outputs = np.load(PEFT / "outputs.npz")
    net = base()
    assert_close(net(INPUTS), outputs["base"])
    loaded = adapters.load(net, PEFT / case).eval()
    assert_close(loaded(INPUTS), outputs[case])
    assert_close(adapters.merge(loaded)(INPUTS), outputs[case])
    adapters.save(loaded, tmp_path / case)
    _is_the_same_for_peft(tmp_path / case, PEFT / case)
    assert same(adapters.load(net, tmp_path / case).eval().parameters(), loaded.parameters())


def _is_the_same_for_peft(ours, theirs):
    mine = safetensors.numpy.load_file(ours / "adapter_model.safetensors")
    other = safetensors.numpy.load_file(theirs / "adapter_model.safetensors")
    assert mine.keys() == other.keys()
    assert all(np.array_equal(mine[name], other[name]) for name in mine)
    config = json.loads((ours / "adapter_config.json").read_text())
    wanted = json.loads((theirs / "adapter_config.json").read_text())
    assert sorted(config.pop("target_modules")) == sorted(wanted["target_modules"])
    for name in ("alpha_pattern", "rank_pattern"):
        assert {k.replace("\\", ""): v for k, v in config.pop(name).items()} == wanted[name]
    assert {name: wanted[name] for name in config} == config | {"auto_mapping": ...} or (
        all(wanted[name] == value for name, value in config.items())
    )


def test_modules_that_were_trained_as_a_whole_train_on():
    loaded = adapters.load(base(), PEFT / "plain")
    assert names_of(loaded.parameters())[-2:] == ["head.weight", "head.bias"]
    assert not (loaded.head.weight == base().head.weight).all()


def test_saved_and_loaded_it_is_the_same(tmp_path):
    net = pax.Sequential(T.Scan(pax.Linear, length=3, scan_output=False)(4, 4), pax.Linear(4, 2))
    saved = disturbed(adapters.add(net, pax.Linear, 2, alpha=3, dropout=0.25, rslora=True))
    saved = disturbed(adapters.add(saved, "modules.1", 1, name="second", dora=True), 1)
    for name in ("default", "second"):
        adapters.save(saved, tmp_path / "deep" / name, name=name)
    loaded = adapters.load(net, tmp_path / "deep" / "default")
    loaded = adapters.load(loaded, tmp_path / "deep" / "second", name="second")
    assert jax.tree_util.tree_structure(loaded) == jax.tree_util.tree_structure(saved)
    assert same(loaded.parameters(), saved.parameters())
    adapters.save(loaded, tmp_path / "deep" / "second")  # over another one
    arrays = safetensors.numpy.load_file(tmp_path / "deep/second/adapter_model.safetensors")
    assert arrays["base_model.model.modules.0.scan_module.lora_A.weight"].shape == (3, 2, 4)


def test_weights_of_the_base_fit_the_net_with_adapters(tmp_path):
    net, other = pax.Sequential(pax.Linear(4, 4)), pax.Sequential(pax.Linear(4, 4))
    pax.save_weights(net, tmp_path / "base.safetensors")
    adapted = adapters.add(other, pax.Linear, 2)
    loaded, report = pax.load_weights(adapted, tmp_path / "base.safetensors", strict=False)
    assert same(adapters.remove(loaded, "default"), net)
    assert report.missing == tuple(name for name in names_of(adapted) if ".adapters." in name)
    pax.save_weights(adapted, tmp_path / "all.safetensors")
    assert same(pax.load_weights(adapted, tmp_path / "all.safetensors"), adapted)


def test_half_precision_is_read_as_float32(tmp_path):
    net = pax.Linear(8, 4)
    half = disturbed(adapters.lora(net, 2)).map(lambda x: x.astype(jnp.bfloat16))
    adapters.save(half, tmp_path / "a")
    loaded = adapters.load(net, tmp_path / "a").adapters["default"]
    assert loaded.lora_a.dtype == jnp.float32
    assert (loaded.lora_a == half.adapters["default"].lora_a.astype(jnp.float32)).all()


def test_paths_of_another_model(tmp_path):
    net = pax.Sequential(pax.Linear(4, 4), pax.Linear(4, 4))
    rename = {"modules.*": "model.layers.*.mlp"}
    adapters.save(adapters.add(net, pax.Linear, 2), tmp_path / "a", rename=rename)
    arrays = safetensors.numpy.load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.1.mlp.lora_A.weight" in arrays
    assert len(adapters.load(net, tmp_path / "a", rename=rename)[1].adapters) == 1
    with refused(pax.errors.WeightsMismatchError, "rename={"):
        adapters.load(net, tmp_path / "a")
    for use in (adapters.save, adapters.load):
        net = net if use is adapters.load else adapters.add(net, "modules.0", 2)
        with refused(pax.errors.InvalidArgumentError, "modules.0", got="'module.*'"):
            use(net, tmp_path / "a", rename={"module.*": "h.*"})


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_of_a_fused_layer_are_split_among_its_parts(dora, tmp_path):
    """In the order of `rename`; they cannot be saved as those of one layer."""
    fused = pax.Sequential(pax.Linear(4, 7))
    tuned = disturbed(adapters.add(fused, "modules.0", 2, dora=dora))
    base = np.asarray(tuned.modules[0].weight)
    adapters.save(tuned, tmp_path / "a", rename={"modules.0": "model.fused"})
    merged = adapters.merge(tuned).modules[0].weight
    last, first = jnp.asarray(base[:, 3:]), jnp.asarray(base[:, :3])
    net = pax.Sequential(pax.Linear(4, 4).replace(weight=last),
                         pax.Linear(4, 3).replace(weight=first))  # fmt: skip
    rename = {"modules.1": "model.fused", "modules.0": "model.fused"}
    loaded = adapters.load(net, tmp_path / "a", rename=rename)
    found = adapters.merge(loaded)
    assert_close(found.modules[1].weight, merged[:, :3], rtol=1e-6)
    assert_close(found.modules[0].weight, merged[:, 3:], rtol=1e-6)
    with refused(pax.errors.InvalidArgumentError, "'model.fused'", "adapters.merge"):
        adapters.save(loaded, tmp_path / "b", rename=rename)
    other = pax.Sequential(pax.Linear(4, 4), pax.Linear(4, 4))
    with refused(pax.errors.WeightsMismatchError, "model.fused.lora_B.weight", "modules.0"):
        adapters.load(other, tmp_path / "a", rename=rename)


def test_adapters_of_an_embedding_that_is_the_head_too(tmp_path):
    """PEFT changes the embedding alone, unless its file says that both are tied."""
    config = pax.nets.DecoderConfig.llama(
        vocab_size=9, dim=4, num_layers=1, num_heads=2, hidden_dim=8, tied=True
    )
    lm = pax.nets.Decoder(config)
    tuned = disturbed(adapters.add(lm, "embed", rank=2))
    adapters.save(tuned, tmp_path)
    same(adapters.load(lm, tmp_path), tuned)
    file = tmp_path / "adapter_config.json"
    said = json.loads(file.read_text())
    assert said["ensure_weight_tying"] is True
    file.write_text(json.dumps({**said, "ensure_weight_tying": False}))
    with refused(pax.errors.InvalidArgumentError, "embed of a net", "lm.untied()"):
        adapters.load(lm, tmp_path)
    apart = adapters.load(lm.untied(), tmp_path)
    merged = adapters.merge(apart)
    assert_close(merged.head.weight, lm.embed.weight.T)
    assert_close(merged.embed.weight, adapters.merge(tuned).embed.weight)
    adapters.save(apart, tmp_path)
    assert json.loads(file.read_text())["ensure_weight_tying"] is False
    # Those of the head are for a net that has one.
    rename = {"head": "lm_head"}
    adapters.save(disturbed(adapters.add(lm.untied(), "head", rank=2)), tmp_path, rename=rename)
    for options in ({}, {"rename": rename}):
        with refused(pax.errors.PaxError, "lm.untied()", '"head": "lm_head"'):
            adapters.load(lm, tmp_path, **options)
    assert adapters.load(lm.untied(), tmp_path, rename=rename).head.adapters


def test_a_path_that_ends_another_has_an_alpha_of_its_own(tmp_path):
    inner, block = pax.Sequential(pax.Linear(4, 4)), {"fc": pax.Linear(4, 4)}
    net = Free(fc=pax.Linear(4, 4), inner=inner, block=block)
    saved = adapters.add(adapters.add(net, ("inner", "block"), 2, alpha=2), "fc", 2, alpha=9)
    adapters.save(saved, tmp_path / "a")
    loaded = adapters.load(net, tmp_path / "a")
    assert loaded.fc.adapters["default"].alpha == 9
    assert loaded.block["fc"].adapters["default"].alpha == 2


# --- mistakes -----------------------------------------------------------------------


def written(folder, arrays=None, **config):
    """A folder of adapters, as somebody else may have written it."""
    folder.mkdir(parents=True, exist_ok=True)
    if arrays is None:
        arrays = {"base_model.model.lora_A.weight": np.ones((2, 8), np.float32),
                  "base_model.model.lora_B.weight": np.ones((4, 2), np.float32)}  # fmt: skip
    safetensors.numpy.save_file(arrays, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "lora_alpha": 4, "r": 2, **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


MISMATCH = pax.errors.WeightsMismatchError


def test_adapters_of_another_model_are_refused(tmp_path):
    net = pax.Sequential(pax.Linear(8, 4), pax.LayerNorm(4, -1))
    prefix = "base_model.model.modules."
    arrays = {
        f"{prefix}0.lora_A.weight": np.ones((2, 9), np.float32),
        f"{prefix}0.lora_B.weight": np.ones((4, 2), np.float32),
        f"{prefix}1.lora_B.weight": np.ones((4, 2), np.float32),
        f"{prefix}2.lora_A.weight": np.ones((4, 2), np.float32),
        f"{prefix}0.lora_B.bias": np.ones(4, np.float32),
    }
    folder = written(tmp_path / "a", arrays)
    named = (f"{prefix}0.lora_B.bias", f"{prefix}1.lora_B.weight", f"{prefix}2.lora_A.weight",
             f"{prefix}0.lora_A.weight: float32[2,9] in the file, [2,8]",
             "rename={path: path in the file}")  # fmt: skip
    with refused(MISMATCH, *named, where=str(folder)):
        adapters.load(net, folder)
    for given, missing in (("lora_A.weight", "lora_B.weight"), ("bias", "")):
        array = np.ones((2, 8) if missing else 4, np.float32)
        with refused(MISMATCH, f"{prefix}0.{missing}" if missing else ""):
            adapters.load(net, written(tmp_path / "b", {f"{prefix}0.{given}": array}))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.ones((2, 8), np.int32), np.ones((4, 2), np.int32)),
        (np.ones((2, 8), np.float32), np.ones(4, np.float32)),
        (np.ones((0, 8), np.float32), np.ones((4, 0), np.float32)),
    ],
)
def test_adapters_of_other_shapes_and_dtypes_are_refused(a, b, tmp_path):
    names = [f"base_model.model.lora_{each}.weight" for each in "AB"]
    folder = written(tmp_path / "a", dict(zip(names, (a, b))))
    with refused(MISMATCH, names[1]):
        adapters.load(pax.Linear(8, 4), folder)


@pytest.mark.parametrize("kind", ["target_modules", "modules_to_save"])
def test_a_module_without_its_arrays_is_refused(kind, tmp_path):
    net = pax.Sequential(pax.Linear(8, 4), pax.Linear(4, 3), pax.Linear(3, 2))
    whole = adapters.add(net, ["modules.0", "modules.1"], 2, train="modules.2")
    adapters.save(whole, tmp_path)
    file, path = tmp_path / "adapter_model.safetensors", "modules.0"
    if kind == "modules_to_save":
        path = "modules.2"
    arrays = safetensors.numpy.load_file(file)
    kept = {name: array for name, array in arrays.items() if f".{path}." not in name}
    assert 0 < len(kept) < len(arrays)
    safetensors.numpy.save_file(kept, file)
    with refused(MISMATCH, f"base_model.model.{path}.*", kind, where=str(tmp_path)):
        adapters.load(net, tmp_path)


def test_folders_without_adapters_are_refused(tmp_path):
    layer, missing = pax.Linear(8, 4), pax.errors.MissingWeightsFileError
    with refused(missing):
        adapters.load(layer, tmp_path)
    folder = written(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with refused(missing, "adapter_model.safetensors"):
        adapters.load(layer, folder)
    (folder / "adapter_config.json").write_text("{")
    with refused(pax.errors.WeightsFileError, "adapter_config.json"):
        adapters.load(layer, folder)


@pytest.mark.parametrize(
    ("config", "got"),
    [
        ({"peft_type": "IA3"}, "got: peft_type='IA3'"),
        ({"init_lora_weights": "pissa_niter_4"}, "got: init_lora_weights='pissa_niter_4'"),
        ({"use_qalora": True, "layer_replication": [[0, 1]]}, "got: layer_replication="),
        ({"lora_alpha": "much"}, "got: ValueError"),
        ({"alpha_pattern": {"(": 3}}, "got: "),
        ({"alpha_pattern": [3]}, "got: "),
        ({"lora_alpha": float("inf")}, "inf"),
        ({"lora_dropout": 1.5}, "1.5"),
    ],
)
def test_unsupported_configurations_are_refused(config, got, tmp_path):
    folder = written(tmp_path / "a", **config)
    with refused(pax.errors.WeightsFileError, got, str(folder)):
        adapters.load(pax.Linear(8, 4), folder)


def test_other_files_are_not_replaced(tmp_path):
    net = adapters.lora(pax.Linear(8, 4), 2)
    (tmp_path / "notes.txt").write_text("mine")
    error = pax.errors.ExportPathError
    with refused(error, where=str(tmp_path), got="a directory with notes.txt"):
        adapters.save(net, tmp_path)
    with pytest.raises(OSError):
        adapters.save(net, tmp_path / ("x" * 300))
    adapters.save(net, tmp_path / "a")
    (tmp_path / "a" / "README.md").write_text("mine")
    with refused(error, "README.md"):
        adapters.save(net, tmp_path / "a")


def test_tracers_plain_nets_and_taken_names_are_refused(tmp_path):
    net, invalid = adapters.lora(pax.Linear(8, 4), 2), pax.errors.InvalidArgumentError
    with pytest.raises(pax.errors.InvalidArgumentTypeError):
        jax.jit(lambda net: adapters.save(net, tmp_path / "a"))(net)
    assert not (tmp_path / "a").exists()
    with pytest.raises(invalid):
        adapters.save(pax.Linear(8, 4), tmp_path / "a")
    adapters.save(net, tmp_path / "a")
    with refused(invalid, "'default'"):
        adapters.load(net, tmp_path / "a")


def test_names_may_be_none_and_are_paths(tmp_path):
    net = pax.adapters.add(pax.Sequential(pax.Linear(8, 4)), "modules.0", rank=2)
    pax.adapters.save(net, tmp_path / "a", rename=None)
    base = pax.Sequential(pax.Linear(8, 4))
    assert pax.adapters.load(base, tmp_path / "a", rename=None).modules[0].adapters
    for wrong in (["a"], {"modules.0": 1}, 3):
        for use in (
            lambda wrong: pax.adapters.save(net, tmp_path / "b", rename=wrong),
            lambda wrong: pax.adapters.load(base, tmp_path / "a", rename=wrong),
        ):
            with pytest.raises((TypeError, AttributeError, ValueError)):
                use(wrong)
    assert not (tmp_path / "b").exists()
