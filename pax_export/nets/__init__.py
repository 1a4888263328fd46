"""Whole networks: residual networks for images, a Transformer for sequences."""

from pax_export.nets._resnet import ResNet18, ResNet34, ResNet50, ResNet101, ResNet152, ResNet200
from pax_export.nets._transformer import DenseBlock, Transformer

# What is imported and not listed is for other rooms of the package.
__all__ = ["ResNet18", "ResNet34", "ResNet50", "ResNet101", "ResNet152", "ResNet200", "Transformer"]
