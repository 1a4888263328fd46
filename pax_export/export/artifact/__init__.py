"""What an export is, for whoever reads one: paths in; reports and structures out; no jax."""
