"""Train a digit classifier in mixed precision, export it, serve it without jax.

python examples/digits.py [--epochs 30] [--output served/digits] [--web]
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


@jax.jit
def classify(net, images):
    """The digit of each image."""
    return net(images).argmax(-1)


def train(net, images, labels, held_out, epochs, batch=64):
    """Trains with Adam; returns the net, and loss and both accuracies after each epoch."""
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
        loss, accuracy = np.mean(rows, axis=0)
        other = np.mean(np.asarray(classify(net.eval(), held_out[0])) == held_out[1])
        history.append((loss, accuracy, other))
        print(f"epoch {epoch:2}: loss {loss:.4f}, accuracy {accuracy:.1%}, held out {other:.1%}")
    return net, np.array(history)


def serve(model, images):
    """Asks a process without jax for the logits, in batches of 1, of 7 and of 64."""
    asked, answered = model.with_name("images.npy"), model.with_name("logits.npy")
    np.save(asked, images)
    server = Path(__file__).with_name("serve_digits.py")
    subprocess.run([sys.executable, server, model, asked, answered], check=True)
    return np.load(answered)


def draw(path, history, images, labels, classes):
    """Saves a picture: accuracy by epoch, and digits with what they are, the mistakes first."""
    figure = matplotlib.figure.Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(3, 2))
    axes, epochs = left.subplots(), np.arange(1, len(history) + 1)
    axes.plot(epochs, 100 * history[:, 1], ".-", label="training, with dropout")
    axes.plot(epochs, 100 * history[:, 2], ".-", label="held out")
    axes.set(xlabel="epoch", ylabel="accuracy in %", title="Digits classified rightly")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    right.suptitle(f"{(classes != labels).sum()} mistakes in {len(labels)} held-out digits")
    order = np.argsort(classes == labels, kind="stable")
    for cell, place in zip(right.subplots(3, 4).flat, order):
        true, found = labels[place], classes[place]
        cell.imshow(images[place, ..., 0], cmap="gray_r")
        cell.axis("off")
        text = true if found == true else f"{true}, taken for {found}"
        cell.set_title(text, fontsize=8, color="black" if found == true else "tab:red")
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("served/digits"))
    parser.add_argument("--web", action="store_true", help="write a page to draw digits on, too")
    options = parser.parse_args()
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    x, held_out, y, labels = train_test_split(images, digits.target, test_size=360, random_state=0)

    net, history = train(make_net(), x, y, (held_out, labels), options.epochs)
    inputs = pax.export.spec("batch, 8, 8, 1", name="images")
    report = pax.export.to_saved_model(net, options.output, inputs, overwrite=True)
    if options.web:
        print(pax.export.to_web(net, options.output.with_name("web"), inputs, overwrite=True))

    logits, served = np.asarray(net.eval()(held_out)), serve(options.output, held_out)
    print(f"held-out accuracy: {(logits.argmax(-1) == labels).mean():.2%}")
    print(f"the served classes agree: {(served.argmax(-1) == logits.argmax(-1)).all()}")
    print(f"largest difference of the logits: {np.abs(served - logits).max():.2e}")
    largest = np.float16(np.abs(logits).max())  # the net computes in float16, of 11 bits
    print(f"neighbors in float16 at the largest logit, {largest}: {np.spacing(largest):.2e} apart")
    print(report)
    draw(options.output.with_suffix(".png"), history, held_out, labels, logits.argmax(-1))
    print(f"picture: {options.output.with_suffix('.png')}")


if __name__ == "__main__":
    main()
