"""Models of the Hub, from a server on this machine that speaks its protocol."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save

import pax_export as pax
from pax_export.errors import ExportPathError, MissingWeightsFileError
from tests.generation.test_runtimes import ascii_tokenizer
from tests.nets import decoder_reference as reference
from tests.refusals import refused
from tests.weights.hub_server import TOKEN, hub

constants = pytest.importorskip("huggingface_hub.constants")

WEIGHT = np.arange(6, dtype=np.float32).reshape(3, 2)
FILES = {
    "config.json": b"{}",
    "model.safetensors": save({"weight": WEIGHT, "bias": np.ones(3, np.float32)}),
    "pytorch_model.bin": b"a pickle",
    "onnx/model.safetensors": b"another form",
}


@pytest.fixture
def server(monkeypatch, tmp_path):
    with hub() as (made, address):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )  # fmt: skip
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        made.repos["some/net"] = {"main": dict(FILES), "old": {"model.npz": b"?"}}
        yield made


def test_weights_of_the_hub(server):
    net, _ = pax.weights.adopt(pax.Linear(2, 3), "some/net")
    np.testing.assert_array_equal(net.weight, WEIGHT.T)
    read = {parts[-1] for command, *parts in server.asked if "resolve" in parts}
    assert read == {"config.json", "model.safetensors"}  # safetensors before pickles
    with pax.weights.open_source("some/net/model.safetensors", revision="main") as source:
        assert set(source.entries) == {"bias", "weight"}


def test_a_local_folder_comes_first(server, tmp_path):
    (tmp_path / "some" / "net").mkdir(parents=True)
    (tmp_path / "some/net/model.safetensors").write_bytes(save({"mine": WEIGHT}))
    with pax.weights.open_source("some/net") as source:
        assert list(source.entries) == ["mine"]
    assert not server.asked


def test_what_the_hub_does_not_give(server, monkeypatch):
    with refused(MissingWeightsFileError, where="some/net, revision 'typo'"):
        pax.weights.open_source("some/net", revision="typo")
    with refused(MissingWeightsFileError, where="nobody/there"):
        pax.weights.open_source("nobody/there")
    server.private.add("some/net")
    with refused(MissingWeightsFileError, "token"):
        pax.weights.open_source("some/net")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pax.weights.open_source("some/net") as source:
        assert set(source.entries) == {"bias", "weight"}


def test_a_broken_download_leaves_nothing_that_is_read(server):
    server.broken.add("model.safetensors")
    with refused(MissingWeightsFileError, where="some/net"):
        pax.weights.open_source("some/net")
    server.broken.clear()
    with pax.weights.open_source("some/net") as source:
        np.testing.assert_array_equal(source.entries["weight"].read(), WEIGHT)


def test_a_full_disk(server, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with refused(MissingWeightsFileError, where="some/net"):
        pax.weights.open_source("some/net")


def test_a_language_model_goes_there_and_comes_back(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    config = {**reference.CONFIGS["llama"], "vocab_size": 270}
    folder = reference.write_folder(tmp_path / "local", config, reference.random_weights(config))
    lm = pax.nets.Decoder.from_pretrained(folder)
    pax.generation.save_pretrained(lm, tmp_path / "lm", tokenizer=ascii_tokenizer(), validate=False)
    url = pax.weights.push_to_hub(tmp_path / "lm", "me/lm", private=True, revision="v1")
    assert url.startswith("http://127.0.0.1/me/lm/commit/")
    assert "me/lm" in server.private
    card = server.repos["me/lm"]["v1"]["README.md"].decode()
    assert card.startswith("---\nlibrary_name: pax-export\n")
    found, tokenizer = pax.generation.from_pretrained("me/lm", revision="v1")
    tokens = np.arange(5)[None]
    np.testing.assert_array_equal(found(tokens), lm(tokens))
    assert tokenizer.vocab_size == ascii_tokenizer().vocab_size


def test_adapters_and_exports_go_there(server, tmp_path):
    net = pax.Sequential(pax.Linear(2, 3))
    added = pax.adapters.add(net, pax.Linear, 2)
    pax.adapters.save(added, tmp_path / "adapter")
    pax.weights.push_to_hub(tmp_path / "adapter", "me/adapter")
    loaded = pax.adapters.load(net, "me/adapter")
    x = np.ones((1, 2), np.float32)
    np.testing.assert_array_equal(loaded(x), added(x))
    pax.export.to_onnx(
        net, tmp_path / "net.onnx", pax.export.spec("batch, 2"), external_data=True, validate=False
    )
    server.repos["me/net"] = {"main": {"README.md": b"mine"}}
    pax.weights.push_to_hub(tmp_path / "net.onnx", "me/net")
    there = server.repos["me/net"]["main"]
    assert there["README.md"] == b"mine"
    assert sorted(name.split(".")[-1] for name in there) == ["data", "html", "md", "onnx"]
    with refused(ExportPathError, "nothing to upload"):
        pax.weights.push_to_hub(tmp_path / "typo", "me/net")


def test_a_report_is_named_in_the_card(server, tmp_path):
    pax.export.to_saved_model(
        pax.Linear(2, 3), tmp_path / "saved", pax.export.spec("batch, 2"), validate=False
    )
    pax.weights.push_to_hub(tmp_path / "saved", "me/saved")
    there = server.repos["me/saved"]["main"]
    assert {"saved_model.pb", "pax_export.json", "variables/variables.index"} <= set(there)
    assert "Linear" in there["README.md"].decode()
    assert json.loads(there["pax_export.json"])


def test_without_huggingface_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pax_export.weights._hub.find_spec", lambda name: None)
    with refused(MissingWeightsFileError, "pax-export[hub]"):
        pax.weights.open_source("some/net")
