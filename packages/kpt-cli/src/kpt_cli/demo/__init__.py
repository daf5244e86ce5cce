"""The command `kpt demo`."""
