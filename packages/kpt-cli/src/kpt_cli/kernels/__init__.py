"""The command `kpt kernels`."""
