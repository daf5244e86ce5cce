import pytest
from faulty_kernels import Backend

from kpt_core.registry import add_backend, remove_backend


@pytest.fixture
def faulty():
    """Offer the faulty kernels while a test runs; gives the arm that names one of them."""
    from kpt_cli.validate.models import Arm

    add_backend(Backend())
    yield lambda name: Arm.parse(f"moe.experts=faulty_kernels:{name}")
    remove_backend(Backend.name)
