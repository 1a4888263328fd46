"""Weights under the norms, masks and parametrizations of torch, adopted as torch computes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.utils import parametrizations, prune, spectral_norm

import pax_export as pax
from tests.closeness import assert_close

LAYERS = {
    "linear": (lambda: torch.nn.Linear(4, 7), lambda: pax.Linear(4, 7), (5, 4)),
    "square": (lambda: torch.nn.Linear(6, 6), lambda: pax.Linear(6, 6), (5, 6)),
    "conv": (lambda: torch.nn.Conv2d(3, 5, 3), lambda: pax.Conv2D(3, 5, 3, padding="VALID"),
             (2, 3, 8, 8)),
    "square_conv": (lambda: torch.nn.Conv1d(3, 3, 3),
                    lambda: pax.Conv1D(3, 3, 3, padding="VALID"), (2, 3, 8)),
    "transposed": (lambda: torch.nn.ConvTranspose2d(4, 6, 3),
                   lambda: pax.Conv2DTranspose(4, 6, 3, padding="VALID"), (2, 4, 5, 5)),
    "square_transposed": (lambda: torch.nn.ConvTranspose1d(4, 4, 4),
                          lambda: pax.Conv1DTranspose(4, 4, 4, padding="VALID"), (2, 4, 6)),
}  # fmt: skip


def trained(layer, x, steps=5):
    """The layer after some steps: torch's vectors are those before the last one."""
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
    return layer.eval()


def compare(layer, own, x):
    """Adopts the layer's state dict, and compares both functions."""
    net, report = pax.weights.adopt(own(), layer.state_dict(), origin="torch")
    expected = layer(x).detach().numpy()
    last = (0, *range(2, x.ndim), 1)  # channels are last here
    given = x.numpy() if x.ndim == 2 else x.numpy().transpose(last)
    found = np.asarray(net(given))
    found = found if x.ndim == 2 else np.moveaxis(found, -1, 1)
    assert_close(found, expected, 3e-5, atol=3e-5)
    return net, report


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("norm", [spectral_norm, parametrizations.spectral_norm])
def test_a_spectral_norm_is_computed_as_torch_does_in_eval_mode(norm, name, tmp_path):
    torch.manual_seed(len(name))
    make, own, shape = LAYERS[name]
    x = torch.randn(*shape)
    layer = trained(norm(make()), x)
    net, report = compare(layer, own, x)
    assert report.rows[0].how.startswith("spectral norm")
    path = tmp_path / "net.pt"
    pax.weights.save_as(net, path, like=layer.state_dict(), report=report)
    layer.load_state_dict(torch.load(path, weights_only=True))
    with pytest.raises(pax.errors.AdoptionError, match="changed weight does not have"):
        pax.weights.save_as(
            net.replace(weight=2 * net.weight), path, like=layer.state_dict(), report=report
        )


@pytest.mark.parametrize("name", ["linear", "conv", "transposed"])
def test_a_spectral_norm_that_was_never_trained(name):
    make, own, shape = LAYERS[name]
    for norm in (spectral_norm, parametrizations.spectral_norm):
        compare(norm(make()).eval(), own, torch.randn(*shape))


def test_a_spectral_norm_of_an_lstm():
    for norm in (spectral_norm, parametrizations.spectral_norm):
        lstm = norm(torch.nn.LSTM(3, 4, batch_first=True), "weight_hh_l0")
        x = torch.randn(2, 5, 3)
        lstm(x)
        net, _ = pax.weights.adopt(pax.LSTM(3, 4), lstm.eval().state_dict(), origin="torch")
        state, found = net.initial_state(2), []
        for step in range(5):
            state, y = net(state, x.numpy()[:, step])
            found.append(np.asarray(y))
        assert_close(np.stack(found, 1), lstm(x)[0].detach().numpy(), 1e-5, atol=1e-5)


def test_what_was_pruned_is_zero_and_goes_home(tmp_path):
    layer = prune.l1_unstructured(torch.nn.Linear(4, 7), "weight", 0.5)
    prune.random_unstructured(layer, "bias", 0.3)
    net, report = compare(layer, lambda: pax.Linear(4, 7), torch.randn(5, 4))
    path = tmp_path / "net.pt"
    new = net.replace(weight=2 * net.weight)
    pax.weights.save_as(new, path, like=layer.state_dict(), report=report)
    layer.load_state_dict(torch.load(path, weights_only=True))
    layer(torch.zeros(1, 4))  # torch computes the weight when it is called
    assert_close(layer.weight.detach().numpy().T, new.weight, 0)
    with pytest.raises(pax.errors.AdoptionError, match="not zero where its mask is"):
        pax.weights.save_as(net.replace(weight=net.weight + 1), path, like=layer.state_dict())


@pytest.mark.parametrize("trivial", [True, False])
def test_what_a_parametrization_computes_otherwise_is_refused(trivial):
    layer = parametrizations.orthogonal(torch.nn.Linear(4, 3), use_trivialization=trivial)
    several = parametrizations.spectral_norm(parametrizations.weight_norm(torch.nn.Linear(4, 3)))
    for each in (layer, several):
        with pytest.raises(pax.errors.AdoptionError, match="torch computes weight from it"):
            pax.weights.adopt(pax.Linear(4, 3), each.state_dict(), origin="torch")
