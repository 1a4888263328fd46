"""Somebody else's SavedModel in; one that years of TensorFlow run out."""
