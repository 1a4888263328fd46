"""Selections of parts of a net, and edits of these parts.

`paths` parses paths, `filters` selects leaves, `finding` finds places, and `selection` has the
edits. It imports all of `core` but `_module`, whose `at` uses it.
"""
