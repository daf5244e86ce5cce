"""The ops of this package in plain PyTorch that is fast: kernels of the core's backend `torch`."""
