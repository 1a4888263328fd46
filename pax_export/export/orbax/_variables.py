"""Where the variables of params are: on the host, or sharded over a mesh of DTensor."""

from __future__ import annotations

from typing import Any

from pax_export._errors import InvalidArgumentError
from pax_export.export.orbax import dtensor_utils
from pax_export.export.orbax._tensorflow import tf


class Placement:
    """Makes variables, and values for them, where they are to be.

    Raises:
        InvalidArgumentError: partition specs without a mesh, or a mesh without them.
    """

    def __init__(self, pspecs: Any, consolidate: bool):
        self._mesh = dtensor_utils.get_current_mesh()
        self._consolidate = consolidate
        if self._mesh is not None and pspecs is None:
            raise InvalidArgumentError(
                "DTensor export is enabled but `pspecs` is not specified in JaxModule.",
                write="pspecs=get_pspec_from_jax_arrays(params)",
            )
        if self._mesh is None and pspecs is not None:
            raise InvalidArgumentError(
                "`pspecs` is not None but JaxModule is not created within a DTensor export "
                "context.",
                write="initialize_dtensor(), then the JaxModule within "
                "`with maybe_enable_dtensor_export_on(mesh):`",
            )

    def variable(self, value: Any, name: str, trainable: bool, pspec: Any) -> Any:
        """A variable that holds the value."""
        if self._mesh is not None:
            tensor = self.stored(value, pspec)
            return tf.experimental.dtensor.DVariable(tensor, trainable=trainable, name=name)
        # The host, where no training needs the memory.
        with tf.device(tf.config.list_logical_devices("CPU")[0].name):
            return tf.Variable(value, trainable=trainable, name=name)

    def stored(self, value: Any, pspec: Any) -> Any:
        """What a variable of this partition spec is assigned for a value."""
        if self._mesh is None:
            return value
        return dtensor_utils.jax_array_to_dtensor(
            value, pspec, self._mesh.dtensor_mesh, self._mesh.jax_mesh, self._consolidate
        )
