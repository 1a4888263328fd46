"""Training checkpoints, by orbax-checkpoint."""

from pax_export.checkpoint._checkpoint import Checkpoint, Restored
from pax_export.checkpoint._checkpoints import Checkpoints
from pax_export.checkpoint._saved import StoredArray, on_host

# Names that are not in __all__ are internal to the library.
__all__ = ["Checkpoint", "Checkpoints", "Restored"]
