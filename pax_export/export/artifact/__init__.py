"""What an export is, for whoever reads one: paths in; reports, shapes and structures out; no jax."""
