"""Spread experts give what one process gives, forward and backward, whatever the ranks' loads."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from kpt_moe import FeedForwardExpert, Routing
from kpt_moe.expert_networks import ParameterEfficientExpert
from kpt_moe.parallel import parallelize_experts

HIDDEN, WIDTH, TOP_K = 6, 5, 3
LOADS = ["random", "one expert", "none", "a rank without tokens", "no tokens anywhere", "rows of tokens"]


def tokens_of(load, rank, ranks, num_experts, seed):
    """x, routing tensors and the gradient of the output, of one rank; each rank can ask for all."""
    make = torch.Generator().manual_seed(1000 * seed + rank)
    tokens = int(torch.randint(0, 9, (), generator=make))
    if load == "no tokens anywhere" or (load == "a rank without tokens" and rank == ranks - 1):
        tokens = 0
    rows = tokens * 2 if load == "rows of tokens" else tokens
    index = torch.rand(rows, num_experts, generator=make).argsort(1)[:, :TOP_K]
    if load == "one expert":
        index = torch.cat((torch.full((rows, 1), num_experts - 1), torch.full((rows, TOP_K - 1), -num_experts)), 1)
    elif load == "none":
        index = torch.where(torch.rand(index.shape, generator=make) < 0.5, ~index, index + num_experts)
    else:
        index = torch.where(torch.rand(index.shape, generator=make) < 0.2, ~index, index)
    weights = torch.rand(index.shape, generator=make)
    token = torch.randint(0, tokens, (rows,), generator=make) if load == "rows of tokens" and tokens else None
    x, grad = (torch.randn(tokens, HIDDEN, generator=make) for _ in range(2))
    return x, index, weights, token, grad


def network(num_experts, dtype, activation="swiglu", bias=True):
    torch.manual_seed(7)
    made = FeedForwardExpert(
        HIDDEN, num_experts=num_experts, intermediate_size=WIDTH, activation=activation, bias=bias, dtype=dtype
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


def adapted(num_experts, dtype):
    """LoRA on every expert, with updates that are not zero."""
    made = ParameterEfficientExpert.from_feed_forward(network(num_experts, dtype), rank=2, freeze_base=False)
    with torch.no_grad():
        for parameter in (*made.up.parameters(), *made.down.parameters()):
            parameter.normal_()
    return made


def run(experts, parts, dtype):
    """Forward and backward; output and gradients of x and weights, each rank's apart."""
    given = []
    for x, index, weights, token, grad in parts:
        x, weights = (t.to(dtype).requires_grad_() for t in (x, weights))
        num_experts = experts.num_experts
        routing = Routing(index, weights, x.new_zeros(x.shape[0], num_experts), token=token)
        out = experts(x, routing)
        out.backward(grad.to(dtype))
        given.append((out.detach(), x.grad, weights.grad))
    return given


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def equals_one_process(
    rank, ranks, mesh, num_experts, dtype, *, seeds=(0,), loads=LOADS, tolerance=None, make=network, **options
):
    tolerance = tolerance or (1e-12 if dtype is torch.float64 else 2e-6)
    place = partial(make, num_experts, dtype)
    for seed in seeds:
        for load in loads:
            single, spread = place(), parallelize_experts(place(), mesh, **options)
            parts = [tokens_of(load, r, ranks, num_experts, seed) for r in range(ranks)]
            expected = run(single, parts, dtype)[rank]
            actual = run(spread, parts[rank : rank + 1], dtype)[0]
            note = f"{load}, seed {seed}, {options}"
            for got, want in zip(actual, expected, strict=True):
                torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=lambda m, n=note: f"{n}: {m}")
            for (name, got), want in zip(spread.named_parameters(), single.parameters(), strict=True):
                loose = {"rtol": 10 * tolerance, "atol": 10 * tolerance}
                of = f"{note}, {name}"
                torch.testing.assert_close(full(got.grad), want.grad, **loose, msg=lambda m, n=of: f"{n}: {m}")


