"""The choice of kernels, and the way of a call from an op to a kernel."""

from .settings import force
from .transforms import under_transform

__all__ = ["force", "under_transform"]
