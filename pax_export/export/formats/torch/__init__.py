"""PyTorch: `to_torch` and `as_torch`; only files of this folder import torch, when used."""
