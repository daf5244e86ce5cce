import pytest
import torch
from calls import grouped_mm_wgrad
from hypothesis import given, settings
from hypothesis import strategies as st
from in_float64 import SMALL, assert_sums, ends, wide
from in_float64 import grouped_mm_wgrad as reference

from kpt_triton import launching
from kpt_triton.moe.transposed import gradient_of, multiply_transposed
from kpt_triton.tile import Tile

NAN = float("nan")
#: rows of each expert, rows of nobody, K, N.
CASES = {
    "uneven": ([5, 0, 17, 1], 3, 40, 24),
    "whole tiles": ([16, 32], 0, 32, 16),
    "odd sizes": ([3, 18], 2, 7, 19),
    "nobody has rows": ([0, 0, 0], 4, 8, 8),
    "one row": ([1], 0, 1, 1),
    "no rows": ([0, 0], 0, 8, 8),
    "no K": ([3, 2], 1, 0, 8),
    "no N": ([3, 2], 1, 8, 0),
    "no experts": ([], 5, 8, 8),
}


def make(loads, rest, inner, columns, device, dtype=torch.float32):
    """Rows of nobody hold NaN."""
    x, grad = (torch.randn(sum(loads) + rest, size).to(device, dtype) for size in (inner, columns))
    for tensor in (x, grad):
        tensor[sum(loads) :] = NAN
    return x, grad, ends(loads, device)


def check(out, x, grad, offsets, length=40):
    x, grad = wide(x), wide(grad)
    assert_sums(out, reference(x, grad, offsets), reference(x.abs(), grad.abs(), offsets), length)


@pytest.mark.parametrize("tile", [SMALL, "32x16x32 w4 s2 g1", ""])
@pytest.mark.parametrize("case", CASES)
def test_each_experts_rows_are_multiplied(case, tile, device):
    x, grad, offsets = make(*CASES[case], device)
    out = grouped_mm_wgrad(x, grad, offsets, tile=tile)
    assert out.dtype is x.dtype
    check(out, x, grad, offsets)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_summed_in_float32_and_rounded_once(dtype, device):
    x, grad, offsets = make([5, 0, 40, 1], 3, 24, 20, device, dtype)
    check(grouped_mm_wgrad(x, grad, offsets, tile=SMALL), x, grad, offsets)


@settings(max_examples=10)
@given(st.lists(st.integers(0, 37), max_size=5), st.integers(0, 5), st.integers(1, 40), st.integers(1, 40))
def test_any_load_and_size(loads, rest, inner, columns):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, grad, offsets = make(loads, rest, inner, columns, device)
    check(grouped_mm_wgrad(x, grad, offsets, tile=SMALL), x, grad, offsets)


@pytest.mark.parametrize("expert", [0, 1, 2])
def test_no_row_of_another_expert_is_looked_at(expert, device):
    x, grad, offsets = make([5, 20, 3], 2, 12, 12, device)
    want = grouped_mm_wgrad(x, grad, offsets, tile=SMALL)
    start, end = [0, *offsets.tolist()][expert : expert + 2]
    x[start:end] = NAN
    got = grouped_mm_wgrad(x, grad, offsets, tile=SMALL)
    others = [other for other in range(3) if other != expert]
    assert got[expert].isnan().all()
    assert torch.equal(got[others], want[others])


def test_strides_do_not_matter(device):
    x, grad, offsets = make([5, 20, 3], 2, 12, 12, device)
    want = grouped_mm_wgrad(x, grad, offsets, tile=SMALL)
    assert torch.equal(grouped_mm_wgrad(x.T.contiguous().T, grad, offsets, tile=SMALL), want)
    assert torch.equal(grouped_mm_wgrad(x, torch.cat([grad, grad], 1)[:, :12], offsets, tile=SMALL), want)
    constant = grad[:1, :1].expand(30, 12)
    assert torch.equal(
        grouped_mm_wgrad(x, constant, offsets, tile=SMALL),
        grouped_mm_wgrad(x, constant.contiguous(), offsets, tile=SMALL),
    )


@pytest.mark.parametrize("gather_x", [False, True])
def test_rows_of_tokens_are_gathered(gather_x, device):
    loads, rest, top_k = [7, 0, 11, 1], 5, 3
    pairs = sum(loads) + rest
    x, grad, offsets = make(loads, rest, 20, 12, device)
    order = torch.randperm(pairs).int().to(device)
    of_tokens = torch.randn(pairs // top_k, 20 if gather_x else 12, device=device)
    gathered = of_tokens[order.long() // top_k]
    x, grad, sources = (gathered, grad, (of_tokens, grad)) if gather_x else (x, gathered, (x, of_tokens))
    options = {"order": order, "top_k": top_k, "gather_x": gather_x, "gather_grad": not gather_x}
    check(multiply_transposed(*sources, offsets, Tile.parse(SMALL), **options), x, grad, offsets)


def test_results_do_not_depend_on_how_many_programs_share_the_tiles(device, monkeypatch):
    x, grad, offsets = make([5, 0, 37, 1], 4, 40, 40, device)
    results = []
    for processors in (1, 2, 5, 1000):
        monkeypatch.setattr(launching, "_processors", lambda device, found=processors: found)
        results.append(grouped_mm_wgrad(x, grad, offsets, tile="16x16x16 w16 s1 g2"))
    check(results[0], x, grad, offsets)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_has_the_memory_order_of_its_weights(transposed, device):
    x, grad, offsets = make([5, 3], 0, 12, 8, device)
    weight = torch.empty(2, 8, 12, device=device).mT if transposed else torch.empty(2, 12, 8, device=device)
    found = gradient_of(weight, x, grad, offsets)
    assert found.stride() == weight.stride()
    check(found, x, grad, offsets)


def test_derivatives_are_those_of_float64(device):
    x, grad, offsets = make([5, 0, 7], 0, 12, 8, device)
    of_weight = torch.randn(3, 12, 8, device=device)
    grouped_mm_wgrad(x.requires_grad_(), grad.requires_grad_(), offsets).backward(of_weight)
    exact = [wide(t).requires_grad_() for t in (x, grad)]
    reference(*exact, offsets).backward(wide(of_weight))
    for got, want in zip((x, grad), exact, strict=True):
        assert_sums(got.grad, want.grad, torch.full_like(want.grad, 4.0 * 12), 12)
