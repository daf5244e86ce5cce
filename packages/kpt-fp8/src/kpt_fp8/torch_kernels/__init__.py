"""Kernels of backend `torch`: the ops of this package in plain PyTorch that is fast where the host has the memory."""
