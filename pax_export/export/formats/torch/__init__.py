"""PyTorch: `to_torch` and `as_torch`; only files of this folder import torch, when used."""

from pax_export.export.artifact.formats import Format

TORCH = Format(
    name="torch",
    title="a program of PyTorch",
    export="pax_export.export.formats.torch.export:to_torch",
    load="pax_export.export.formats.torch.export:load",
    run="pax_export.export.formats.torch.run:run",
    runtime=("torch", "torch"),
    check="pax_export.export.formats.torch.export:check",
    suffix=".pt2",
    not_in_numpy=("bfloat16", "float8_e4m3fn", "float8_e5m2"),
)
