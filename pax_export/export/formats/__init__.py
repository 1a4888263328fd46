"""A lowered model in; one format written, and read again as a callable out."""
