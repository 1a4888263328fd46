"""The formats: each writes a lowered model, and loads it as a callable."""
