"""An export and what jax says of calls in; how far its results are from these out."""
