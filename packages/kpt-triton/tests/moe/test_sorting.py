import pytest
import torch
from torch import Tensor

from kpt_triton.moe.sorting import position_of, sort_pairs

#: (tokens, top_k, experts): one launch, its limits, three launches, chunks that end early.
SHAPES = [
    (0, 2, 4),
    (1, 1, 1),
    (7, 1, 1),
    (63, 3, 5),
    (64, 2, 128),
    (2, 2, 300),
    (128, 8, 64),
    (4097, 1, 1),
    (1367, 3, 17),
    (513, 8, 256),
]


def routing(
    tokens: int, top_k: int, num_experts: int, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Ids among which some are negative and some past the experts."""
    return torch.randint(-2, num_experts + 3, (tokens, top_k)).to(device, dtype)


def expected(index: Tensor, num_experts: int) -> tuple[list[int], list[int], list[int]]:
    """By Python's own sort, which is stable."""
    ids = [expert if 0 <= expert < num_experts else num_experts for expert in index.flatten().tolist()]
    order = sorted(range(len(ids)), key=lambda pair: ids[pair])
    position = [0] * len(ids)
    for row, pair in enumerate(order):
        position[pair] = row
    return order, position, [sum(other <= expert for other in ids) for expert in range(num_experts)]


def check(index: Tensor, num_experts: int) -> None:
    got = sort_pairs(index, num_experts)
    assert all(part.dtype is torch.int32 and part.device == index.device for part in got)
    for part, want in zip(got, expected(index, num_experts), strict=True):
        assert part.tolist() == want
    assert torch.equal(position_of(got.order), got.position)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "top_k", "num_experts"), SHAPES)
def test_is_a_stable_sort(tokens, top_k, num_experts, dtype, device):
    check(routing(tokens, top_k, num_experts, device, dtype), num_experts)


@pytest.mark.parametrize("pairs", [96, 5000])
@pytest.mark.parametrize("expert", [-5, 0, 3, 4, 2**31 - 1])
def test_pairs_may_all_be_of_one_expert_or_of_none(pairs, expert, device):
    check(torch.full((pairs, 1), expert, device=device), 4)


@pytest.mark.parametrize("tokens", [30, 3000])
def test_ids_that_int32_does_not_hold_are_of_no_expert(tokens, device):
    index = routing(tokens, 2, 3, device)
    index[::7] = 2**32 + 1
    index[::11] = -(2**40)
    check(index, 3)


@pytest.mark.parametrize("tokens", [40, 1500])
def test_strides_may_be_any(tokens, device):
    check(routing(tokens, 6, 9, device)[:, ::2], 9)
    check(routing(3, tokens, 9, device).t(), 9)


def test_repeats_bitwise(device):
    index = routing(1200, 4, 20, device)
    first = sort_pairs(index, 20)
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(sort_pairs(index, 20), first, strict=True))
