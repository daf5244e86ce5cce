"""The command `kpt optimize`."""
