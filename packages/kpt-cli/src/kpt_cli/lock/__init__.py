"""The command `kpt lock`."""
