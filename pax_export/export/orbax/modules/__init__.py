"""What newer versions of orbax.export wrap in a `JaxModule`; here the two are one."""
