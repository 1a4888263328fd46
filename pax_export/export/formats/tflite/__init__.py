"""A lowered model in; a file for LiteRT, and a callable out."""
