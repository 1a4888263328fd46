"""A digit classifier: convolutions, batch norm, a checkpoint from which training resumes."""

import pickle
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import opax
import pax
from opax import GradientTransformation

Batch = Mapping[str, jnp.ndarray]


class ConvNet(pax.Module):
    layers: pax.Sequential

    def __init__(self):
        super().__init__()
        self.layers = pax.Sequential()
        for i in range(2):
            self.layers >>= pax.Conv2D((1 if i == 0 else 4), 4, 3, padding="VALID", with_bias=False)
            self.layers >>= pax.BatchNorm2D(4, True, True, 0.9)
            self.layers >>= jax.nn.relu
        self.layers >>= pax.Conv2D(4, 10, 4, padding="VALID")

    def __call__(self, x: jnp.ndarray) -> jnp.ndarray:
        return jnp.squeeze(self.layers(x), (1, 2))


def loss_fn(model: ConvNet, batch: Batch):
    x = batch["image"].astype(jnp.float32) / 255
    model, logits = pax.purecall(model, x)
    logs = jax.nn.log_softmax(logits, axis=-1)
    logs = jnp.sum(jax.nn.one_hot(batch["label"], logs.shape[-1]) * logs, axis=-1)
    return -jnp.mean(logs), model


@jax.jit
def test_loss_fn(model: ConvNet, batch: Batch):
    return loss_fn(model.eval(), batch)[0]


@jax.jit
def update_fn(model: ConvNet, optimizer: GradientTransformation, batch: Batch):
    (loss, model), grads = pax.value_and_grad(loss_fn, has_aux=True)(model, batch)
    params = model.parameters()
    optimizer, updates = pax.purecall(optimizer, grads, params)
    params = params.map(jax.lax.sub, updates)
    return model.update_parameters(params), optimizer, loss


def load_dataset(seed, batches):
    random = np.random.RandomState(seed)
    for _ in range(batches):
        label = random.randint(0, 10, (8,))
        image = random.randint(0, 200, (8, 8, 8, 1)) + 5 * label[:, None, None, None]
        yield {"image": image.astype(np.uint8), "label": label}


def main():
    pax.seed_rng_key(42)
    net = ConvNet()
    print(net.summary())
    optimizer = opax.chain(
        opax.clip_by_global_norm(1.0), opax.adamw(learning_rate=1e-2, weight_decay=1e-4)
    ).init(net.parameters())

    path = Path("convnet.pickle")
    for epoch in range(2):
        if epoch > 0:
            saved = pickle.loads(path.read_bytes())
            net = ConvNet().load_state_dict(saved["net"])
            optimizer = optimizer.load_state_dict(saved["optimizer"])
        for batch in load_dataset(epoch, 12):
            net, optimizer, loss = update_fn(net, optimizer, batch)
            print("train", float(loss))
        for batch in load_dataset(7, 2):
            print("test", float(test_loss_fn(net, batch)))
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        path.write_bytes(pickle.dumps(jax.device_get(state)))
    path.unlink()


if __name__ == "__main__":
    main()
