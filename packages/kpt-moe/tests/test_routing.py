import torch
from hypothesis import given
from torch.utils._pytree import tree_leaves

from kpt_moe import Routing
from routings import assert_same, routings


def counted(routing: Routing) -> tuple[list[int], list[int], int]:
    """Choice by choice: load and asked of each expert, dropped."""
    load, asked, dropped = [0] * routing.num_experts, [0] * routing.num_experts, 0
    for row, ids in enumerate(routing.index.tolist()):
        token = row if routing.token is None else int(routing.token[row])
        counts = routing.mask is None or bool(routing.mask[token])
        for e in ids:
            wanted = ~e if e < 0 else e
            if 0 <= e < routing.num_experts:
                load[e] += 1
            if counts and wanted < routing.num_experts:
                asked[wanted] += 1
            dropped += counts and e < 0
    return load, asked, dropped


@given(routings(num_experts=5))
def test_counts_are_the_definition(routing):
    load, asked, dropped = counted(routing)
    assert routing.tokens_per_expert().tolist() == load
    assert routing.asked_per_expert().tolist() == asked
    assert int(routing.dropped()) == dropped


@given(routings(num_experts=5, dtype=torch.float32))
def test_apply_sends_each_row_and_sums_by_token(routing):
    tokens = routing.logits.shape[0]
    x = torch.randn(tokens, 4)
    out = routing.apply(x, lambda rows, index, weights: rows * weights.sum(1, keepdim=True))
    want = torch.zeros(tokens, 4, dtype=torch.float64)
    for row in range(routing.index.shape[0]):
        token = row if routing.token is None else int(routing.token[row])
        want[token] += x[token].double() * routing.weights[row].double().sum()
    torch.testing.assert_close(out, want.float(), rtol=1e-5, atol=1e-5)


def small() -> Routing:
    weights = torch.rand(3, 2, requires_grad=True)
    return Routing(torch.tensor([[0, 1], [~1, 2], [3, 0]]), weights * 2, torch.randn(3, 3), torch.ones(3).bool())


def test_detach_shares_memory_and_drops_gradients():
    routing = small()
    detached = routing.detach()
    assert routing.weights.requires_grad
    assert not detached.weights.requires_grad
    assert_same(detached, routing)
    assert detached.weights.data_ptr() == routing.weights.data_ptr()
    assert detached.token is None


def test_to_moves_every_tensor_and_copies_on_demand_alone():
    routing = small()
    assert all(leaf.is_meta for leaf in tree_leaves(routing.to("meta")) if leaf is not None)
    assert routing.to("cpu").index is routing.index
    copied = routing.to("cpu", copy=True)
    assert_same(copied, routing)
    assert copied.index.data_ptr() != routing.index.data_ptr()
