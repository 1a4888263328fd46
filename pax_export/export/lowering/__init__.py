"""Traced programs in; portable StableHLO, its gradients and the variables out."""
