"""Right kernels as other hands would write them: other orders of summation, other ways to the same function."""

import math
from typing import Any

import torch
from torch import Tensor

from honest import Function, activate, ends_of, stored


def wide_of(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _experts_of_rows(rows: int, offsets: Tensor) -> Tensor:
    """`[rows]`: the expert of each row, the number of experts for rows of nobody."""
    return torch.searchsorted(offsets.long(), torch.arange(rows, device=offsets.device), right=True)


def padded_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Each expert's rows padded with zeros to tiles of 16, and K to tiles of 8, as tensor cores want them."""
    wide = wide_of(x)
    out = torch.zeros(x.shape[0], weight.shape[2], dtype=x.dtype, device=x.device)
    inner = -(-x.shape[1] // 8) * 8
    for expert, start, end in ends_of(offsets):
        tile = torch.zeros(-(-(end - start) // 16) * 16, inner, dtype=wide, device=x.device)
        tile[: end - start, : x.shape[1]] = x[start:end]
        matrix = torch.zeros(inner, weight.shape[2], dtype=wide, device=x.device)
        matrix[: x.shape[1]] = weight[expert]
        out[start:end] = (tile @ matrix)[: end - start].to(x.dtype)
    return out


def split_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Three float32 accumulators over K, every third column each, added in the end."""
    wide = wide_of(x)
    out = torch.zeros(x.shape[0], weight.shape[2], dtype=x.dtype, device=x.device)
    for expert, start, end in ends_of(offsets):
        rows, matrix = x[start:end].to(wide), weight[expert].to(wide)
        parts = [rows[:, part::3] @ matrix[part::3] for part in range(3)]
        out[start:end] = (parts[2] + (parts[1] + parts[0])).to(x.dtype)
    return out


def dense_grouped_mm(call: Any) -> Tensor:
    """All rows by all experts in one einsum, of which each row keeps its own; autograd differentiates it."""
    x, weight = call.x, call.weight
    wide = wide_of(x)
    expert = _experts_of_rows(x.shape[0], call.offsets)
    own = (expert == torch.arange(weight.shape[0], device=x.device).unsqueeze(1)).unsqueeze(2)
    rows = torch.where(own, x.to(wide), 0)
    every = torch.einsum("erk,ekn->ern", rows, weight.to(wide))
    return torch.where(own, every, 0).sum(0).to(x.dtype)


def scattered_wgrad(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """Outer products of rows, added up row after row in float32."""
    wide = wide_of(x)
    expert = _experts_of_rows(x.shape[0], offsets)
    mine = expert < offsets.shape[0]
    outer = x[mine].to(wide).unsqueeze(2) * grad[mine].to(wide).unsqueeze(1)
    out = torch.zeros(offsets.shape[0], x.shape[1], grad.shape[1], dtype=wide, device=x.device)
    return out.index_add_(0, expert[mine], outer).to(x.dtype)


def wgrad() -> tuple[Function, Function]:
    """A kernel of `moe.grouped_mm_wgrad` that scatters."""

    def forward(call: Any) -> Tensor:
        return scattered_wgrad(call.x, call.grad, call.offsets)

    def backward(call: Any, saved: tuple[Tensor, ...], pull: Tensor) -> dict[str, Tensor]:
        made = {}
        if "x" in call.needs:
            made["x"] = split_product(call.grad, pull.mT, call.offsets)
        if "grad" in call.needs:
            made["grad"] = padded_product(call.x, pull, call.offsets)
        return made

    return forward, backward


def _choose(call: Any, scores: Tensor) -> Tensor:
    """The chosen experts, by sorting everything."""
    judged = scores if call.correction_bias is None else scores + call.correction_bias
    if call.num_groups > call.top_groups:
        grouped = judged.unflatten(1, (call.num_groups, -1))
        count = 1 if call.correction_bias is None else min(2, grouped.shape[2])
        best = grouped.sort(2, descending=True).values[..., :count].sum(2)
        keep = best.argsort(1, descending=True).argsort(1) < call.top_groups
        judged = grouped.masked_fill(~keep.unsqueeze(2), -math.inf).flatten(1)
    return judged.argsort(1, descending=True)[:, : call.top_k].contiguous()


def _softmax(logits: Tensor) -> Tensor:
    """In two passes, by powers of two."""
    scaled = logits * math.log2(math.e)
    powers = torch.exp2(scaled - scaled.amax(1, keepdim=True)) if logits.numel() else logits
    return powers / powers.sum(1, keepdim=True)


def gating(call: Any) -> tuple[Tensor, Tensor]:
    """A kernel of `moe.top_k_gating` with a softmax by hand."""
    logits = call.logits.to(wide_of(call.logits))
    scores = {"softmax": _softmax, "sigmoid": lambda x: 1 / (1 + torch.exp(-x)), "softmax_after": lambda x: x}[
        call.score
    ](logits)
    index = _choose(call, scores)
    weights = scores.gather(1, index)
    if call.score == "softmax_after":
        weights = _softmax(weights)
    if call.renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return weights * call.scale, index


def gating_backward(call: Any, saved: tuple[Tensor, Tensor], grad: Tensor | None, _: None) -> dict[str, Tensor]:
    """Its gradient, the textbook's: `(g - sum(g * p)) * p` in float32."""
    index = saved[1]
    logits = call.logits.to(wide_of(call.logits))
    every = _softmax(logits) if call.score == "softmax" else torch.sigmoid(logits)
    scores = _softmax(logits.gather(1, index)) if call.score == "softmax_after" else every.gather(1, index)
    pull = torch.zeros_like(scores) if grad is None else grad * call.scale
    if call.renormalize:
        total = scores.sum(1, keepdim=True) + 1e-20
        pull = (pull - (pull * scores / total).sum(1, keepdim=True)) / total
    if call.score == "softmax_after":
        pull = (pull - (pull * scores).sum(1, keepdim=True)) * scores
    wanted = torch.zeros_like(logits).scatter(1, index, pull)
    if call.score == "softmax":
        wanted = (wanted - (wanted * every).sum(1, keepdim=True)) * every
    elif call.score == "sigmoid":
        wanted = wanted * every * (1 - every)
    return {"logits": wanted.to(call.logits.dtype)}


def logsumexp_gating(call: Any) -> tuple[Tensor, Tensor]:
    """Probabilities from logarithms, which autograd differentiates."""
    logits = call.logits.to(wide_of(call.logits))
    if call.score == "softmax":
        scores = (logits - logits.logsumexp(1, keepdim=True)).exp()
    else:
        scores = logits.sigmoid() if call.score == "sigmoid" else logits
    index = _choose(call, scores.detach())
    weights = scores.gather(1, index)
    if call.score == "softmax_after":
        weights = (weights - weights.logsumexp(1, keepdim=True)).exp()
    if call.renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return weights * call.scale, index


def sorted_experts(call: Any) -> Tensor:
    """A kernel of `moe.experts` that sorts the pairs, rounds as the contract does and adds up rows."""
    x, index = call.x, call.top_k_index
    wide = wide_of(x)
    up = stored(call.gate_up_proj, call.gate_up_scale, call.transposed, wide).to(x.dtype)
    down = stored(call.down_proj, call.down_scale, call.transposed, wide).to(x.dtype)
    experts = up.shape[0]
    flat = torch.where((index < 0) | (index >= experts), experts, index).flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts + 1)[:experts].tolist()
    tokens = x.to(wide)  # once: what comes back to a token is summed there
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    start = 0
    for expert, count in enumerate(counts):
        pairs = order[start : start + count]
        start += count
        token = pairs // index.shape[1]
        h = tokens[token].to(x.dtype) @ up[expert]
        if call.gate_up_proj_bias is not None:
            h = h + call.gate_up_proj_bias[expert]
        a = activate(h, call.activation, call.interleaved, call.alpha, call.beta, call.limit)
        y = a @ down[expert]
        if call.down_proj_bias is not None:
            y = y + call.down_proj_bias[expert]
        weights = call.top_k_weights.flatten()[pairs].to(wide).unsqueeze(1)
        out = out.index_add(0, token, y.to(wide) * weights)
    return out.to(x.dtype)


def _scale_of_matrices(call: Any) -> Tensor:
    """`[experts, K, N]`, or what broadcasts to it."""
    scale, (_, inner, columns) = call.scale, call.weight.shape
    if scale.dim() == 2:
        return scale.unsqueeze(1)
    if scale.shape[1:] in ((inner, 1), (1, columns)):
        return scale
    return scale.repeat_interleave(128, 1)[:, :inner].repeat_interleave(128, 2)[:, :, :columns]


def _dequantised(call: Any, wide: torch.dtype) -> Tensor:
    return call.weight.to(wide) * _scale_of_matrices(call).to(wide)


def scaled_product(call: Any) -> Tensor:
    """A kernel of `moe.scaled_grouped_mm` that makes all matrices first."""
    wide = torch.float64 if torch.float64 in (call.x.dtype, call.out_dtype) else torch.float32
    rows = call.x.to(wide)
    if call.x_scale is not None:
        times = 1 if call.x_scale.shape[1] == 1 else 128
        rows = rows * call.x_scale.repeat_interleave(times, 1)[:, : rows.shape[1]].to(wide)
    out = split_product(rows, _dequantised(call, wide), call.offsets)
    return out.to(call.out_dtype or (call.x.dtype if call.x_scale is None else torch.bfloat16))


def scaled_product_backward(call: Any, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """Its gradient for `x`."""
    wide = wide_of(grad)
    return {"x": padded_product(grad.to(wide), _dequantised(call, wide).mT, call.offsets).to(call.x.dtype)}
