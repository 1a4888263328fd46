"""A model and specs of its inputs in; traced programs with named operands out."""
