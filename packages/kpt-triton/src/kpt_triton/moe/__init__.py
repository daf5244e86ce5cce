"""Kernels for Mixture-of-Experts; a module for each operation."""
