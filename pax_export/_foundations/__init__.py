"""What all rooms stand on: jax's versions, files, errors, checks of arguments, readers of formats.

Nothing here is public. `setup.cfg` has the order of its parts.
"""
