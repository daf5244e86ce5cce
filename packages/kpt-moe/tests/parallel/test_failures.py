"""A rank that ends or is late raises on the others; wrong arguments are refused before anything is changed."""

import os
import re
import time

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from kpt_core import InputError, KptError
from kpt_moe import FeedForwardExpert, MoEConfig, MoELayer
from kpt_moe.expert_networks import ExpertNetwork, ParameterEfficientExpert
from kpt_moe.parallel import average_gradients, dispatch, experts_per_rank, fully_shard_experts, parallelize_experts


def layer():
    torch.manual_seed(0)
    return MoELayer(MoEConfig(hidden_size=4, num_experts=4, top_k=2, intermediate_size=4))


def message_of_the_one_left(rank, when, how, caught_it):
    """Rank 1 ends, or sleeps, in its second step; rank 0 gives the error and how long it took.

    Rank 1 sleeps until rank 0 has made the file `caught_it`, or for 16 s.
    """
    spread = parallelize_experts(layer(), init_device_mesh("cpu", (2,)), chunks=2)
    spread(torch.randn(6, 4)).sum().backward()
    out = spread(torch.randn(6, 4)) if when == "backward" else None
    if rank == 1:
        if how == "ends":
            os._exit(3)
        end = time.monotonic() + 16
        while not caught_it.exists() and time.monotonic() < end:
            time.sleep(0.1)
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(KptError) as caught:
        (spread(torch.randn(6, 4)) if out is None else out).sum().backward()
    seconds = time.monotonic() - start
    caught_it.touch()
    return str(caught.value), seconds


@pytest.mark.parametrize(("when", "how"), [("forward", "ends"), ("backward", "ends"), ("forward", "sleeps")])
def test_a_rank_that_is_gone_raises_on_the_others(launch, when, how, tmp_path):
    timeout = 60 if how == "ends" else 8
    (message, seconds), gone = launch(
        2, message_of_the_one_left, when, how, tmp_path / "caught", may_die=True, collective_timeout=timeout
    )
    assert gone == (3 if how == "ends" else 0)
    assert seconds < 40  # a busy machine is slow to notice, but need not wait for a timeout of 60 s
    for part in ("rank 0 of 2", "global ranks [0, 1]", "another rank ended", "timeout", "last checkpoint"):
        assert part in message


class Neighbours(FeedForwardExpert):
    needs_sequences = True


class Shared(FeedForwardExpert):
    def __init__(self, hidden_size, **sizes):
        super().__init__(hidden_size, **sizes)
        self.scale = torch.nn.Parameter(torch.ones(3))


class Opaque(ExpertNetwork):
    def forward(self, x, routing, *, cu_seqlens=None):
        return x


def refuses(rank):
    line = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    flipped = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "tp"))
    cube = init_device_mesh("cpu", (2, 1, 1))
    odd = FeedForwardExpert(4, num_experts=4, intermediate_size=3)
    spread = parallelize_experts(layer(), line)
    rows = torch.randn(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    wrong = [
        (lambda: parallelize_experts(torch.nn.Linear(2, 2), line), "contains no ExpertNetwork"),
        (lambda: parallelize_experts(layer(), cube), "one dimension, or two"),
        (lambda: parallelize_experts(Neighbours(4, num_experts=4, intermediate_size=4), line), "neighbours"),
        (lambda: parallelize_experts(Opaque(4, num_experts=4), line), "Opaque has no method rows(x, index, weights)"),
        (
            lambda: parallelize_experts(Shared(4, num_experts=4, intermediate_size=4), line),
            "Shared.scale must begin with 4 experts",
        ),
        (
            lambda: parallelize_experts(ParameterEfficientExpert(4, num_experts=4, intermediate_size=4), line),
            "base.gate_up_proj must begin with 4 experts to be split by them; got [1, 8, 4]: what all experts share",
        ),
        (
            lambda: parallelize_experts(FeedForwardExpert(4, num_experts=1, intermediate_size=4), line),
            "leave nothing for some of 2 ranks",
        ),
        (
            lambda: parallelize_experts(odd, flipped["one"], tensor_parallel_mesh=flipped["tp"]),
            "size=3 does not divide by 2",
        ),
        (lambda: parallelize_experts(layer(), line, tensor_parallel_mesh=grid["tp"]), "named dimensions of one mesh"),
        (lambda: parallelize_experts(layer(), grid, tensor_parallel_mesh=grid["tp"]), "has one dimension"),
        (lambda: parallelize_experts(spread, line), "has been spread before"),
        (lambda: parallelize_experts(layer(), line, chunks=0), "chunks must be 1 or more; got 0"),
        (lambda: dispatch(*rows, None, num_experts=4, groups=[line.get_group()], chunks=0), "chunks must be 1 or more"),
        (lambda: fully_shard_experts(layer(), line, world_size=2), "parallelize_experts first"),
        (lambda: average_gradients(layer(), line), "parallelize_experts first"),
    ]
    for call, text in wrong:
        with pytest.raises(InputError, match=re.escape(text)):
            call()
    # What was refused is untouched.
    assert type(odd) is FeedForwardExpert
    assert type(odd.down_proj) is torch.nn.Parameter
    return True


def test_refuses_what_it_cannot_spread(launch):
    assert launch(2, refuses) == [True, True]


@pytest.mark.parametrize(("experts", "ranks", "counts"), [(8, 4, [2] * 4), (7, 4, [2, 2, 2, 1]), (3, 1, [3])])
def test_experts_per_rank(experts, ranks, counts):
    assert experts_per_rank(experts, ranks) == counts


@pytest.mark.parametrize(("experts", "ranks"), [(3, 4), (9, 6)])
def test_no_rank_is_left_without_experts(experts, ranks):
    with pytest.raises(InputError, match="divides the number of experts"):
        experts_per_rank(experts, ranks)


def test_without_groups_experts_are_called_right_away():
    made = FeedForwardExpert(4, num_experts=4, intermediate_size=4)
    x, index, weights = torch.randn(3, 4), torch.randint(0, 4, (3, 2)), torch.rand(3, 2)
    assert torch.equal(dispatch(x, index, weights, made.rows, num_experts=4, groups=[]), made.rows(x, index, weights))
