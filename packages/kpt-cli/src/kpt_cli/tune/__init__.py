"""The command `kpt tune`."""
