"""A traced program in; a file for onnxruntime, and a callable out."""
