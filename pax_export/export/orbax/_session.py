"""Signatures of a SavedModel as functions, with the default values of their inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pax_export._errors import InvalidArgumentError
from pax_export.export.orbax._tensorflow import tf


class CallableSignatures:
    """The signatures of a SavedModel, as functions of named inputs.

    What `tf.saved_model.load` gives knows nothing of default values; a session
    of TensorFlow 1 does.

    Args:
        sess: a session that holds the model.
        signature_defs: its signatures by their keys.

    Example:
        >>> CallableSignatures.from_saved_model("served/1", ["serve"])  # doctest: +SKIP
    """

    def __init__(self, sess: Any, signature_defs: Mapping[str, Any]):
        self._sess = sess
        self._signatures = {
            key: functools.partial(self._call, definition)
            for key, definition in signature_defs.items()
        }

    def _call(self, definition: Any, **inputs: Any) -> dict[str, Any]:
        tensor = self._sess.graph.get_tensor_by_name
        unknown = sorted(set(inputs) - set(definition.inputs))
        if unknown:
            raise InvalidArgumentError(
                f"The signature has no input {', '.join(unknown)}.",
                got=str(sorted(inputs)),
                write=f"some of {', '.join(sorted(definition.inputs))}",
            )
        given = {
            tensor(definition.inputs[name].name): value.numpy()
            if isinstance(value, tf.Tensor)
            else value
            for name, value in inputs.items()
        }
        names = list(definition.outputs)
        wanted = [tensor(definition.outputs[name].name) for name in names]
        return dict(zip(names, self._sess.run(wanted, given)))

    @classmethod
    def from_saved_model(
        cls, model_dir: str, tags: Sequence[str], sess_config: Any = None
    ) -> CallableSignatures:
        """Loads a SavedModel into a session.

        Args:
            model_dir: the directory.
            tags: of the graph to load, mostly ``["serve"]``.
            sess_config: a ``ConfigProto`` for the session.
        """
        with tf.Graph().as_default():
            sess = tf.compat.v1.Session(config=sess_config)
        graph = tf.compat.v1.saved_model.loader.load(sess, list(tags), str(model_dir))
        return cls(sess, graph.signature_def)

    @property
    def signatures(self) -> Mapping[str, Callable[..., dict[str, Any]]]:
        """The functions by the keys of their signatures."""
        return self._signatures
