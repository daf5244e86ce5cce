import pytest
import torch
from torch import Tensor

from kpt_triton.moe.combine import combine, segment_sum

NAN = float("nan")
#: (tokens, top_k, columns, pairs that an expert here owns)
SHAPES = [(0, 2, 8, 0), (1, 1, 1, 1), (5, 3, 17, 15), (9, 2, 1030, 13), (63, 4, 40, 0), (16, 8, 128, 100)]
LOADS = {
    "some": [4, 0, 7, 1, 0],
    "none": [0, 0, 0],
    "one expert": [37],
    "chunks that end with an expert": [512, 0, 1024, 1],
    "one has nearly all": [3, 10000, 0, 2],
    "many experts": [1] * 50,
}


def make(tokens: int, top_k: int, width: int, owned: int, device: torch.device, dtype: torch.dtype):
    """Rows past the owned ones hold NaN, and so do the weights of their pairs."""
    pairs = tokens * top_k
    position = torch.randperm(pairs).int()
    rows, weights = torch.randn(pairs, width), torch.rand(tokens, top_k)
    rows[owned:] = NAN
    weights[(position >= owned).view(tokens, top_k)] = NAN
    offsets = torch.tensor([owned // 2, owned // 2, owned], dtype=torch.int32)
    return rows.to(device, dtype), position.to(device), offsets.to(device), weights.to(device)


def summed(rows: Tensor, position: Tensor, owned: int, weights: Tensor | None, top_k: int) -> Tensor:
    """Pair by pair, in float64."""
    out = torch.zeros(position.shape[0] // top_k, rows.shape[1], dtype=torch.float64)
    for pair, row in enumerate(position.tolist()):
        if row < owned:
            factor = 1.0 if weights is None else weights.flatten()[pair].double().cpu()
            out[pair // top_k] += factor * rows[row].double().cpu()
    return out


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "top_k", "width", "owned"), SHAPES)
def test_a_token_gets_the_sum_of_its_rows(tokens, top_k, width, owned, dtype, weighted, device):
    rows, position, offsets, weights = make(tokens, top_k, width, owned, device, dtype)
    factors = weights if weighted else None
    out = combine(rows, position, offsets, factors, top_k, dtype)
    want = summed(rows, position, owned, factors, top_k)
    assert (out.shape, out.dtype) == (want.shape, dtype)
    # Rounded once: half a unit in the last place, and what float32 loses over the sum.
    bound = torch.finfo(dtype).eps / 2 * want.abs() + 2 * top_k * 2**-23 * 4
    assert ((out.double().cpu() - want).abs() <= bound).all()


def test_the_result_may_be_wider_than_the_rows(device):
    rows, position, offsets, weights = make(6, 3, 20, 18, device, torch.bfloat16)
    out = combine(rows, position, offsets, weights, 3, torch.float32)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out.double().cpu(), summed(rows, position, 18, weights, 3), rtol=1e-6, atol=1e-6)


def test_choices_are_summed_in_their_order(device):
    # 1e8 + 1 is 1e8 in float32, so that another order gives another sum.
    rows = torch.tensor([[1.0], [1e8], [-1e8]], device=device)
    offsets = torch.tensor([3], dtype=torch.int32, device=device)
    for position, want in (([0, 1, 2], 0.0), ([1, 2, 0], 1.0)):
        place = torch.tensor(position, dtype=torch.int32, device=device)
        assert combine(rows, place, offsets, None, 3, torch.float32).item() == want


def test_rows_may_lie_apart(device):
    rows, position, offsets, weights = make(7, 2, 24, 14, device, torch.float32)
    want = combine(rows, position, offsets, weights, 2, torch.float32)
    wide = torch.full((14, 50), NAN, device=device)
    wide[:, 3:27] = rows
    assert torch.equal(combine(wide[:, 3:27], position, offsets, weights, 2, torch.float32), want)
    assert torch.equal(combine(rows.t().contiguous().t(), position, offsets, weights, 2, torch.float32), want)
    strided = torch.stack((weights, weights), -1)[..., 0]
    assert torch.equal(combine(rows, position, offsets, strided, 2, torch.float32), want)


def make_segments(loads: list[int], width: int, device: torch.device, dtype: torch.dtype):
    """Three more rows than are owned, of NaN, and their weights too."""
    owned = sum(loads)
    rows, weights = torch.randn(owned + 3, width), torch.randn(owned + 3)
    rows[owned:] = weights[owned:] = NAN
    ends = torch.tensor(loads).cumsum(0).int()
    return rows.to(device, dtype), ends.to(device), weights.to(device)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS)
def test_an_expert_gets_the_sum_of_its_rows(loads, dtype, weighted, device):
    rows, offsets, weights = make_segments(loads, 12, device, dtype)
    out = segment_sum(rows, offsets, weights if weighted else None, torch.float32)
    scaled = rows.double().cpu() * (weights.double().cpu()[:, None] if weighted else 1)
    want = torch.stack([part.sum(0) for part in scaled[: sum(loads)].split(loads)])
    size = torch.stack([part.abs().sum(0) for part in scaled[: sum(loads)].split(loads)])
    assert (out.shape, out.dtype) == (want.shape, torch.float32)
    assert ((out.double().cpu() - want).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("width", [0, 1, 128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_of_experts_are_rounded_once_to_the_dtype_asked_for(dtype, width, device):
    rows, offsets, _ = make_segments([5, 600], width, device, torch.float16)
    wide = segment_sum(rows, offsets)
    assert torch.equal(segment_sum(rows, offsets, dtype=dtype), wide.to(dtype))
    assert wide.shape == (2, width)
    torch.testing.assert_close(wide[0].double(), rows[:5].double().sum(0))


def test_repeats_bitwise(device):
    rows, offsets, weights = make_segments([700, 3, 900], 130, device, torch.float32)
    assert torch.equal(segment_sum(rows, offsets, weights), segment_sum(rows, offsets, weights))
    strided = rows.t().contiguous().t()
    assert torch.equal(segment_sum(strided, offsets, weights), segment_sum(rows, offsets, weights))
