"""What the tests of this package share."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

import kpt_core
from served_by import served_by

# A busy machine must not fail a property: examples have no time limit of their own.
settings.register_profile("kpt", deadline=None)
settings.load_profile("kpt")


def pytest_configure(config: pytest.Config) -> None:
    # torch 2.13: Dynamo itself instantiates autograd.Function when it traces one.
    config.addinivalue_line("filterwarnings", "ignore:.*Function.* should not be instantiated:DeprecationWarning")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Everything here is small: more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No test meets what another one compiled."""
    yield
    torch.compiler.reset()


@pytest.fixture
def references() -> Iterator[None]:
    """Bits are compared that two ways give: no kernel of a backend that is installed may serve one of them."""
    with kpt_core.use("reference"):
        yield


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """transformers logs which of its own fast paths are missing; that's not the subject."""
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()
    transformers.logging.set_verbosity(before)


@pytest.fixture(params=["reference", "loop", "grouped"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """All that computes `moe.experts` here: its definition, the loop for host memory, grouped products for the rest."""
    with served_by(*() if request.param == "reference" else (f"experts_{request.param}:forward",)):
        yield request.param


@pytest.fixture(params=["reference", "loop", "product"])
def product(request: pytest.FixtureRequest) -> Iterator[str]:
    """All that computes `moe.grouped_mm` and `moe.grouped_mm_wgrad` here."""
    name = request.param
    with served_by(*() if name == "reference" else (f"grouped_mm:{name}", f"grouped_mm:{name}_wgrad")):
        yield name
