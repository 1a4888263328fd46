"""What using pax_export costs, beside raw jax and its peers: ``python -m benchmarks``."""
