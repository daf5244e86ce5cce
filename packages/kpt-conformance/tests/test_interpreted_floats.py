"""Numbers that Triton's interpreter converts are those that a chip gives."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kpt_conformance.interpreter import conversion, to_bfloat16

#: Zeros, denormals, ties to either side, the largest numbers and what rounds past them.
_EDGES = (0.0, -0.0, 1e-38, -1e-38, 1e-45, 1.00390625, 1.01171875, 3.4e38, 3.3961775e38, np.inf, -np.inf, np.nan)


@pytest.fixture
def numbers() -> torch.Tensor:
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0))
    return torch.cat((bits.to(torch.int32).view(torch.float32), torch.tensor(_EDGES)))


def test_rounds_as_torch_does(numbers: torch.Tensor) -> None:
    found = torch.from_numpy(to_bfloat16(numbers.numpy()).view(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(found, numbers.bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit(), numbers.signbit())


def test_scalars_and_shapes_stay() -> None:
    assert to_bfloat16(np.float32(1.5).reshape(())).shape == ()
    assert to_bfloat16(np.ones((2, 3), np.float32).T).shape == (3, 2)


def test_there_and_back_and_others(numbers: torch.Tensor) -> None:
    language = SimpleNamespace(float32="float32", bfloat16="bfloat16")
    convert = conversion(language, lambda *arguments: arguments)
    half = convert(numbers.numpy(), "float32", "bfloat16", None)
    back = torch.from_numpy(convert(half, "bfloat16", "float32", None).view(np.float32))
    torch.testing.assert_close(back, numbers.bfloat16().float(), rtol=0, atol=0, equal_nan=True)
    assert convert(half, "float16", "bfloat16", 1)[1:] == ("float16", "bfloat16", 1)
