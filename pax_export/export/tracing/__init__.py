"""Traces models: turns a model and input specs into programs with named operands."""
