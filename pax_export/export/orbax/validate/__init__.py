"""Validates a SavedModel against its `JaxModule`."""

from pax_export.export.orbax.validate.validation_job import ValidationJob
from pax_export.export.orbax.validate.validation_manager import ValidationManager
from pax_export.export.orbax.validate.validation_report import (
    ValidationReport,
    ValidationReportOption,
)

__all__ = ["ValidationJob", "ValidationManager", "ValidationReport", "ValidationReportOption"]
