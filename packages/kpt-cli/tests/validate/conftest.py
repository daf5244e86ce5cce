import pytest
from faulty_kernels import Backend

import kpt_core


@pytest.fixture
def faulty():
    """Offer the faulty kernels while a test runs; gives the arm that names one of them."""
    from kpt_cli.validate.arms import Arm

    kpt_core.add_backend(Backend())
    yield lambda name: Arm.parse(f"moe.experts=faulty_kernels:{name}")
    kpt_core.remove_backend(Backend.name)
