"""Atomic writes of files and directories.

It imports none of its files: threads that load two of them at once would wait for each other.
"""
