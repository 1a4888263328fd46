"""A builder of TFLite files."""
