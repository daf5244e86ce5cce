"""The suite for the backend of `--kpt-backend`, where no test file names one."""

from .suite import Suite


class TestConformance(Suite):
    """Every kernel of the backend that the option names."""
