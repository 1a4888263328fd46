"""Checkpoints of a training run, through orbax-checkpoint."""

from pax_export.checkpoint._checkpoint import Checkpoint
from pax_export.checkpoint._checkpoints import Checkpoints
from pax_export.checkpoint._placed import Restored

__all__ = ["Checkpoint", "Checkpoints", "Restored"]
