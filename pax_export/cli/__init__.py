"""The command line."""

from pax_export.cli._main import main

__all__ = ["main"]
