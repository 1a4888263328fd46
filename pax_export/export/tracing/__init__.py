"""Traces models: a model and input specs in, programs with named operands out."""
