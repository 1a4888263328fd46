"""Programs as graphs of TensorFlow's own operations, which every TensorFlow runs without XLA."""
