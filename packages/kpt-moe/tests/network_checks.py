"""Routings for tests of networks of experts, and what must hold of every such network."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kpt_moe import Routing
from kpt_moe.expert_networks import ExpertNetwork

EXPERTS = 4


def _routing(index: Tensor, tokens: int, mask: Tensor | None = None, token: Tensor | None = None) -> Routing:
    weights = torch.where((index >= 0) & (index < EXPERTS), torch.rand(index.shape, dtype=torch.float64) + 0.1, 0)
    return Routing(index, weights, torch.zeros(tokens, EXPERTS, dtype=torch.float64), mask, token)


def _top_2(tokens: int) -> Routing:
    return _routing(torch.rand(tokens, EXPERTS).topk(2).indices, tokens)


def _one_expert(tokens: int) -> Routing:
    return _routing(torch.full((tokens, 1), 2), tokens)


def _refused(tokens: int) -> Routing:
    """Every fourth token is padding; of the others some choices are refused, and some are none."""
    mask = torch.arange(tokens) % 4 != 1
    index = torch.rand(tokens, EXPERTS).topk(2).indices
    index[::3, 0] = ~index[::3, 0]
    index[2::5, 1] = EXPERTS
    asked = torch.where(index < 0, ~index, index)
    return _routing(torch.where(mask.unsqueeze(1), index, ~asked), tokens, mask)


def _chosen_tokens(tokens: int) -> Routing:
    """Experts choose tokens: some have several, some none; one row's choice is refused, and padding is there."""
    rows = [(expert, token) for expert in range(EXPERTS - 1) for token in range(tokens) if (token + expert) % 3 != 2]
    index = torch.tensor([expert for expert, _ in rows], dtype=torch.int64).unsqueeze(1)
    token = torch.tensor([token for _, token in rows], dtype=torch.int64)
    mask = torch.arange(tokens) != 3
    index = torch.where(mask[token].unsqueeze(1), index, ~index)
    index[1:2] = ~index[1:2]
    return _routing(index, tokens, mask, token)


ROUTINGS: dict[str, Callable[[int], Routing]] = {
    "top_2": _top_2,
    "one_expert": _one_expert,
    "refused": _refused,
    "chosen_tokens": _chosen_tokens,
}


def served(routing: Routing) -> Iterator[tuple[int, int, Tensor]]:
    """(token, expert, weight) of every choice that is served."""
    for row, experts in enumerate(routing.index.tolist()):
        for choice, expert in enumerate(experts):
            if 0 <= expert < routing.num_experts:
                yield row if routing.token is None else int(routing.token[row]), expert, routing.weights[row, choice]


def randomised(network: ExpertNetwork) -> ExpertNetwork:
    """Every parameter random, those too that begin as zero."""
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return network


def with_weights(routing: Routing, weights: Tensor) -> Routing:
    return Routing(routing.index, weights, routing.logits, routing.mask, routing.token)


def value_and_gradients(
    network: ExpertNetwork,
    function: Callable[[Tensor, Routing], Tensor],
    x: Tensor,
    routing: Routing,
) -> tuple[Tensor, list[Tensor]]:
    """Of x, the routing weights and every parameter that wants one; zero where nothing reaches it."""
    x, weights = x.detach().clone().requires_grad_(), routing.weights.detach().clone().requires_grad_()
    out = function(x, with_weights(routing, weights))
    wanted = [x, weights, *(p for p in network.parameters() if p.requires_grad)]
    if not out.requires_grad:
        return out, [torch.zeros_like(w) for w in wanted]
    cotangent = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, wanted, cotangent, allow_unused=True)
    return out.detach(), [torch.zeros_like(w) if g is None else g for g, w in zip(grads, wanted, strict=True)]


