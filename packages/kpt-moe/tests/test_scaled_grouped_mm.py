"""`moe.scaled_grouped_mm` against products of dequantised numbers in float64, row by row."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

from kpt_core import InputError
from kpt_moe.scaled_grouped_mm import scaled_grouped_mm
from kpt_moe.torch_kernels import tiles
from served_by import served_by

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LOADS = [4, 0, 63, 1, 0]
TRAILING = 3
ROWS = sum(LOADS) + TRAILING
OFFSETS = torch.tensor(LOADS).cumsum(0).int()
SIZES = {"small": (9, 7), "one block": (128, 128), "blocks that end early": (200, 136), "one by one": (1, 1)}
SCALES = {
    "row": lambda inner, columns: (columns,),
    "row of three dimensions": lambda inner, columns: (1, columns),
    "column": lambda inner, columns: (inner, 1),
    "block": lambda inner, columns: (-(-inner // 128), -(-columns // 128)),
}


@pytest.fixture(params=["reference", "loop", "tiled"], autouse=True)
def way(request, monkeypatch) -> Iterator[str]:
    """All that computes the op here, tiles with a workspace of two matrices."""
    monkeypatch.setattr(tiles, "_WORKSPACE", 2 * 200 * 136 * 4)
    with served_by(*() if request.param == "reference" else (f"scaled_grouped_mm:{request.param}",)):
        yield request.param


def codes(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return (torch.randn(shape) * 32).to(dtype)


def operands(inner: int = 9, columns: int = 7, scales: str = "row", stored: str = "KN", dtype: torch.dtype = E4M3):
    weight = codes(5, inner, columns, dtype=dtype)
    weight = weight if stored == "KN" else weight.mT.contiguous().mT
    return weight, torch.rand(5, *SCALES[scales](inner, columns)) + 0.01


def dequantised(weight: Tensor, scale: Tensor) -> Tensor:
    """`[E, K, N]` in float64: every number looked at with the scale of its place."""
    _, inner, columns = weight.shape
    if scale.dim() == 2:
        scale = scale.unsqueeze(1)
    place = [
        torch.zeros(size, dtype=torch.int64) if n == 1 else torch.arange(size) // (1 if n == size else 128)
        for n, size in zip(scale.shape[1:], (inner, columns), strict=True)
    ]
    return weight.double() * scale.double()[:, place[0]][:, :, place[1]]


def rowwise(x: Tensor, matrices: Tensor, loads: list[int] = LOADS) -> Tensor:
    out = torch.zeros(x.shape[0], matrices.shape[2], dtype=torch.float64)
    owners = [expert for expert, load in enumerate(loads) for _ in range(load)]
    for row, expert in enumerate(owners):
        out[row] = x[row].double() @ matrices[expert]
    return out


def error(have: Tensor, want: Tensor) -> float:
    return ((have.double() - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("stored", ["KN", "NK"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("size", SIZES)
def test_products_are_of_the_dequantised_numbers(size, scales, stored, dtype):
    weight, scale = operands(*SIZES[size], scales, stored, dtype)
    x = torch.randn(ROWS, weight.shape[1], dtype=torch.float64)
    torch.testing.assert_close(
        scaled_grouped_mm(x, weight, scale, OFFSETS), rowwise(x, dequantised(weight, scale)), rtol=1e-12, atol=1e-10
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scales", ["row", "block"])
def test_result_is_rounded_once(dtype, scales):
    weight, scale = operands(200, 136, scales)
    scale = scale / 100  # within what float16 holds
    x = torch.randn(ROWS, 200).to(dtype)
    out = scaled_grouped_mm(x, weight, scale, OFFSETS)
    want = rowwise(x, dequantised(weight, scale))
    wide = scaled_grouped_mm(x, weight, scale, OFFSETS, out_dtype=torch.float32)
    assert (out.dtype, wide.dtype) == (dtype, torch.float32)
    assert torch.equal(out, wide.to(dtype))
    assert error(wide, want) < 1e-6


@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_8_bit_rows_are_multiplied_by_their_scales(dtype, blocks, out_dtype):
    weight, scale = operands(200, 136, "block")
    x, x_scale = codes(ROWS, 200, dtype=dtype), torch.rand(ROWS, 2 if blocks else 1)
    out = scaled_grouped_mm(x, weight, scale, OFFSETS, x_scale=x_scale, out_dtype=out_dtype)
    rows = x.double() * x_scale.double()[:, torch.arange(200) // (128 if blocks else 200)]
    assert out.dtype is (out_dtype or torch.bfloat16)
    assert error(out, rowwise(rows, dequantised(weight, scale))) <= {None: 2**-8, torch.float32: 1e-6}.get(
        out_dtype, 1e-14
    )


def test_rows_of_nobody_are_zero_whatever_they_hold():
    weight, scale = operands()
    x = torch.randn(ROWS, 9)
    x[-TRAILING:] = torch.nan
    out = scaled_grouped_mm(x, weight, scale, OFFSETS)
    assert out[:-TRAILING].isfinite().all()
    assert not out[-TRAILING:].any()
    narrow, x_scale = x.to(E5M2), torch.ones(ROWS, 1)
    x_scale[-TRAILING:] = torch.inf
    assert not scaled_grouped_mm(narrow, weight, scale, OFFSETS, x_scale=x_scale)[-TRAILING:].any()


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("size", [(9, 7), (0, 7), (9, 0)])
def test_empty_sizes(rows, size):
    weight, scale = operands(*size)
    offsets = torch.full((5,), rows, dtype=torch.int32)
    out = scaled_grouped_mm(torch.ones(rows, size[0]), weight, scale, offsets)
    want = rowwise(torch.ones(rows, size[0]), dequantised(weight, scale), [rows, 0, 0, 0, 0])
    torch.testing.assert_close(out, want.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scales", SCALES)
def test_gradient_of_x_is_that_of_finite_differences(scales):
    weight, scale = operands(scales=scales)
    x = torch.randn(ROWS, 9, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: scaled_grouped_mm(x, weight, scale, OFFSETS), x, fast_mode=True)
    assert gradgradcheck(lambda x: scaled_grouped_mm(x * x, weight, scale, OFFSETS), x, fast_mode=True)


def test_gradient_of_x_has_its_dtype_and_is_zero_for_rows_of_nobody():
    weight, scale = operands(200, 136, "block")
    x = torch.randn(ROWS, 200).bfloat16().requires_grad_()
    out = scaled_grouped_mm(x, weight, scale, OFFSETS, out_dtype=torch.float32)
    grad = torch.randn_like(out)
    (grad_x,) = torch.autograd.grad(out, x, grad)
    assert grad_x.dtype is torch.bfloat16
    assert error(grad_x, rowwise(grad, dequantised(weight, scale).mT)) < 2**-8
    assert not grad_x[-TRAILING:].any()


def test_every_code_has_its_value_nan_included():
    for dtype in (E4M3, E5M2):
        every = torch.arange(256, dtype=torch.uint8).view(dtype)
        offsets = torch.tensor([1], dtype=torch.int32)
        out = scaled_grouped_mm(torch.ones(1, 1), every.view(1, 1, 256), torch.full((1, 256), 3.0), offsets)
        torch.testing.assert_close(out[0], 3 * every.float(), rtol=0, atol=0, equal_nan=True)


def test_fake_tensors_have_shapes_and_dtypes():
    weight, scale = operands()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(ROWS, 9)).requires_grad_()
        out = scaled_grouped_mm(x, weight, scale, OFFSETS, out_dtype=torch.bfloat16)
        (grad,) = torch.autograd.grad(out.sum(), x)
    assert (out.shape, out.dtype) == (torch.Size([ROWS, 7]), torch.bfloat16)
    assert (grad.shape, grad.dtype) == (x.shape, torch.float32)


def test_compiled_in_one_graph_gives_the_same():
    weight, scale = operands(scales="block")
    x = torch.randn(ROWS, 9, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return scaled_grouped_mm(x, weight, scale, OFFSETS)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for have, want in zip(*((out := f(x), *torch.autograd.grad(out.sum(), x)) for f in (compiled, call)), strict=True):
        assert torch.equal(have, want)


def test_what_wants_a_gradient_and_has_none_is_refused():
    weight, scale = operands()
    x = torch.randn(ROWS, 9)
    learned = scale.clone().requires_grad_()
    with pytest.raises(InputError, match=r"scale is quantised or scales what is.*requires_grad_\(False\)"):
        scaled_grouped_mm(x, weight, learned, OFFSETS)
    with torch.no_grad():
        assert torch.equal(scaled_grouped_mm(x, weight, learned, OFFSETS), scaled_grouped_mm(x, weight, scale, OFFSETS))
    with pytest.raises(InputError, match="x is quantised"):
        scaled_grouped_mm(x.to(E4M3).requires_grad_(), weight, scale, OFFSETS, x_scale=torch.ones(ROWS, 1))


def test_size_key_tells_layouts_and_scales_apart():
    keys = {
        scaled_grouped_mm.size_key(
            scaled_grouped_mm.bind(torch.ones(ROWS, 200), *operands(200, 136, scales, stored), OFFSETS)
        )
        for scales in ("row", "block")
        for stored in ("KN", "NK")
    }
    assert len(keys) == 4
    assert {key[:4] for key in keys} == {(128, 200, 136, 5)}
