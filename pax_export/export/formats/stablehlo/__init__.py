"""StableHLO bundles."""

from pax_export.export.artifact.formats import ORDER_OPTION, PLATFORM_OPTION, Format

STABLEHLO = Format(
    name="stablehlo",
    title="a StableHLO bundle",
    export="pax_export.export.formats.stablehlo.export:to_stablehlo",
    load="pax_export.export.formats.stablehlo.bundle:load",
    run="pax_export.export.formats.stablehlo.bundle:run",
    runtime=("jax", "stablehlo"),
    check="pax_export.export.formats.stablehlo.files:check",
    options={
        "weights": {"choices": ("arguments", "constants"), "help": "of stablehlo"},
        "platforms": PLATFORM_OPTION,
        "vjp_order": ORDER_OPTION,
    },
    run_imports=("jax", "pax_export"),
    files=("weights.safetensors", "*.jax_export", "*.mlirbc", "*.mlir"),
)
