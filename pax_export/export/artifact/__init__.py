"""Reading exports: reports, structures and checks, without jax."""
