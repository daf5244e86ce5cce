import pytest
import torch
from torch import Tensor

from kpt_triton.moe.sorting import MAX_EXPERTS, sort_pairs

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


@pytest.mark.parametrize("tokens", [9, 2100])
def test_opcheck(tokens, device):
    torch.library.opcheck(torch.ops.kpt_triton.sort_pairs.default, (routing(tokens, 2, 5, device), 5))


def test_compiles_without_a_break(device):
    compiled = torch.compile(sort_pairs, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (9, 10):
        index = routing(tokens, 2, 5, device)
        for got, want in zip(compiled(index, 5), sort_pairs(index, 5), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("num_experts", [0, -1, MAX_EXPERTS + 1])
def test_numbers_of_experts_that_do_not_fit_are_named(num_experts):
    with pytest.raises(ValueError, match=rf"num_experts must be from 1 to 4096; got {num_experts}"):
        sort_pairs(torch.zeros(2, 2, dtype=torch.int64), num_experts)


def test_dtypes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"must be int32 or int64; got torch\.float32: convert it"):
        sort_pairs(torch.zeros(2, 2), 4)
