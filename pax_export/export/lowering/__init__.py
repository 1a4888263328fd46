"""Lowers traced programs to portable StableHLO."""
