"""How each operation of jax is said in TFLite's: a file for each family."""
