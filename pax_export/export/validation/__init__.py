"""Validation: compares calls of an export with jax."""
