"""Writing into pages, beside the op's reference."""

import math

import pytest
import torch

from kpt_attention.paged import update_cache
from kpt_triton.attention import update_cache as kernel

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("cache", [torch.float32, torch.float16, *_FLOAT8])
@pytest.mark.parametrize("dims", [(64, 64), (5, 7), (80, 300)])
@pytest.mark.parametrize("scaled", [False, True])
def test_any_strides_are_written_and_slots_that_are_not_there_are_left_out(
    cache: torch.dtype, dims: tuple[int, int], scaled: bool, device: torch.device
) -> None:
    rows, heads, pages, size = torch.float32 if cache in _FLOAT8 else cache, 37, 3, 4
    bits = torch.uint8 if cache in _FLOAT8 else cache
    # As slices of a layer's projection, and of a cache that has all layers', lie.
    caches = [torch.zeros(pages, heads, size, 2, dim, dtype=bits)[..., 1, :].transpose(1, 2) for dim in dims]
    given = [(torch.randn(heads, 6, dim, 2) * 300)[..., 1].transpose(0, 1).to(rows) for dim in dims]
    for each in given:
        each[1, 0, :4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    slots = torch.tensor([5, 0, -1, 11, 7, pages * size]).repeat_interleave(2)[::2]  # strided, too
    scales = [torch.rand(heads) + 0.5 for _ in dims] if scaled else [None, None]
    expected = [each.clone() for each in caches]
    update_cache.reference(*(each.view(cache) for each in expected), *(each[:5] for each in given), slots[:5], *scales)
    there = [each.to(device) for each in caches]  # keeps strides
    call = update_cache.bind(
        *(each.view(cache) for each in there), *(each.to(device) for each in given), slots.to(device),
        *(None if each is None else each.to(device) for each in scales),
    )  # fmt: skip
    assert kernel.unsupported(call) is None
    kernel.forward(call)
    for found, right in zip(there, expected, strict=True):
        pair = found.cpu().view(cache).float(), right.view(cache).float()
        torch.testing.assert_close(*pair, equal_nan=True, rtol=0, atol=0)
        assert right.count_nonzero()


def test_float64_and_nothing_are_refused() -> None:
    cache, rows, slots = torch.zeros(2, 4, 2, 8), torch.ones(1, 2, 8), torch.zeros(1, dtype=torch.int64)
    wide = update_cache.bind(cache.double(), cache.double(), rows.double(), rows.double(), slots)
    assert "float64" in str(kernel.unsupported(wide))
    assert "nothing" in str(kernel.unsupported(update_cache.bind(cache, cache, rows[:0], rows[:0], slots[:0])))
