"""The command `kpt`."""

__version__ = "0.1.0"
