"""Toy ops of the kinds that are coming, with kernels: caches, several results, randomness, saved tensors.

The kernels compute what their references do, by other means, and count their calls.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kpt_core import Call, Kernel, Refusal, op

#: How often each kernel ran, by its attribute.
RAN: Counter[str] = Counter()


@op("toy.append", mutates=("keys", "values"))
def append(keys: Tensor, values: Tensor, new: Tensor, position: int) -> Tensor:
    """Write rows into two caches at a position; gives what the caches hold together."""
    end = position + new.shape[0]
    keys[position:end] = new
    values[position:end] = 2 * new
    return keys + values


def append_kernel(call: Call) -> Tensor:
    RAN["append_kernel"] += 1
    call.keys.narrow(0, call.position, call.new.shape[0]).copy_(call.new)
    call.values.narrow(0, call.position, call.new.shape[0]).copy_(call.new).mul_(2)
    return torch.add(call.keys, call.values)


@op("toy.clear", mutates=("cache",))
def clear(cache: Tensor, keep: Tensor | None = None) -> None:
    """Empty a cache but for some rows; gives nothing."""
    cache.copy_(torch.zeros_like(cache) if keep is None else cache * keep[:, None])


def clear_kernel(call: Call) -> None:
    RAN["clear_kernel"] += 1
    if call.keep is None:
        call.cache.zero_()
    else:
        call.cache.mul_(call.keep[:, None])


@op("toy.best", saves="results")
def best(x: Tensor, count: int = 2) -> tuple[Tensor, Tensor]:
    """The greatest numbers of each row, and where they are."""
    found = x.topk(count)
    return found.values, found.indices


def best_kernel(call: Call) -> tuple[Tensor, Tensor]:
    RAN["best_kernel"] += 1
    values, indices = call.x.sort(descending=True, stable=True)
    return values[:, : call.count].contiguous(), indices[:, : call.count].contiguous()


def best_backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor | None, nothing: None) -> dict[str, Tensor]:
    RAN["best_backward"] += 1
    _, indices = saved
    assert grad is not None
    assert nothing is None  # integers have no gradient
    return {"x": torch.zeros_like(call.x).scatter(1, indices, grad)}


def random_bits(like: Tensor, seed: int, offset: int) -> Tensor:
    """31 bits for each element, of what is asked for alone: on any device, in any order, the same."""
    place = torch.arange(like.numel(), device=like.device).view(like.shape) + offset
    mixed = (place * 2654435761 + seed * 40503) & 0x7FFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0x7FFFFFFF
    return mixed ^ (mixed >> 13)


@op("toy.dropout", random=True)
def dropout(x: Tensor, seed: int, offset: int, *, p: float = 0.5) -> Tensor:
    """Leave out elements that are drawn, and scale the others."""
    return torch.where(random_bits(x, seed, offset) >= p * 2**31, x / (1 - p), 0.0)


def dropout_kernel(call: Call) -> Tensor:
    RAN["dropout_kernel"] += 1
    return (call.x / (1 - call.p)).masked_fill(~_kept(call), 0.0)


def dropout_backward(call: Call, saved: tuple[()], grad: Tensor) -> dict[str, Tensor]:
    RAN["dropout_backward"] += 1
    return {"x": (grad / (1 - call.p)).masked_fill(~_kept(call), 0.0)}


def _kept(call: Call) -> Tensor:
    return random_bits(call.x, call.seed, call.offset) >= call.p * 2**31


def _saves(call: Call) -> tuple[Tensor, Tensor]:
    product = call.x @ call.weight
    return product, (product > 0).sum(1, dtype=torch.int32)


def _fake_saves(call: Call) -> tuple[Tensor, Tensor]:
    rows = call.x.shape[0]
    return call.x.new_empty(rows, call.weight.shape[1]), call.x.new_empty(rows, dtype=torch.int32)


def _flops(call: Call) -> int:
    return 2 * call.x.shape[0] * call.weight.shape[0] * call.weight.shape[1]


def _fake(call: Call) -> Tensor:
    return call.x.new_empty(call.x.shape[0], call.weight.shape[1])


@op("toy.layer", saves=_saves, fake_saves=_fake_saves, unread=("bias",), flops=_flops, fake=_fake)
def layer(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer with a squared ReLU; saves the product, and how much of each row is positive."""
    result = (x @ weight).relu().square()
    return result if bias is None else result + bias


