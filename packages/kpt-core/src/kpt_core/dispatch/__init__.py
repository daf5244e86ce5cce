"""The choice of kernels, and the way of a call from an op to a kernel."""

from .settings import force

__all__ = ["force"]
