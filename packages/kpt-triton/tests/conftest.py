"""Without a GPU the kernels run in Triton's interpreter, which must be asked for before Triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings

from kpt_conformance.interpreter import prepare_once

prepare_once()
settings.register_profile("kpt", deadline=None)
settings.load_profile("kpt")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=[True, False], ids=["converted", "as integers"])
def widening(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the chip convert 8-bit numbers, or integers widen them."""
    from kpt_triton import launching

    if not request.param:
        monkeypatch.setattr(launching, "converts_codes", lambda chip: False)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
