"""Train a digit classifier on all devices of one process, or of many; export it.

In one process:

    python examples/distributed.py [--fully-sharded] [--mixed-precision] [--output served/digits]

In two processes, on one machine or on two (then with the name of the first):

    python examples/distributed.py --coordinator localhost:1234 --processes 2 --process 0 &
    python examples/distributed.py --coordinator localhost:1234 --processes 2 --process 1

Where SLURM, GKE or the like starts the processes:

    srun python examples/distributed.py --cluster

With `--checkpoints DIRECTORY` it goes on where it stood, on any number of devices.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import pax_export as pax


def make_net(mixed_precision):
    """A small convolutional net: images ``[batch, 8, 8, 1]`` to logits ``[batch, 10]``."""
    net = pax.Sequential(
        pax.Conv2D(1, 16, 3),
        pax.BatchNorm2D(16),
        jax.nn.relu,
        pax.Conv2D(16, 32, 3, stride=2),
        pax.BatchNorm2D(32),
        jax.nn.relu,
        lambda x: x.reshape(x.shape[0], -1),
        pax.Dropout(0.2),
        pax.Linear(4 * 4 * 32, 10),
    )
    return net.apply(pax.experimental.default_mp_policy) if mixed_precision else net


def loss_fn(params, net, loss_scale, images, labels):
    """Cross entropy, scaled; the batch is that of all devices, and so is the mean."""
    net, logits = net.update_parameters(params) % images
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return loss_scale.scale(losses.mean()), (net, losses.mean())


def make_state(mesh, rules, options):
    """A net, its optimizer and a loss scale, made in parts on the devices."""
    adam = pax.optim.from_optax(optax.adam(1e-3))
    net = pax.sharding.init(lambda: make_net(options.mixed_precision), mesh, rules)
    following = pax.sharding.following(net, rules)
    optimizer = pax.sharding.init(lambda: adam(net.parameters()), mesh, following)
    loss_scale = pax.precision.NoOpLossScale()
    if options.mixed_precision:
        loss_scale = pax.precision.DynamicLossScale(jnp.float32(2**15))
        loss_scale = pax.sharding.shard(loss_scale, mesh)
    return {"net": net, "optimizer": optimizer, "loss_scale": loss_scale}


def make_train_step(mesh, rules):
    """One step; what it returns lies on the mesh as what it is given."""

    @jax.jit
    def train_step(state, images, labels):
        net, optimizer, loss_scale = state["net"], state["optimizer"], state["loss_scale"]
        gradient = jax.grad(loss_fn, has_aux=True)
        grads, (net, loss) = gradient(net.parameters(), net, loss_scale, images, labels)
        net, optimizer, loss_scale = pax.experimental.apply_scaled_gradients(
            net, optimizer, loss_scale, grads
        )
        net = pax.sharding.shard(net, mesh, rules)
        optimizer = pax.sharding.shard(optimizer, mesh, pax.sharding.following(net, rules))
        return {"net": net, "optimizer": optimizer, "loss_scale": loss_scale}, loss

    return train_step


def own_batches(images, labels, batch, epoch):
    """The examples of each batch that this process loads, and no others."""
    order = np.random.default_rng(epoch).permutation(len(images))  # one order in all processes
    for start in range(0, len(images) - batch + 1, batch):
        pick = order[start : start + batch].reshape(jax.process_count(), -1)[jax.process_index()]
        yield images[pick], labels[pick]


def train(images, labels, mesh, rules, options):
    """Trains with Adam, from the last checkpoint if there is one; returns the net."""
    state, train_step = make_state(mesh, rules, options), make_train_step(mesh, rules)
    done, saved = 0, options.checkpoints and pax.checkpoint.Checkpoints(options.checkpoints)
    if saved and saved.latest is not None:
        restored = saved.restore(**state)
        state, done = {name: restored[name] for name in state}, restored.step
        say(f"goes on after epoch {done}")
    for epoch in range(done + 1, options.epochs + 1):
        losses = []
        for own in own_batches(images, labels, options.batch, epoch):
            state, loss = train_step(state, *pax.sharding.shard_batch(own, mesh))
            losses.append(loss)
        say(f"epoch {epoch:2}: loss {np.mean(jax.device_get(losses)):.7f}")
        if saved:
            saved.save(epoch, **state)  # goes on beside the next epoch
    if saved:
        saved.close()
    return state["net"]


def say(text):
    """Prints once, not once for each process."""
    if jax.process_index() == 0:
        print(text, flush=True)


def run(options):
    """Trains; process 0 tests and exports."""
    devices = jax.device_count()
    if options.batch % devices:
        raise SystemExit(f"--batch {options.batch}: {devices} devices need a multiple of {devices}")
    say(f"{jax.process_count()} processes, {devices} devices")
    pax.seed_rng_key(42)  # one model in all processes
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    x, held_out, y, labels = train_test_split(images, digits.target, test_size=360, random_state=0)

    mesh = pax.sharding.make_mesh(data=devices)
    fully = options.fully_sharded
    rules = pax.sharding.fully_sharded() if fully else pax.sharding.data_parallel()
    net = train(x, y, mesh, rules, options)
    net = pax.sharding.gather(net, host=True)  # in all processes: each has a part of it
    if jax.process_index() == 0:
        logits = np.asarray(net.eval()(held_out))
        print(f"held-out accuracy: {(logits.argmax(-1) == labels).mean():.2%}", flush=True)
        if options.output:
            inputs = pax.export.spec("batch, 8, 8, 1", name="images")
            print(pax.export.to_saved_model(net, options.output, inputs, overwrite=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="of all devices together")
    parser.add_argument("--fully-sharded", action="store_true")
    parser.add_argument("--mixed-precision", action="store_true")
    parser.add_argument("--output", type=Path, help="where to export the net to")
    parser.add_argument("--checkpoints", type=Path, help="where to save epochs, and go on from")
    parser.add_argument("--coordinator", help="host:port of process 0")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int, help="which one this is, from 0")
    parser.add_argument("--cluster", action="store_true", help="jax asks SLURM, GKE, ...")
    parser.add_argument("--timeout", type=int, default=100, help="seconds for a lost process")
    options = parser.parse_args()
    if options.cluster or options.coordinator:  # before any other use of jax
        jax.distributed.initialize(
            options.coordinator, options.processes, options.process,
            heartbeat_timeout_seconds=options.timeout, shutdown_timeout_seconds=options.timeout,
        )  # fmt: skip
    run(options)


if __name__ == "__main__":
    main()
