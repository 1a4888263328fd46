"""Selections of parts of a net, and edits of these parts.

`_paths` parses paths, `_filters` selects leaves, `_finding` finds places, and `_selection` has the
edits. It imports all of `core` but `_module`, whose `at` uses it.
"""
