"""A lowered model in; a SavedModel that TensorFlow serves, and a callable out."""