def check_gradients(network: ExpertNetwork, x: Tensor, routing: Routing, cu_seqlens: Tensor | None = None) -> None:
    """torch's own check, in float64, of x, the routing weights and every parameter that wants a gradient."""
    names = [name for name, p in network.named_parameters() if p.requires_grad]

    def function(x: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        arguments = (x, with_weights(routing, weights))
        return torch.func.functional_call(network, given, arguments, {"cu_seqlens": cu_seqlens})

    parameters = [p.detach().clone().requires_grad_() for p in network.parameters() if p.requires_grad]
    inputs = (x.detach().clone().requires_grad_(), routing.weights.clone().requires_grad_(), *parameters)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def check_copies(make: Callable[..., ExpertNetwork]) -> None:
    """Copies and a loaded state dict give the same; on meta there is nothing but shapes."""
    network, x, routing = randomised(make(dtype=torch.float64)), torch.randn(7, 8, dtype=torch.float64), _top_2(7)
    want = network(x, routing)
    loaded = make(dtype=torch.float64)
    loaded.load_state_dict(network.state_dict())
    for same in (copy.deepcopy(network), loaded):
        assert torch.equal(same(x, routing), want)
    on_meta = make(device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in on_meta.parameters()} == {("meta", torch.bfloat16)}
    assert not list(on_meta.buffers())
    there = Routing(*(t.to("meta") for t in (routing.index, routing.weights, routing.logits)))
    out = on_meta(torch.empty(7, 8, device="meta", dtype=torch.bfloat16), there)
    assert (out.shape, out.dtype, out.device.type) == ((7, 8), torch.bfloat16, "meta")


def check_low_precision(make: Callable[..., ExpertNetwork]) -> None:
    """In bfloat16, and under autocast, the result is that of float64 but for rounding, and gradients are there."""
    routing = _refused(20)
    network = randomised(make(dtype=torch.float64))
    x = torch.randn(20, 8, dtype=torch.float64)
    low, single = (copy.deepcopy(network).to(dtype) for dtype in (torch.bfloat16, torch.float32))
    want = copy.deepcopy(low).double()(x.bfloat16().double(), routing)
    out = low(x.bfloat16(), with_weights(routing, routing.weights.float()))
    assert out.dtype is torch.bfloat16
    assert (out.double() - want).norm() < 0.02 * want.norm()
    out.sum().backward()
    assert all(p.grad.dtype is torch.bfloat16 and p.grad.isfinite().all() for p in low.parameters() if p.requires_grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = single(x.float(), with_weights(routing, routing.weights.float()))
    assert out.dtype is torch.float32
    want = network(x, routing)
    assert 1e-4 * want.norm() < (out.double() - want).norm() < 0.05 * want.norm()


def check_compiles(network: ExpertNetwork, cu_seqlens: Callable[[int], Tensor] | None = None) -> None:
    """One graph, with the same values and gradients as without compiling, whatever the number of tokens."""
    compiled = torch.compile(network, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (9, 14):
        routing, x = _refused(tokens), torch.randn(tokens, 8, dtype=torch.float64)
        ends = None if cu_seqlens is None else cu_seqlens(tokens)
        have = value_and_gradients(network, lambda *a, e=ends: compiled(*a, cu_seqlens=e), x, routing)
        want = value_and_gradients(network, lambda *a, e=ends: network(*a, cu_seqlens=e), x, routing)
        torch.testing.assert_close(have, want)
    routing = _chosen_tokens(tokens)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, routing, cu_seqlens=ends), network(x, routing, cu_seqlens=ends))


def check_padding_is_not_seen(network: ExpertNetwork, cu_seqlens: Tensor | None = None) -> None:
    """NaN in padding reaches neither another token nor a gradient, and padding gets zero."""
    routing, x = _refused(13), torch.randn(13, 8, dtype=torch.float64)

    def run(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return value_and_gradients(network, lambda *a: network(*a, cu_seqlens=cu_seqlens), x, routing)

    have, want = (run(x.masked_fill(~routing.mask.unsqueeze(1), filling)) for filling in (float("nan"), 0.0))
    torch.testing.assert_close(have, want, rtol=0, atol=0)
    assert not have[0][~routing.mask].any()
    assert have[0][routing.mask].any()
