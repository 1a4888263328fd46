"""The export pipeline shared by all formats."""
