"""A model in; a folder of portable programs and weights, and a callable of jax out."""
