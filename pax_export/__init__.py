"""Immutable pytree modules for JAX, with exports that work where they are served."""

__version__ = "0.1.0.dev0"
