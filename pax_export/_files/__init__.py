"""Bytes in; a file or a folder that is written whole or not at all, and checksums out."""
