"""The command `kpt doctor`."""
