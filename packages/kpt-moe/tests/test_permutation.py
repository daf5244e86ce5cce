import torch
from hypothesis import given
from hypothesis import strategies as st

from kpt_moe.permutation import expert_of_rows, inverse, sort_by_expert


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Ids of experts, some of them none that are here: negative or beyond."""
    num_experts = draw(st.integers(1, 8))
    tokens, top_k = draw(st.integers(0, 20)), draw(st.integers(1, 5))
    ids = st.integers(-draw(st.integers(0, 2)), num_experts + draw(st.integers(0, 3)))
    flat = draw(st.lists(ids, min_size=tokens * top_k, max_size=tokens * top_k))
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    return torch.tensor(flat, dtype=dtype).view(tokens, top_k), num_experts


def keys(index: torch.Tensor, num_experts: int) -> list[int]:
    """What is sorted by: negative ids come after the experts."""
    return [value if value >= 0 else num_experts for value in index.flatten().tolist()]


@given(routings())
def test_order_is_a_stable_sort(routing):
    index, num_experts = routing
    flat = keys(index, num_experts)
    order = sort_by_expert(index, num_experts).order
    assert order.dtype is torch.int64
    assert order.tolist() == sorted(range(len(flat)), key=lambda pair: flat[pair])


@given(routings())
def test_offsets_end_each_expert(routing):
    index, num_experts = routing
    flat = keys(index, num_experts)
    offsets = sort_by_expert(index, num_experts).offsets
    assert offsets.dtype is torch.int32
    assert offsets.tolist() == [sum(value <= expert for value in flat) for expert in range(num_experts)]


@given(routings())
def test_ids_of_no_expert_here_come_last(routing):
    index, num_experts = routing
    order, offsets = sort_by_expert(index, num_experts)
    ids = index.flatten()[order]
    end = int(offsets[-1])
    assert ((ids[:end] >= 0) & (ids[:end] < num_experts)).all()
    assert ((ids[end:] < 0) | (ids[end:] >= num_experts)).all()


@given(routings())
def test_inverse_undoes_the_order(routing):
    index, num_experts = routing
    order, _ = sort_by_expert(index, num_experts)
    everywhere = torch.arange(order.numel())
    assert torch.equal(order[inverse(order)], everywhere)
    assert torch.equal(inverse(order)[order], everywhere)


@given(routings())
def test_expert_of_rows_are_the_sorted_ids(routing):
    index, num_experts = routing
    order, offsets = sort_by_expert(index, num_experts)
    expected = torch.tensor(keys(index, num_experts), dtype=torch.int64)[order].clamp(max=num_experts - 1)
    assert torch.equal(expert_of_rows(offsets, order.numel()), expected)


def test_index_may_be_non_contiguous():
    index = torch.tensor([[3, 0, 1], [2, 2, 0]])
    transposed = index.t().contiguous().t()
    assert not transposed.is_contiguous()
    for want, have in zip(sort_by_expert(index, 4), sort_by_expert(transposed, 4), strict=True):
        assert torch.equal(want, have)


def test_index_is_left_as_it_is():
    index = torch.tensor([[3, 0], [2, 1]])
    sort_by_expert(index, 4)
    assert index.tolist() == [[3, 0], [2, 1]]


def test_nothing_is_read_on_the_host():
    index = torch.empty(6, 2, dtype=torch.int64, device="meta")
    order, offsets = sort_by_expert(index, 4)
    assert (order.device.type, order.shape, order.dtype) == ("meta", (12,), torch.int64)
    assert (offsets.device.type, offsets.shape, offsets.dtype) == ("meta", (4,), torch.int32)
    assert inverse(order).shape == expert_of_rows(offsets, 12).shape == (12,)
