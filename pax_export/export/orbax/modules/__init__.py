"""The modules that newer versions of orbax.export wrap in a `JaxModule`."""
