"""StableHLO bundles: directories of portable programs and weights."""
