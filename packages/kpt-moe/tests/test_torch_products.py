"""The grouped products of accelerators without a kernel, computed in host memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kpt_moe.grouped_mm import grouped_mm, grouped_mm_wgrad
from kpt_moe.torch_kernels import grouped_mm as kernels
from kpt_moe.torch_kernels import tiles
from test_grouped_mm import ends, make

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LOADS = [70, 0, 9, 64]


def product(*args: Tensor) -> Tensor:
    return kernels.product(grouped_mm.bind(*args))


def product_wgrad(*args: Tensor) -> Tensor:
    return kernels.product_wgrad(grouped_mm_wgrad.bind(*args))


loads_of_experts = st.lists(st.integers(0, 150), min_size=1, max_size=6)


@given(loads_of_experts, st.integers(0, 70), st.sampled_from([0.0, float("nan")]))
def test_tiles_equal_the_loop(loads, trailing, poison):
    x, weight, offsets = make(loads, trailing)
    x[int(offsets[-1]) :] = poison
    torch.testing.assert_close(kernels._tiled_mm(x, weight, offsets), grouped_mm(x, weight, offsets))


@given(loads_of_experts, st.integers(0, 70), st.sampled_from([0.0, float("nan")]))
def test_tiles_of_wgrad_equal_the_loop(loads, trailing, poison):
    x, _, offsets = make(loads, trailing)
    grad = torch.randn(x.shape[0], 3, dtype=x.dtype)
    x[int(offsets[-1]) :] = poison
    grad[int(offsets[-1]) :] = poison
    torch.testing.assert_close(kernels._tiled_wgrad(x, grad, offsets), grouped_mm_wgrad(x, grad, offsets))


@given(loads_of_experts, st.integers(0, 70))
def test_tiles_hold_every_row_once(loads, trailing):
    rows = sum(loads) + trailing
    expert, row, taken = tiles.tiles(rows, ends(loads))
    owner = [e for e, load in enumerate(loads) for _ in range(load)]
    assert sorted(row[taken].tolist()) == list(range(len(owner)))
    assert torch.tensor(owner)[row[taken]].tolist() == expert.unsqueeze(1).expand_as(row)[taken].tolist()
    assert row.numel() == 0 or int(row.max()) <= max(rows - 1, 0)


def operands(dtype: torch.dtype, columns: int, trailing: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, grad and offsets; what no expert owns is poisoned."""
    x = torch.randn(sum(LOADS) + trailing, 8).to(dtype)
    weight, grad = torch.randn(4, 8, columns).to(dtype), torch.randn(x.shape[0], columns).to(dtype)
    x[sum(LOADS) :] = float("nan")
    grad[sum(LOADS) :] = float("nan")
    return x, weight, grad, ends(LOADS)


@pytest.mark.parametrize("trailing", [0, 5])
@pytest.mark.parametrize("columns", [16, 3], ids=["native", "tiled"])
@pytest.mark.parametrize("stored", ["as [K, N]", "as [N, K]"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_loop(dtype, stored, columns, trailing):
    x, weight, grad, offsets = operands(dtype, columns, trailing)
    if stored == "as [N, K]":
        weight = weight.mT.contiguous().mT
    native = columns == 16 and dtype is not torch.float64
    assert (kernels._native(x, weight) is not None) == native
    torch.testing.assert_close(product(x, weight, offsets), grouped_mm(x, weight, offsets))
    wgrad = product_wgrad(x, grad, offsets)
    exact = grouped_mm_wgrad(x.double(), grad.double(), offsets)
    # Rounded once natively; once for each of at most two tiles, and once for their sum.
    torch.testing.assert_close(
        wgrad.double(), exact, rtol=0, atol=2 * torch.finfo(dtype).eps * exact.abs().max().item()
    )


def odd_rows(t: Tensor) -> Tensor:
    """Rows one number apart from each other."""
    return F.pad(t, (0, 1))[..., :-1]


def shifted(t: Tensor) -> Tensor:
    """One number after an aligned address."""
    return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)


#: Strides and addresses that torch's grouped product refuses.
STORED = {
    "odd rows": odd_rows,
    "shifted": shifted,
    "every other number": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "one number for all": lambda t: t[..., :1].expand(t.shape),
    "experts at odd distances": lambda t: (
        F.pad(t.flatten(-2), (0, 1))[..., :-1].view(t.shape) if t.dim() == 3 else odd_rows(t)
    ),
}


@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_takes_any_strides(dtype, stored):
    x, weight, grad, offsets = operands(dtype, 16, 5)
    for operand in (x, weight, grad):
        fitted = kernels._fit(stored(operand))
        assert fitted.is_contiguous()
        assert fitted.data_ptr() % 16 == 0
        assert kernels._fit(operand) is operand
        assert kernels._fit(operand.mT).data_ptr() == operand.data_ptr()
    x, weight, grad = stored(x), stored(weight), stored(grad)
    assert kernels._native(x, weight) is not None
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-4}
    torch.testing.assert_close(product(x, weight, offsets), grouped_mm(x, weight, offsets), **tolerance)
    torch.testing.assert_close(product_wgrad(x, grad, offsets), grouped_mm_wgrad(x, grad, offsets), **tolerance)


@pytest.mark.parametrize("columns", [16, 3], ids=["native", "tiled"])
def test_takes_no_rows(columns):
    x, weight, offsets = torch.empty(0, 8), torch.randn(4, 8, columns), ends([0] * 4)
    assert product(x, weight, offsets).shape == (0, columns)
    wgrad = product_wgrad(x, torch.empty(0, columns), offsets)
    assert torch.equal(wgrad, torch.zeros(4, 8, columns))


@pytest.mark.parametrize("columns", [5, 16])
def test_takes_no_experts(columns):
    x, offsets = torch.randn(3, 16), torch.empty(0, dtype=torch.int32)
    assert torch.equal(product(x, torch.empty(0, 16, columns), offsets), torch.zeros(3, columns))
    assert product_wgrad(x, torch.randn(3, columns), offsets).shape == (0, 16, columns)


def test_copies_no_more_matrices_than_the_workspace_holds(monkeypatch):
    x, weight, grad, offsets = operands(torch.float64, 3, 5)
    monkeypatch.setattr(tiles, "_WORKSPACE", 2 * weight[0].nbytes)
    largest, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: (largest.append(len(a)), bmm(a, b))[1])
    torch.testing.assert_close(product(x, weight, offsets), grouped_mm(x, weight, offsets))
    torch.testing.assert_close(product_wgrad(x, grad, offsets), grouped_mm_wgrad(x, grad, offsets))
    assert max(largest) == 2


def test_older_versions_of_torch(monkeypatch):
    # torch 2.8 and 2.9 have a product for bfloat16 alone, on one generation of devices alone.
    monkeypatch.delattr(F, "grouped_mm")
    x, weight = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(2, 8, 8, dtype=torch.bfloat16)
    assert kernels._native(x, weight) is None
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kernels._native(x, weight) is torch._grouped_mm
    assert kernels._native(x.float(), weight.float()) is None
