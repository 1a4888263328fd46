"""MTCNN, which finds faces: the three nets of facenet-pytorch 2.6.0 (MIT), in its `data/*.pt`.

    pnet, report = load(PNet(), "facenet_pytorch/data/pnet.pt")
    boxes, faces = pnet(images)  # [batch, height, width, 3], from -1 to 1

P-Net looks at every place of an image; R-Net and O-Net look again at what it found, at 24x24
and 48x48 pixels.  K. Zhang and others, IEEE Signal Processing Letters, 2016.
"""

import jax
import jax.numpy as jnp

import pax_export as pax


def pooled(x, width: int):
    """The largest of each window, each two steps on; a last window may be cut off."""
    return pax.max_pool(x, (width, width, 1), (2, 2, 1), [(0, 1), (0, 1), (0, 0)])


def flat(x):
    """Columns before rows, as the file has the weights of the layer behind."""
    return x.swapaxes(1, 2).reshape(x.shape[0], -1)


def valid(in_features: int, out_features: int, width: int) -> pax.Conv2D:
    """A convolution without padding."""
    return pax.Conv2D(in_features, out_features, width, padding="VALID")


class PReLU(pax.ParameterModule):
    """``x`` where it is positive, else ``slope * x``, with a slope for each channel."""

    def __init__(self, channels: int):
        super().__init__()
        self.slope = jnp.full(channels, 0.25)

    def __call__(self, x):
        return jnp.where(x > 0, x, self.slope * x)


class PNet(pax.Module):
    """Images to boxes ``[batch, height, width, 4]`` and chances ``[batch, height, width, 2]``."""

    def __init__(self):
        super().__init__()
        self.conv1, self.prelu1 = valid(3, 10, 3), PReLU(10)
        self.conv2, self.prelu2 = valid(10, 16, 3), PReLU(16)
        self.conv3, self.prelu3 = valid(16, 32, 3), PReLU(32)
        self.face, self.box = valid(32, 2, 1), valid(32, 4, 1)

    def __call__(self, images):
        x = pooled(self.prelu1(self.conv1(images)), 2)
        x = self.prelu3(self.conv3(self.prelu2(self.conv2(x))))
        return self.box(x), jax.nn.softmax(self.face(x))


class RNet(pax.Module):
    """Images ``[batch, 24, 24, 3]`` to boxes ``[batch, 4]`` and chances ``[batch, 2]``."""

    def __init__(self):
        super().__init__()
        self.conv1, self.prelu1 = valid(3, 28, 3), PReLU(28)
        self.conv2, self.prelu2 = valid(28, 48, 3), PReLU(48)
        self.conv3, self.prelu3 = valid(48, 64, 2), PReLU(64)
        self.dense, self.prelu4 = pax.Linear(576, 128), PReLU(128)
        self.face, self.box = pax.Linear(128, 2), pax.Linear(128, 4)

    def __call__(self, images):
        x = pooled(self.prelu1(self.conv1(images)), 3)
        x = pooled(self.prelu2(self.conv2(x)), 3)
        x = flat(self.prelu3(self.conv3(x)))
        x = self.prelu4(self.dense(x))
        return self.box(x), jax.nn.softmax(self.face(x))


class ONet(pax.Module):
    """Images ``[batch, 48, 48, 3]`` to boxes, five points of a face each, and chances."""

    def __init__(self):
        super().__init__()
        self.conv1, self.prelu1 = valid(3, 32, 3), PReLU(32)
        self.conv2, self.prelu2 = valid(32, 64, 3), PReLU(64)
        self.conv3, self.prelu3 = valid(64, 64, 3), PReLU(64)
        self.conv4, self.prelu4 = valid(64, 128, 2), PReLU(128)
        self.dense, self.prelu5 = pax.Linear(1152, 256), PReLU(256)
        self.face, self.box, self.points = (pax.Linear(256, size) for size in (2, 4, 10))

    def __call__(self, images):
        x = pooled(self.prelu1(self.conv1(images)), 3)
        x = pooled(self.prelu2(self.conv2(x)), 3)
        x = pooled(self.prelu3(self.conv3(x)), 2)
        x = flat(self.prelu4(self.conv4(x)))
        x = self.prelu5(self.dense(x))
        return self.box(x), self.points(x), jax.nn.softmax(self.face(x))


def load(net, path):
    """The trained net in eval mode, and the report of which array went where."""
    net, report = pax.weights.adopt(net, path, flatten="as it is")  # see `flat`
    return net.eval(), report
