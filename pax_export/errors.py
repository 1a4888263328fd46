"""Every kind of error and warning that this package raises on purpose, to be caught by name.

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

from pax_export._errors import (
    ChangedOutsideWarning,
    CheckpointError,
    ConsumerError,
    DTensorStateError,
    ExportPathError,
    ForeignInputError,
    HiddenArrayError,
    ImmutableModuleError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
    LoadedShapeWarning,
    MissingCheckpointError,
    MissingPackageError,
    MissingValueError,
    MissingWeightError,
    MissingWeightsFileError,
    NameTakenError,
    NearNameWarning,
    NegativeToleranceError,
    NonFiniteError,
    NotDifferentiableError,
    NotInPaxError,
    NotMaterializedError,
    NotPicklableError,
    PaxError,
    PaxWarning,
    PolicyError,
    ProcessesError,
    RetracingWarning,
    ShardingError,
    SharedNodeError,
    StateChangeError,
    StructureMismatchError,
    SymbolicDimensionError,
    TracedValueError,
    UncoveredStateError,
    UnknownOptionError,
    UnsupportedDtypeError,
    UnsupportedOperationError,
    UntrustedExportError,
    ValidationError,
    WeightNameError,
    WeightsFileError,
    WeightsMismatchError,
)

__all__ = [
    "ChangedOutsideWarning",
    "CheckpointError",
    "ConsumerError",
    "DTensorStateError",
    "ExportPathError",
    "ForeignInputError",
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
    "PaxError",
    "PaxWarning",
    "PolicyError",
    "ProcessesError",
    "RetracingWarning",
    "ShardingError",
    "SharedNodeError",
    "StateChangeError",
    "StructureMismatchError",
    "SymbolicDimensionError",
    "TracedValueError",
    "UncoveredStateError",
    "UnknownOptionError",
    "UnsupportedDtypeError",
    "UnsupportedOperationError",
    "UntrustedExportError",
    "ValidationError",
    "WeightNameError",
    "WeightsFileError",
    "WeightsMismatchError",
]
