"""Folders with a model for browsers: onnxruntime-web, a JavaScript module and a page."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping

from pax_export.export.artifact.report import DEFAULT


def javascript_name(key: str, keys: Collection[str]) -> str:
    """The name of a signature in JavaScript.

    Example:
        >>> javascript_name("encode", ["encode"]), javascript_name("serving_default", [])
        ('encode', 'predict')
    """
    return "predict" if key == DEFAULT and "predict" not in keys else key


def javascript_call(key: str, keys: Collection[str], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A call of a signature on zeros, for the card."""
    inputs = "".join(
        f"  {json.dumps(name)}: "
        f"{{data: Array({math.prod(shape)}).fill(0), shape: {list(shape)}}},\n"
        for name, shape in shapes.items()
    )
    name = json.dumps(javascript_name(key, keys))
    call = f"const outputs = await model[{name}]({{\n{inputs}}});\n"
    return f'import {{model}} from "./model.js";\n\n{call}'
