"""The choice of kernels, and the way of a call from an op to a kernel."""

from .autocast import without_autocast
from .settings import force

__all__ = ["force", "without_autocast"]