def sends_ahead_and_once_per_rank(rank, monkeypatch):
    """The next chunk is on its way before one is computed; a row goes once to each rank with any of its experts."""
    spread = parallelize_experts(network(6, torch.float32), init_device_mesh("cpu", (2,)), chunks=3)
    log, rows_sent = [], []
    transfer, compute = dist.all_to_all_single, spread.rows

    def logged(out, sent, *arguments, async_op=False, **options):
        if async_op:
            log.append("id" if not sent.is_floating_point() else "x" if sent.shape[1] == HIDDEN else "w")
            rows_sent.append(sent.shape[0])
        return transfer(out, sent, *arguments, async_op=async_op, **options)

    monkeypatch.setattr(dist, "all_to_all_single", logged)
    spread.rows = lambda *arguments: (log.append("compute"), compute(*arguments))[1]
    index = torch.stack([torch.randperm(6)[:TOP_K] for _ in range(9 + rank)])
    x, weights = (torch.randn(9 + rank, n, requires_grad=True) for n in (HIDDEN, TOP_K))
    out = spread(x, Routing(index, weights, torch.zeros(9 + rank, 6)))
    sent = ["id", "x", "w"]
    assert log == [*sent, *sent, "compute", "x", *sent, "compute", "x", "compute", "x"]
    once = sum(len({int(e) // 3 for e in row}) for row in index)
    assert sum(n for n, kind in zip(rows_sent, [e for e in log if e != "compute"], strict=True) if kind == "id") == once
    log.clear()
    out.sum().backward()
    # Backward starts to return the last result of all first, and ends with the first chunk.
    assert log == ["x", "x", "x", "x", "w", "x", "w", "x", "w"]
    monkeypatch.undo()


def works_in_other_modes(rank):
    mesh = init_device_mesh("cpu", (2,))
    single, spread = network(6, torch.float64), parallelize_experts(network(6, torch.float64), mesh, chunks=2)
    x, index, weights, _, _ = tokens_of("random", rank, 2, 6, 5)
    x, routing = x.double(), Routing(index, weights.double(), x.new_zeros(x.shape[0], 6))
    with torch.no_grad():
        expected = single(x, routing)
        torch.testing.assert_close(spread(x, routing), expected)
    # Neither x nor the routing need gradients: those of the experts alone come about.
    spread(x, routing).sum().backward()
    parts = [tokens_of("random", r, 2, 6, 5) for r in range(2)]
    for px, pi, pw, _, _ in parts:
        single(px.double(), Routing(pi, pw.double(), px.new_zeros(px.shape[0], 6))).sum().backward()
    torch.testing.assert_close(full(spread.down_proj.grad), single.down_proj.grad)
    # Recomputed in backward.
    before = full(spread.gate_up_proj.grad)
    spread.zero_grad()
    kept = x.clone().requires_grad_()
    checkpoint(spread, kept, routing, use_reentrant=False).sum().backward()
    torch.testing.assert_close(full(spread.gate_up_proj.grad), before)
    # Around a graph break.
    compiled = torch.compile(lambda x: spread(x * 2, routing) + 1, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), single(x * 2, routing) + 1)
    half = network(6, torch.bfloat16), parallelize_experts(network(6, torch.bfloat16), mesh)
    routing = Routing(index, weights, x.new_zeros(x.shape[0], 6))
    single_half, spread_half = (made(x.bfloat16(), routing) for made in half)
    assert spread_half.dtype is torch.bfloat16
    torch.testing.assert_close(spread_half, single_half, rtol=3e-2, atol=3e-2)


def on_two(rank):
    mesh = init_device_mesh("cpu", (2,))
    equals_one_process(rank, 2, mesh, 6, torch.float32, seeds=range(4))
    equals_one_process(rank, 2, mesh, 6, torch.float64, seeds=range(2))
    for chunks in (2, 3):
        equals_one_process(rank, 2, mesh, 6, torch.float64, chunks=chunks)
    equals_one_process(rank, 2, mesh, 7, torch.float64)
    equals_one_process(rank, 2, mesh, 7, torch.float64, make=adapted)
    with pytest.MonkeyPatch.context() as monkeypatch:
        sends_ahead_and_once_per_rank(rank, monkeypatch)
    works_in_other_modes(rank)
    return True


def on_four(rank):
    flat = init_device_mesh("cpu", (4,))
    equals_one_process(rank, 4, flat, 8, torch.float32, seeds=range(2))
    equals_one_process(rank, 4, flat, 8, torch.float64, chunks=3)
    equals_one_process(rank, 4, flat, 7, torch.float64)
    nodes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    equals_one_process(rank, 4, nodes, 8, torch.float64, seeds=range(2))
    equals_one_process(rank, 4, nodes, 8, torch.float64, chunks=2)
    equals_one_process(rank, 4, nodes, 7, torch.float64)
    # 3, 2, 3, 2 experts; in one level 3, 3, 3, 1.
    equals_one_process(rank, 4, nodes, 10, torch.float64, loads=["random"])
    equals_one_process(rank, 4, flat, 10, torch.float64, loads=["random"])
    return True


@pytest.mark.parametrize(("ranks", "checks"), [(2, on_two), (4, on_four)])
def test_equals_one_process(launch, ranks, checks):
    assert launch(ranks, checks) == [True] * ranks
