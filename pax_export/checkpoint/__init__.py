"""Checkpoints of a training run, through orbax-checkpoint."""

from pax_export.checkpoint._checkpoint import Checkpoint
from pax_export.checkpoint._checkpoints import Checkpoints
from pax_export.checkpoint._on_host import on_host
from pax_export.checkpoint._placed import Restored
from pax_export.checkpoint._stored_array import StoredArray

# What is imported and not listed is for other rooms of the package.
__all__ = ["Checkpoint", "Checkpoints", "Restored"]