def layer_kernel(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """For at most 64 rows."""
    RAN["layer_kernel"] += 1
    return _layer(call)


def layer_kernel_for_many(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    RAN["layer_kernel_for_many"] += 1
    return _layer(call)


def _layer(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    product, positive = _saves(call)
    result = product.clamp(min=0) ** 2
    return result if call.bias is None else result + call.bias, (product, positive) if call.needs else ()


def at_most_64_rows(call: Call) -> Refusal | None:
    rows = call.x.shape[0]
    return Refusal("{rows} rows; this kernel is for {most} at most", rows=rows, most=64) if rows > 64 else None


def layer_backward(call: Call, saved: Sequence[Tensor], grad: Tensor) -> dict[str, Tensor]:
    RAN["layer_backward"] += 1
    product, _ = saved
    through = grad * 2 * product.clamp(min=0)
    found = {}
    if "x" in call.needs:
        found["x"] = through @ call.weight.T
    if "weight" in call.needs:
        found["weight"] = call.x.T @ through
    if "bias" in call.needs:
        found["bias"] = grad.sum(0)
    return found


def _fake_attend(call: Call) -> tuple[Tensor, Tensor | None]:
    return torch.empty_like(call.q), call.q.new_empty(call.q.shape[0]) if call.lse else None


def _scores(q: Tensor, k: Tensor, cache: Tensor | None, position: int) -> tuple[Tensor, Tensor]:
    keys = k if cache is None else torch.cat((cache[:position], k))
    return q @ keys.T, keys


def _saves_attend(call: Call) -> tuple[Tensor]:
    return (_scores(call.q, call.k, call.cache, call.position)[0].softmax(1),)


@op(
    "toy.attend",
    mutates=("cache",),
    random=True,
    optional_results={1: "lse"},
    saves=_saves_attend,
    fake=_fake_attend,
)
def attend(
    q: Tensor,
    k: Tensor,
    cache: Tensor | None,
    position: int,
    seed: int,
    offset: int,
    *,
    p: float = 0.0,
    lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Write keys into a cache, and attend to what it holds so far (to the keys alone without a cache).

    Args:
        q: `[rows, size]`.
        k: `[rows, size]`, which are the values too.
        cache: `[length, size]`, or None.
        position: of the first key in the cache.
        seed: of dropout.
        offset: likewise.
        p: likewise.
        lse: give the log-sum-exp of each row's scores as well.
    """
    scores, keys = _scores(q, k, cache, position)
    if cache is not None:
        cache[position : position + k.shape[0]] = k
    weights = scores.softmax(1)
    kept = random_bits(weights, seed, offset) >= p * 2**31
    return torch.where(kept, weights / (1 - p), 0.0) @ keys, scores.logsumexp(1) if lse else None


def _kept_of(call: Call, weights: Tensor) -> Tensor:
    return random_bits(weights, call.seed, call.offset) >= call.p * 2**31


def attend_kernel(call: Call) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, ...]]:
    RAN["attend_kernel"] += 1
    scores, keys = _scores(call.q, call.k, call.cache, call.position)
    weights = scores.exp() / scores.exp().sum(1, keepdim=True)
    if call.cache is not None:  # as native code does: torch does not see it
        call.cache.numpy(force=True)[call.position : call.position + len(call.k)] = call.k.numpy(force=True)
    out = (weights / (1 - call.p)).masked_fill(~_kept_of(call, weights), 0.0) @ keys
    return (out, scores.exp().sum(1).log() if call.lse else None), (weights,) if call.needs else ()


def attend_backward(call: Call, saved: Sequence[Tensor], grad: Tensor | None, of_lse: Tensor | None) -> dict[str, Any]:
    RAN["attend_backward"] += 1
    (weights,) = saved
    _, keys = _scores(call.q, call.k, call.cache, call.position)
    through, grad_keys = torch.zeros_like(weights), torch.zeros_like(keys)
    if grad is not None:
        dropped = (weights / (1 - call.p)).masked_fill(~_kept_of(call, weights), 0.0)
        grad_keys = dropped.T @ grad
        inner = ((grad @ keys.T) / (1 - call.p)).masked_fill(~_kept_of(call, weights), 0.0)
        through = weights * (inner - (inner * weights).sum(1, keepdim=True))
    if of_lse is not None:
        through = through + weights * of_lse[:, None]
    grad_keys = grad_keys + through.T @ call.q
    return {"q": through @ keys, "k": grad_keys[-len(call.k) :] if len(call.k) else grad_keys[:0]}


def offer(attribute: str, op: str, backward: str | None = None, **settings: Any) -> Kernel:
    """A kernel of this module by its attribute."""
    for name in ("unsupported",):
        if name in settings:
            settings[name] = f"toy_ops:{settings[name]}"
    return Kernel(op, f"toy_ops:{attribute}", backward=backward and f"toy_ops:{backward}", **settings)


KERNELS = (
    offer("append_kernel", "toy.append"),
    offer("clear_kernel", "toy.clear"),
    offer("best_kernel", "toy.best", "best_backward"),
    offer("attend_kernel", "toy.attend", "attend_backward"),
    offer("dropout_kernel", "toy.dropout", "dropout_backward"),
    offer("layer_kernel", "toy.layer", "layer_backward", priority=1, unsupported="at_most_64_rows"),
    offer("layer_kernel_for_many", "toy.layer", "layer_backward"),
)
