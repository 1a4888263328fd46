"""Train a digit classifier in mixed precision, export it, serve it without jax.

python examples/digits.py [--epochs 30] [--output served/digits]
"""

import argparse
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import pax_export as pax


def make_net():
    """A small convolutional net: images ``[batch, 8, 8, 1]`` to logits ``[batch, 10]``."""
    net = pax.Sequential(
        pax.Conv2D(1, 32, 3),
        pax.BatchNorm2D(32),
        jax.nn.relu,
        pax.Conv2D(32, 64, 3, stride=2),
        pax.BatchNorm2D(64),
        jax.nn.relu,
        lambda x: x.reshape(x.shape[0], -1),
        pax.Dropout(0.4),
        pax.Linear(4 * 4 * 64, 10),
    )
    return net.apply(pax.experimental.default_mp_policy)  # float16, norms in float32


def loss_fn(params, net, loss_scale, images, labels):
    """Cross entropy, scaled up so that small gradients survive float16."""
    net, logits = net.update_parameters(params) % images
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    metrics = jnp.stack([losses.mean(), (logits.argmax(-1) == labels).mean()])
    return loss_scale.scale(losses.mean()), (net, metrics)


@jax.jit
def train_step(net, optimizer, loss_scale, images, labels):
    """One step; if a gradient overflows, the step is skipped and the scale halved."""
    gradient = jax.grad(loss_fn, has_aux=True)
    grads, (net, metrics) = gradient(net.parameters(), net, loss_scale, images, labels)
    return *pax.experimental.apply_scaled_gradients(net, optimizer, loss_scale, grads), metrics


def train(net, images, labels, epochs, batch=64):
    """Trains with Adam; returns the net and ``[loss, accuracy]`` of each epoch."""
    optimizer = pax.optim.from_optax(optax.adam(2e-3))(net.parameters())
    loss_scale = pax.precision.DynamicLossScale(jnp.float32(2**15))
    random, history = np.random.default_rng(0), []
    for epoch in track(range(1, epochs + 1), "training"):
        order, rows = random.permutation(len(images)), []
        for start in range(0, len(images) - batch + 1, batch):
            pick = order[start : start + batch]
            net, optimizer, loss_scale, metrics = train_step(
                net, optimizer, loss_scale, images[pick], labels[pick]
            )
            rows.append(metrics)
        history.append(np.mean(rows, axis=0))
        print(f"epoch {epoch:2}: loss {history[-1][0]:.4f}, accuracy {history[-1][1]:.1%}")
    return net, np.array(history)


def serve(model, images):
    """Asks a process without jax for the logits, in batches of 1, of 7 and of 64."""
    asked, answered = model.with_name("images.npy"), model.with_name("logits.npy")
    np.save(asked, images)
    server = Path(__file__).with_name("serve_digits.py")
    subprocess.run([sys.executable, server, model, asked, answered], check=True)
    return np.load(answered)


def draw(path, history, images, classes):
    """Saves a picture of the training curve and of some classified digits."""
    figure = matplotlib.figure.Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(3, 2))
    axes = left.subplots()
    axes.semilogy(history[:, 0], color="tab:red")
    axes.set(xlabel="epoch", title="training: loss (red) and accuracy (blue)")
    axes.twinx().plot(history[:, 1], color="tab:blue")
    for cell, image, digit in zip(right.subplots(3, 4).flat, images, classes):
        cell.imshow(image[..., 0], cmap="gray_r")
        cell.set_title(str(digit))
        cell.axis("off")
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("served/digits"))
    options = parser.parse_args()
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    x, held_out, y, labels = train_test_split(images, digits.target, test_size=360, random_state=0)

    net, history = train(make_net(), x, y, options.epochs)
    inputs = pax.export.spec("batch, 8, 8, 1", name="images")
    report = pax.export.to_saved_model(net, options.output, inputs, overwrite=True)

    logits, served = np.asarray(net.eval()(held_out)), serve(options.output, held_out)
    print(f"held-out accuracy: {(logits.argmax(-1) == labels).mean():.2%}")
    print(f"the served classes agree: {(served.argmax(-1) == logits.argmax(-1)).all()}")
    print(f"largest difference of the logits: {np.abs(served - logits).max():.2e}")
    print(report)
    draw(options.output.with_suffix(".png"), history, held_out, logits.argmax(-1))
    print(f"picture: {options.output.with_suffix('.png')}")


if __name__ == "__main__":
    main()
