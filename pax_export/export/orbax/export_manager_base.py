"""The base class of export managers."""

from __future__ import annotations

import abc
from typing import Any


class ExportManagerBase(abc.ABC):
    """Saves a model, and loads it again.

    Example:
        >>> ExportManagerBase.__abstractmethods__ == {"save", "load"}
        True
    """

    @abc.abstractmethod
    def save(self, model_path: str, **kwargs: Any) -> None:
        """Saves the model in a directory."""

    @abc.abstractmethod
    def load(self, model_path: str, **kwargs: Any) -> Any:
        """Loads a saved model."""
