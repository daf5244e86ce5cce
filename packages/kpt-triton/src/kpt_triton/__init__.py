"""Portable Triton kernels: a plain library, without entry points, that the backends for GPUs share."""

__version__ = "0.1.0"
