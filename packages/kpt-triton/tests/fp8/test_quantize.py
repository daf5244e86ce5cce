"""Every bit of codes and scales, by torch's own conversions and divisions."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kpt_triton.fp8.quantize import _FORMATS, forward, unsupported

FORMATS = list(_FORMATS)
#: Sides of the blocks that share a scale.
BLOCKS = {"1x128": (1, 128), "1x32": (1, 32), "128x128": (128, 128)}


class QuantizeCall(NamedTuple):
    """What the kernel reads of a call."""

    x: Tensor
    scale: Tensor | None = None
    dtype: torch.dtype = torch.float8_e4m3fn
    granularity: str = "row"
    scale_dtype: torch.dtype = torch.float32
    scale_rounding: str = "none"
    stochastic: bool = False


def codes_of(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes by torch's conversion, as bits."""
    most = _FORMATS[dtype][2]
    quotient = (x.float() / scale).clamp(-most, most)
    return quotient.masked_fill(quotient.isnan(), math.nan).to(dtype).view(torch.uint8)


def scale_of(block: Tensor, dtype: torch.dtype, rounding: str) -> float:
    sizes = block.float().abs()
    sizes = sizes[sizes.isfinite()]
    largest, most = (sizes.max() if sizes.numel() else torch.tensor(0.0)), _FORMATS[dtype][2]
    if largest == 0:
        return 1.0
    if rounding == "down":
        return 2.0 ** max(math.frexp(largest.item())[1] - math.frexp(most)[1], -126)
    scale = max((largest / torch.tensor(most)).item(), 2.0**-126)
    mantissa, exponent = math.frexp(scale)
    return scale if rounding == "none" else 2.0 ** (exponent - (mantissa == 0.5))


def spread_scales(x: Tensor, by: str, dtype: torch.dtype, rounding: str) -> tuple[Tensor, Tensor]:
    """Each number's scale `[N, K]`, and the scales of a matrix as they are stored, block by block in Python."""
    rows, columns = x.shape
    high, wide = {"tensor": (rows, columns), "row": (1, columns), **BLOCKS}[by]
    spread = torch.empty(rows, columns)
    for top in range(0, rows, high):
        for left in range(0, columns, wide):
            place = slice(top, top + high), slice(left, left + wide)
            spread[place] = scale_of(x[place], dtype, rounding)
    return spread, spread[::high, ::wide]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_codes_are_the_nearest_even_ones_for_numbers_of_every_exponent(
    dtype: torch.dtype, device: torch.device
) -> None:
    bits = torch.arange(0, 2**32, 2**19 - 1).to(torch.int32)  # each exponent with sixteen mantissas, both signs, NaN
    halves = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    ties = (halves[:, None] + halves[None]).flatten() / 2  # what lies in the middle of two codes
    x = torch.cat((bits.view(torch.float32), ties)).to(device)
    codes, scale = forward(QuantizeCall(x[None], torch.ones(1, device=device), dtype))
    assert scale.item() == 1
    torch.testing.assert_close(codes.view(torch.uint8)[0], codes_of(x, scale, dtype))


@pytest.mark.parametrize("by", ["tensor", "row", "1x128", "1x32", "128x128"])
@pytest.mark.parametrize(
    ("rounding", "kind"), [("none", torch.float32), ("up", torch.float8_e8m0fnu), ("down", torch.float32)]
)
def test_scales_are_of_what_shares_them(by: str, rounding: str, kind: torch.dtype, device: torch.device) -> None:
    x = torch.randn(131, 300) * torch.exp2(torch.randn(131, 1) * 20)
    x[3], x[4, ::2], x[5, 7], x[6, 0], x[7] = 0, math.nan, math.inf, -0.0, 1e-42
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2fnuz):
        spread, stored = spread_scales(x, by, dtype, rounding)
        call = QuantizeCall(x.to(device), None, dtype, by, kind, rounding)
        assert unsupported(call) is None
        codes, scale = forward(call)
        torch.testing.assert_close(scale.float().cpu().flatten(), stored.flatten(), rtol=0, atol=0)
        torch.testing.assert_close(codes.view(torch.uint8).cpu(), codes_of(x, spread, dtype))


@pytest.mark.parametrize("columns", [1, 33, 8192, 8193, 20000])
def test_rows_of_any_length_and_strides(columns: int, device: torch.device) -> None:
    for x in (
        torch.randn(3, columns),
        torch.randn(columns, 3).t(),
        torch.randn(3, 2 * columns)[:, ::2],
        torch.randn(columns).expand(3, -1),
    ):
        codes, scale = forward(QuantizeCall(x.to(device, torch.bfloat16)))
        wide = x.bfloat16().float()
        expected = (wide.abs().amax(-1) / torch.full((3,), 448.0)).clamp(min=2.0**-126)
        torch.testing.assert_close(scale.cpu(), expected, rtol=0, atol=0)
        torch.testing.assert_close(
            codes.view(torch.uint8).cpu(), codes_of(wide, expected[:, None], torch.float8_e4m3fn)
        )


@pytest.mark.parametrize("by", ["tensor", "row", "1x32", "128x128"])
@pytest.mark.parametrize("given", [0.03, -2.0, 0.0, -0.0, math.inf, math.nan])
def test_given_scales_are_divided_by_as_they_are(by: str, given: float, device: torch.device) -> None:
    x = torch.randn(3, 96)
    x[0, 0], x[0, 1] = 0, math.inf
    scale = torch.full({"tensor": (), "row": (3,), "1x32": (3, 3), "128x128": (1, 1)}[by], given)
    codes, same = forward(QuantizeCall(x.to(device), scale.to(device), granularity=by))
    assert same.shape == scale.shape
    torch.testing.assert_close(same.cpu(), scale, rtol=0, atol=0, equal_nan=True)
    wanted = codes_of(x, scale.flatten()[:1], torch.float8_e4m3fn)
    torch.testing.assert_close(codes.view(torch.uint8).cpu(), wanted)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stochastic": True}, "stochastic rounding"),
        ({"x": torch.empty(0, 4)}, "nothing to quantise"),
        ({"scale_dtype": torch.float64}, "float64"),
    ],
)
def test_what_it_does_not_do_it_refuses(changes: dict[str, Any], said: str) -> None:
    assert said in (unsupported(QuantizeCall(torch.ones(2, 2))._replace(**changes)) or "")
