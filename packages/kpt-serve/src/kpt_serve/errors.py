"""The error that a package's reader raises; `kpt_core.InputError` would import torch."""


class PackageError(ValueError):
    """A package, or a file of one, is not what it should be, or this machine lacks what it needs."""


class ServeError(ValueError):
    """A server can't be started as it was asked for."""
