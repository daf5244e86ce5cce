"""`fp8.scaled_mm` of scales by blocks: how the library is called, by one that reads its arguments as documented."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kpt_core import Call, get_op
from kpt_fp8 import quantize
from kpt_fp8.linear import linear
from kpt_fp8.torch_kernels import gpu_linear
from kpt_fp8.torch_kernels import gpu_scaled_mm_blocks as blocks

FN, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu


def call(
    a: str = "1x128", b: str = "128x128", rows: int = 6, inner: int = 512, columns: int = 144, **changes: Any
) -> Call:
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.randn(rows, inner, generator=generator) * 2)
    x, w = torch.randn(rows, inner, generator=generator) * spread, torch.randn(columns, inner, generator=generator)
    powers = {"scale_dtype": E8M0, "scale_rounding": "up"} if b == "1x32" else {}
    (left, scale_a), (right, scale_b) = (quantize(t, granularity=g, **powers) for t, g in ((x, a), (w, b)))
    options = {"granularity_a": a, "granularity_b": b}
    scale_b = scale_b.t() if scale_b.dim() == 2 else scale_b
    return get_op("fp8.scaled_mm").bind(left, right.t(), scale_a, scale_b, None, **options)._replace(**changes)


def library(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply as cuBLAS's documentation says; layouts that it does not know are errors."""
    rows, inner, columns = *a.shape, b.shape[1]
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    if scale_a.dtype is E8M0:
        wide = [
            _unswizzled(s, size, inner // 32).repeat_interleave(32, 1)
            for s, size in ((scale_a, rows), (scale_b, columns))
        ]
        product = (a.float() * wide[0]) @ (b.t().float() * wide[1]).t()
    else:
        assert rows % 4 == 0
        assert scale_a.shape == (rows, inner // 128)
        assert scale_a.stride() == (1, rows)
        assert scale_b.shape == (inner // 128, -(-columns // 128))
        assert scale_b.stride() == (1, inner // 128)
        of_b = scale_b.t().repeat_interleave(128, 0)[:columns].repeat_interleave(128, 1)
        product = (a.float() * scale_a.repeat_interleave(128, 1)) @ (b.t().float() * of_b).t()
    return product.to(out_dtype)


def _unswizzled(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Read each scale from where the documentation says that it lies, one by one."""
    across = -(-columns // 4)
    assert scale.is_contiguous()
    assert scale.numel() == -(-rows // 128) * 128 * across * 4
    flat, found = scale.float(), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            tile = (row // 128 * across + column // 4) * 512
            found[row, column] = flat[tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4]
    return found


@pytest.fixture(autouse=True)
def _as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", library)
    monkeypatch.setattr(blocks, "_HOSTS", ())


@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 6, 8, 131])
@pytest.mark.parametrize(("by", "inner"), [("128x128", 512), ("128x128", 1024), ("1x32", 64), ("1x32", 160)])
def test_numbers_are_the_references(by: str, inner: int, rows: int, bias: torch.dtype | None) -> None:
    made = call("1x32" if by == "1x32" else "1x128", by, rows, inner)
    if bias is not None:
        made = made._replace(bias=torch.randn(144).to(bias))
    unsupported, forward = (
        (blocks.unsupported_but_mx, blocks.forward_of_mx) if by == "1x32" else (blocks.unsupported, blocks.forward)
    )
    assert unsupported(made) is None
    found = forward(made)
    wanted = get_op("fp8.scaled_mm").run_reference(made._replace(out_dtype=torch.float64))
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=2**-8 * wanted.abs().max().item())


def test_a_linear_layer_of_deepseeks_scales_is_multiplied_so(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(144, 512, generator=generator)
    codes, scale = quantize(weight, granularity="128x128")
    x = torch.randn(5, 512, generator=generator).bfloat16()
    made = linear.bind(x, codes, scale, None, granularity="128x128", activations="1x128")
    assert gpu_linear.unsupported(made) is None
    torch.testing.assert_close(gpu_linear.forward(made), linear.run_reference(made), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({}, None),
        ({"a": "row", "b": "row"}, "scales by row and row; this kernel is for 1x128 and 128x128"),
        ({"inner": 640}, "K = 640; needs a multiple of 512"),
        ({"rows": 0}, "nothing empty"),
        ({"columns": 40}, "needs N in multiples of 16"),
        ({"out_dtype": torch.float16}, "a result in torch.float16"),
        ({"scale_a": torch.ones((6, 4), dtype=torch.float64)}, "needs float32"),
        ({"a_dtype": E5M2}, "float8_e5m2 by float8_e4m3fn"),
    ],
)
def test_what_the_library_does_not_do_is_refused_in_a_sentence(given: dict[str, Any], refused: str | None) -> None:
    given = dict(given)
    dtype = given.pop("a_dtype", None)
    made = call(**given)
    made = made if dtype is None else made._replace(a=made.a.view(dtype))
    found = blocks.unsupported(made)
    assert found is None if refused is None else refused in str(found)


@pytest.mark.parametrize(("cuda", "refused"), [("12.8", True), ("12.9", False), ("13.0", False), (None, False)])
def test_an_older_cuda_has_no_such_scales(monkeypatch: pytest.MonkeyPatch, cuda: str | None, refused: bool) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert (blocks.unsupported(call()) is not None) == refused


@pytest.mark.parametrize(
    ("made", "refused"),
    [
        (call("1x32", "1x32", inner=64), None),
        (call(), "this kernel is for 1x32 in float8_e8m0fnu"),
        (call("1x32", "1x32", inner=80), "K = 80; needs a multiple of 32"),
    ],
)
def test_microscaling_takes_its_own_scales(made: Call, refused: str | None) -> None:
    found = blocks.unsupported_but_mx(made)
    assert found is None if refused is None else refused in str(found)
