"""Public error and warning classes.

`PaxError` is the root of the errors, `PaxWarning` that of the warnings.  The page "Errors"
of the API reference says of each what causes it and what to do.

Example:
    >>> import pax_export as pax
    >>> try:
    ...     pax.Linear(2, 3).replace(wieght=0)
    ... except pax.errors.InvalidArgumentError as error:
    ...     print(error.where)
    Linear.wieght
"""

from __future__ import annotations

from pax_export._errors import *

__all__ = [
    "AdoptionError",
    "AmbiguousWeightsError",
    "ChangedOutsideWarning",
    "CheckpointError",
    "ConsumerError",
    "DTensorStateError",
    "ExportPathError",
    "ForeignInputError",
    "GradientMismatchError",
    "HiddenArrayError",
    "ImmutableModuleError",
    "InvalidArgumentError",
    "InvalidArgumentTypeError",
    "LoadedShapeWarning",
    "MissingCheckpointError",
    "MissingPackageError",
    "MissingValueError",
    "MissingWeightError",
    "MissingWeightsFileError",
    "NameTakenError",
    "NearNameWarning",
    "NegativeToleranceError",
    "NonFiniteError",
    "NotDifferentiableError",
    "NotInPaxError",
    "NotMaterializedError",
    "NotPicklableError",
    "NotValidatedWarning",
    "PaxError",
    "PaxWarning",
    "PolicyError",
    "ProcessesError",
    "QuantizationError",
    "RetracingWarning",
    "ShardingError",
    "SharedNodeError",
    "SignatureError",
    "StateChangeError",
    "StructureMismatchError",
    "SymbolicDimensionError",
    "TokenizerError",
    "TracedValueError",
    "UncoveredStateError",
    "UnknownOptionError",
    "UnsupportedDtypeError",
    "UnsupportedOperationError",
    "UntrainedArrayWarning",
    "UntrustedExportError",
    "ValidationError",
    "WeightNameError",
    "WeightsFileError",
    "WeightsMismatchError",
]
