"""The fixture that simulates Intel GPUs, for every test here."""

from simulated_xpu import see  # noqa: F401
