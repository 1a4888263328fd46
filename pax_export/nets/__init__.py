"""Whole networks: residual networks for images, a Transformer for sequences."""

from pax_export.nets._resnet import (
    ResNet18,
    ResNet34,
    ResNet50,
    ResNet101,
    ResNet152,
    ResNet200,
)
from pax_export.nets._transformer import Transformer

__all__ = [
    "ResNet18",
    "ResNet34",
    "ResNet50",
    "ResNet101",
    "ResNet152",
    "ResNet200",
    "Transformer",
]
