"""Kernels in plain PyTorch, for core's backend `torch`."""
