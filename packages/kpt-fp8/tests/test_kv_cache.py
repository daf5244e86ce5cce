"""Keys and values in 8 bits."""

import pytest
import torch

from kpt_core import InputError
from kpt_fp8 import dequantize_kv, quantize_kv


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_keys_and_values_come_back(granularity):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 3, 7, 64).bfloat16(), torch.randn(2, 3, 7, 32).bfloat16()
    cache = quantize_kv(keys, values, granularity=granularity)
    assert cache.key_scale.shape == ((2, 3, 7) if granularity == "row" else ())
    assert cache.keys.nbytes + cache.values.nbytes == (keys.nbytes + values.nbytes) // 2
    for got, want in zip(dequantize_kv(cache), (keys, values), strict=True):
        assert got.dtype is torch.bfloat16
        assert (got - want).abs().max() <= want.abs().max() / 16
    wide = dequantize_kv(cache, torch.float32)
    assert wide[0].dtype is torch.float32


def test_a_token_by_itself_has_the_codes_that_it_has_among_others():
    keys = torch.randn(1, 2, 5, 16)
    whole, last = quantize_kv(keys, keys), quantize_kv(keys[:, :, 4:], keys[:, :, 4:])
    assert torch.equal(whole.keys[:, :, 4:].view(torch.uint8), last.keys.view(torch.uint8))


def test_static_scales_are_taken():
    keys = torch.tensor([[1.0, 500.0]])
    cache = quantize_kv(keys, keys, granularity="tensor", key_scale=torch.ones(()), value_scale=torch.tensor(2.0))
    assert cache.keys.float().tolist() == [[1.0, 448.0]]
    assert cache.values.float().tolist() == [[0.5, 256.0]]


def test_another_granularity_is_refused():
    with pytest.raises(InputError, match="granularity must be 'row' or 'tensor'; got '128x128'"):
        quantize_kv(torch.ones(2, 2), torch.ones(2, 2), granularity="128x128")
