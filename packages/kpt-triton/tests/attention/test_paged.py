"""Steps of decoding over pages, in any number of parts, beside the op's reference in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kpt_attention.paged import paged
from kpt_triton.attention import paged as kernel

_PARTS = (1, 2, 7)
_PAGES = 9
_HEADS, _KV_HEADS = 4, 2
#: What changes scores or what is seen, made when a test runs, with its seed.
_OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "a window": lambda: {"window": 70},
    "a window that begins with a step": lambda: {"window": 64},
    "a window of one": lambda: {"window": 1},
    "a window and the first keys": lambda: {"window": 20, "first": 5},
    "first keys past the first step": lambda: {"window": 3, "first": 69},
    "first keys that the window reaches": lambda: {"window": 40, "first": 100},
    "softcap": lambda: {"softcap": 1.5, "scale": 0.7},
    "sinks": lambda: {"sinks": torch.randn(_HEADS)},
    "a sink of nothing": lambda: {"sinks": torch.tensor([-math.inf, 0.0, 3.0, -math.inf])},
    "slopes": lambda: {"alibi_slopes": torch.rand(_HEADS)},
    "slopes of sequences": lambda: {"alibi_slopes": torch.rand(5, _HEADS, dtype=torch.float64)},
    "a bias": lambda: {"bias": torch.randn(_HEADS, 5, 150)},
    "a bias of keys": lambda: {"bias": torch.randn(1, 1, 144), "softcap": 2.0},
    "a mask": lambda: {"mask": torch.rand(5, 90) < 0.5, "window": 100},
    "a mask of nothing": lambda: {"mask": torch.zeros(5, 144, dtype=torch.bool)},
    "a mask of no keys": lambda: {"mask": torch.zeros(5, 0, dtype=torch.bool)},
    "scales": lambda: {"k_scale": torch.rand(_KV_HEADS), "v_scale": torch.rand(_KV_HEADS, dtype=torch.float64)},
    "scales and sinks": lambda: {"v_scale": torch.rand(_KV_HEADS) + 1, "sinks": torch.randn(_HEADS)},
}


def arguments(
    page: int = 16, dims: tuple[int, int] = (8, 8), heads: int = _HEADS, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Five sequences, one of no keys and one of all that its pages hold; NaN in each place that nobody sees."""
    lengths = torch.tensor([5, 0, 9 * page, 4 * page + 1, 1], dtype=torch.int32)
    table = torch.randperm(50)[: 5 * _PAGES].view(5, _PAGES).int()
    caches = [torch.full((51, page, _KV_HEADS, dim), math.nan) for dim in dims]
    for row, length in zip(table.tolist(), lengths.tolist(), strict=True):
        for key in range(length):
            for cache in caches:
                cache[row[key // page], key % page] = torch.randn(_KV_HEADS, cache.shape[3])
    table[torch.arange(_PAGES) * page >= lengths[:, None]] = -7
    q = torch.randn(5, heads, dims[0]).to(dtype)
    k_cache, v_cache = (cache.to(dtype) for cache in caches)
    return {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": table, "lengths": lengths}


def check(given: dict[str, Any], parts: int, device: torch.device, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Compare a number of parts with the reference in float64."""
    wide = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }
    expected = paged.reference(**wide, return_lse=True)
    there = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    call = paged.bind(**there, return_lse=True)
    assert kernel.unsupported(call) is None
    out, lse = kernel.attend(call, parts, kernel._launch_of(call))
    assert lse is not None
    assert out.dtype is given["q"].dtype
    assert lse.dtype is torch.float32
    torch.testing.assert_close(out.double().cpu(), expected[0], rtol=rtol, atol=atol)
    torch.testing.assert_close(lse.double().cpu(), expected[1], rtol=rtol, atol=2e-6)


@pytest.mark.parametrize("parts", _PARTS)
@pytest.mark.parametrize("options", _OPTIONS)
def test_whatever_changes_scores_or_hides_keys(options: str, parts: int, device: torch.device) -> None:
    check(arguments() | _OPTIONS[options](), parts, device)


@pytest.mark.parametrize("parts", _PARTS)
@pytest.mark.parametrize(
    ("page", "dims", "heads"),
    [(1, (8, 8), 2), (7, (5, 23), 6), (16, (16, 1), 38), (64, (33, 16), 2), (100, (256, 8), 4)],
)
def test_pages_and_heads_of_any_size(
    page: int, dims: tuple[int, int], heads: int, parts: int, device: torch.device
) -> None:
    check(arguments(page, dims, heads), parts, device)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str)
def test_16_bits(dtype: torch.dtype, error: float, parts: int, device: torch.device) -> None:
    check(arguments(dtype=dtype) | {"sinks": torch.randn(_HEADS)}, parts, device, error, error)


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_caches_of_8_bits(dtype: torch.dtype, device: torch.device) -> None:
    given = arguments()
    for name in ("k_cache", "v_cache"):
        given[name] = given[name].to(dtype)
    scales = {"k_scale": torch.rand(_KV_HEADS) + 1, "v_scale": torch.rand(_KV_HEADS) + 1}
    wide = given | {name: given[name].float() for name in ("k_cache", "v_cache")}
    expected, lse = paged.reference(**wide, **scales, return_lse=True)
    call = paged.bind(**{name: value.to(device) for name, value in (given | scales).items()}, return_lse=True)
    if kernel.unsupported(call):
        pytest.skip("the device does not convert them")
    for found, wanted in zip(kernel.forward(call), (expected, lse), strict=True):
        assert found is not None
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-5)


def test_strides(device: torch.device) -> None:
    given = arguments()
    given["q"] = given["q"].repeat_interleave(2, 2)[..., ::2]
    for name in ("k_cache", "v_cache"):  # heads before the places of a page, and numbers apart
        given[name] = given[name].permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    given["block_table"] = given["block_table"].repeat_interleave(2, 1)[:, ::2]
    given["bias"] = torch.randn(150, 5, _HEADS).permute(2, 1, 0)
    given["mask"] = (torch.rand(10, 10) < 0.7).t()[::2]
    check(given, 2, device)


def test_rows_that_see_nothing_are_zero(device: torch.device) -> None:
    call = paged.bind(**{name: value.to(device) for name, value in arguments().items()}, return_lse=True)
    for parts in _PARTS:
        out, lse = kernel.attend(call, parts, kernel._launch_of(call))
        assert lse is not None
        assert (out[1] == 0).all()
        assert (lse[1] == -math.inf).all()
        assert lse[[0, 2, 3, 4]].isfinite().all()


def test_large_scores(device: torch.device) -> None:
    given = arguments()
    given["q"] = given["q"] * 1e4
    check(given, 1, device, rtol=1e-3, atol=1e-3)
    check(given, 7, device, rtol=1e-3, atol=1e-3)


def test_how_many_parts_there_are_follows_from_shapes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def attend(call: Any, count: int, launch: Any) -> tuple[Tensor, None]:
        counts.append(count)
        return call.q, None

    monkeypatch.setattr(kernel, "attend", attend)
    monkeypatch.setattr(kernel, "programs", lambda device, tiles, warps: min(tiles, 528))
    few, many = (torch.ones(count, 8, 128, device=device) for count in (1, 512))
    cache = torch.ones(1, 16, 2, 128, device=device)
    for q, pages, window in ((few, 4, 0), (few, 64, 0), (few, 4096, 0), (few, 4096, 128), (many, 4096, 0)):
        table = torch.zeros(len(q), pages, dtype=torch.int32, device=device)
        lengths = torch.zeros(len(q), dtype=torch.int32, device=device)
        kernel.forward(paged.bind(q, cache, cache, table, lengths, window=window))
    assert counts == [1, 16, 128, 3, 2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cu_seqlens_q": torch.arange(6).int()}, "several queries"),
        ({"block_table": torch.empty(5, 0).int(), "lengths": torch.zeros(5).int()}, "nothing to compute"),
        (
            {"q": torch.empty(5, 4, 257), "k_cache": torch.empty(3, 4, 2, 257), "v_cache": torch.empty(3, 4, 2, 8)},
            "head_dim 257; this kernel holds up to 256",
        ),
    ],
)
def test_what_it_does_not_do_it_refuses(changes: dict[str, Any], said: str) -> None:
    assert said in (kernel.unsupported(paged.bind(**(arguments() | changes))) or "")
