"""Contests of what comes before experts: choosing them, and sorting rows by them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kpt_core
from kpt_moe.permutation import sort_by_expert

from .ceilings import Work, last_cache
from .contest import Call, Contest, Contestant, Role, Trial, in_plain_pytorch

_MOST_COPIES = 256


def gating_contest(tokens: int, experts: int, top_k: int, seed: int, *, sigmoid: bool) -> Contest:
    """Top-k gating of float32 logits: softmax as in Qwen3-MoE, or sigmoid, bias and groups as in DeepSeek-V3.

    Beside it: the same in PyTorch's own calls, as transformers' routers have it.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator)
    bias = torch.randn(experts, generator=generator) / 8 if sigmoid else None
    groups = {"num_groups": 8, "top_groups": 4} if sigmoid else {}
    settings: dict[str, Any] = {"top_k": top_k, "score": "sigmoid" if sigmoid else "softmax", **groups}
    gate = partial(kpt_core.get_op("moe.top_k_gating"), correction_bias=bias, **settings)
    peer = partial(_softmax, top_k=top_k) if bias is None else partial(_sigmoid, bias=bias, top_k=top_k)

    def chosen(given: tuple[Tensor, Tensor]) -> Tensor:
        weights, index = given
        return torch.zeros(tokens, experts, dtype=torch.float64).scatter_(1, index, weights.double())

    exact = chosen(_exact_gating(logits.double(), bias, top_k, sigmoid=sigmoid))
    copies = _copies(logits)
    moved = logits.nbytes + tokens * top_k * 12
    return Contest(
        group="gating",
        name=f"{'sigmoid' if sigmoid else 'softmax'}, {top_k} of {experts}, {_counted(tokens)}",
        sizes={"tokens": tokens, "num_experts": experts, "top_k": top_k},
        dtype="fp32",
        work=Work(0, moved, (torch.float32,)),
        rotation=logits.nbytes * len(copies),
        contestants=_three(gate, peer, copies, lambda given: (chosen(given),), (exact,)),
        yardstick="torch",
    )


def sorting_contest(tokens: int, experts: int, top_k: int, seed: int) -> Contest:
    """The order of rows by expert, and where each expert's end; beside it what transformers' grouped_mm does."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.rand(tokens, experts, generator=generator).topk(top_k, dim=-1).indices
    flat = index.flatten()

    def sorted_rows(given: tuple[Tensor, Tensor]) -> Sequence[Tensor]:
        order, offsets = given
        return flat[order], order.sort().values, offsets

    counts = torch.zeros(experts, dtype=torch.int64).index_add_(0, flat, torch.ones_like(flat))
    expected = (torch.arange(experts).repeat_interleave(counts), torch.arange(flat.numel()), counts.cumsum(0))
    copies = _copies(index)
    return Contest(
        group="sorting",
        name=f"{top_k} of {experts}, {_counted(tokens)}",
        sizes={"tokens": tokens, "num_experts": experts, "top_k": top_k},
        dtype="int64",
        work=Work(0, 2 * index.nbytes, (torch.float32,)),
        rotation=index.nbytes * len(copies),
        contestants=_three(
            partial(sort_by_expert, num_experts=experts),
            partial(_torch_sort, experts=experts),
            copies,
            sorted_rows,
            [tensor.double() for tensor in expected],
        ),
        yardstick="torch",
    )


def _three(
    kpt: Callable[[Tensor], Any],
    peer: Callable[[Tensor], Any],
    copies: Sequence[Tensor],
    shown: Callable[[Any], Sequence[Tensor]],
    exact: Sequence[Tensor],
) -> list[Contestant]:
    """KPT with a vendor's kernels and without, and PyTorch's calls."""
    calls: list[Call] = [partial(kpt, each) for each in copies]
    everybody: list[tuple[str, Role, list[Call]]] = [
        ("kpt", "kpt", calls),
        ("plain", "plain", [in_plain_pytorch(call) for call in calls]),
        ("torch", "peer", [partial(peer, each) for each in copies]),
    ]
    return [
        Contestant(name, role, torch.float32, own, [Trial(partial(_shown, own[0], shown), exact)])
        for name, role, own in everybody
    ]


def _shown(call: Call, shown: Callable[[Any], Sequence[Tensor]]) -> Sequence[Tensor]:
    return shown(call())


def _softmax(logits: Tensor, *, top_k: int) -> tuple[Tensor, Tensor]:
    weights, index = logits.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), index


def _sigmoid(logits: Tensor, *, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    choice = scores + bias
    best = choice.view(len(logits), 8, -1).topk(2, dim=-1)[0].sum(-1).topk(4, dim=-1, sorted=False)[1]
    mask = torch.zeros(len(logits), 8).scatter_(1, best, 1).bool()
    inside = mask.unsqueeze(-1).expand(-1, 8, logits.shape[1] // 8).reshape(len(logits), -1)
    index = choice.masked_fill(~inside, float("-inf")).topk(top_k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, index)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), index


def _exact_gating(logits: Tensor, bias: Tensor | None, top_k: int, *, sigmoid: bool) -> tuple[Tensor, Tensor]:
    """One token after the other, in float64."""
    weights, indices = [], []
    for row in logits:
        scores = 1 / (1 + (-row).exp()) if sigmoid else (row - row.max()).exp()
        allowed = scores if bias is None else scores + bias.double()
        if sigmoid:
            groups = allowed.view(8, -1)
            value = groups.sort(dim=-1, descending=True).values[:, :2].sum(-1)
            kept = value.argsort(descending=True)[:4]
            allowed = torch.full_like(groups, -torch.inf).index_copy(0, kept, groups[kept]).flatten()
        index = allowed.argsort(descending=True)[:top_k]
        indices.append(index)
        weights.append(scores[index] / scores[index].sum())
    return torch.stack(weights), torch.stack(indices)


def _torch_sort(index: Tensor, *, experts: int) -> tuple[Tensor, Tensor]:
    ids, order = torch.sort(index.reshape(-1))
    counts = torch.histc(ids.float(), bins=experts, min=0, max=experts - 1)
    return order, torch.cumsum(counts, dim=0, dtype=torch.int32)


def _copies(tensor: Tensor) -> list[Tensor]:
    count = min(-(-4 * last_cache() // tensor.nbytes), _MOST_COPIES)
    return [tensor, *(tensor.clone() for _ in range(count - 1))]


def _counted(tokens: int) -> str:
    return f"{tokens:,} token{'s' if tokens > 1 else ''}"
