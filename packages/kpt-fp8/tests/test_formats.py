"""The formats' facts and the decoder, against ml_dtypes: codes of all 256 bytes."""

import ml_dtypes
import numpy
import pytest
import torch

from kpt_fp8.formats import FORMATS
from kpt_fp8.torch_kernels.decode import decode

NAMES = {dtype: getattr(ml_dtypes, str(dtype).removeprefix("torch.")) for dtype in FORMATS}
EVERY = numpy.arange(256, dtype=numpy.uint8)


def codes_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(EVERY.copy()).view(dtype)


@pytest.mark.parametrize("dtype", FORMATS)
def test_facts_are_those_of_ml_dtypes(dtype: torch.dtype) -> None:
    form, info = FORMATS[dtype], ml_dtypes.finfo(NAMES[dtype])
    assert form.most == float(info.max)
    assert form.mantissa_bits == info.nmant
    assert 1 - form.bias == info.minexp
    finite = numpy.isfinite(EVERY.view(NAMES[dtype]).astype(numpy.float32))
    below = [code for code in range(256) if code % 128 < form.special and (form.special < 128 or code != 128)]
    assert [int(code) for code in EVERY[finite]] == below


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("finite", [False, True])
def test_every_code_is_decoded_to_the_bit(dtype: torch.dtype, finite: bool) -> None:
    expected = EVERY.view(NAMES[dtype]).astype(numpy.float32)
    kept = numpy.isfinite(expected) if finite else numpy.full(256, True)
    got = decode(codes_of(dtype)[torch.from_numpy(kept)]).numpy()
    numpy.testing.assert_array_equal(got, expected[kept])
    assert (numpy.signbit(got) == numpy.signbit(expected[kept]))[~numpy.isnan(got)].all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_small_numbers_stay_where_the_processor_drops_denormals(dtype: torch.dtype) -> None:
    smallest = torch.ones(4, dtype=torch.uint8).view(dtype)
    expected = smallest.to(torch.float32)
    torch.set_flush_denormal(True)
    try:
        assert torch.equal(decode(smallest), expected)
    finally:
        torch.set_flush_denormal(False)


def test_any_strides_are_decoded() -> None:
    codes = torch.randn(6, 8).to(torch.float8_e4m3fn)
    assert torch.equal(decode(codes.t()), codes.float().t())
    assert torch.equal(decode(codes[:, ::2]), codes.float()[:, ::2])
    assert decode(codes[:0]).shape == (0, 8)
