"""The benchmark of attention: KPT beside torch's SDPA, and FlexAttention if asked for."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kpt_attention import causal, sliding_window
from kpt_attention.dense import dense
from kpt_optimize.cases import Case, case_tables

from .contest import OURS, Contest, require_accuracy

SDPA, FLEX = "SDPA", "FlexAttention"
TABLE = "attention.dense"
PREFILL, DECODE = "llama-3.2-1b, 512 tokens", "llama-3.2-1b, decode"  #: of the op's cases
WINDOW = 256
#: Attends to queries, keys and values.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def contests(
    dtypes: Sequence[torch.dtype], seed: int, *, quick: bool, training: bool, flex: bool = False
) -> Iterator[Contest]:
    """Yield the lines: causal prefill, a window, and decode of grouped heads, which has no training step."""
    cases = {case.name: case for case in case_tables()[TABLE].cases}
    tokens = 512 if quick else 2048
    prefill = _resized(cases[PREFILL], tokens)
    lines = [(f"causal, {tokens} tokens", prefill, None), (f"window of {WINDOW}, {tokens} tokens", prefill, WINDOW)]
    if not training:
        keys = cases[DECODE].sizes["keys"]
        lines.append((f"decode, {keys} keys", cases[DECODE], None))
    for title, case, window in lines:
        for dtype in dtypes:
            yield _contest(title, case, dtype, window, seed, training=training, flex=flex)


def _resized(case: Case, tokens: int) -> Case:
    return replace(case, sizes={**case.sizes, "queries": tokens, "keys": tokens})


def _contest(
    title: str, case: Case, dtype: torch.dtype, window: int | None, seed: int, *, training: bool, flex: bool
) -> Contest:
    q, k, v, pull = _tensors(case, dtype, seed)
    given = [tensor.requires_grad_(training) for tensor in (q, k, v)]
    sides = {OURS: _kpt(q, k, window), SDPA: _sdpa(q, k, window)}
    if flex:
        sides[FLEX] = _flex(q, k, window)
    runs = {name: partial(_attend, side, given, pull if training else None) for name, side in sides.items()}
    # The gate looks at fewer queries and keys, whose scores in float64 are soon there.
    small = _resized(case, min(q.shape[2], 300)) if q.shape[2] > 1 else case
    where = f"attention, {title} in {dtype}"
    return Contest(title, dtype, runs, partial(_check, where, small, dtype, window, seed, training=training))


def _tensors(case: Case, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Return queries, keys and values of a case, and a gradient of the output."""
    arguments = case_tables()[TABLE].arguments(case, dtype=dtype, seed=seed)
    q = arguments["q"]
    pull = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    return [q, arguments["k"], arguments["v"], pull]


def _mask(window: int | None) -> Any:
    return causal() if window is None else sliding_window(window)


def _kpt(q: Tensor, k: Tensor, window: int | None) -> Attention:
    queries, keys = q.shape[2], k.shape[2]
    plan = _mask(window).plan(queries, keys, offset=keys - queries).arguments(queries, keys)
    return lambda q, k, v: dense(q, k, v, return_lse=False, **plan)[0]


def _sdpa(q: Tensor, k: Tensor, window: int | None) -> Attention:
    queries, keys = q.shape[2], k.shape[2]
    # One query sees all keys; SDPA has a dense mask for a window, and reads groups of heads as they are.
    how: dict[str, Any] = {"is_causal": queries > 1}
    if window is not None:
        how = {"attn_mask": _mask(window).dense(queries, keys)}
    return partial(scaled_dot_product_attention, enable_gqa=q.shape[1] != k.shape[1], **how)


def _flex(q: Tensor, k: Tensor, window: int | None) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    queries, keys = q.shape[2], k.shape[2]
    past = keys - queries

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query + past >= key) & (query + past - key < (window or keys))

    blocks = create_block_mask(seen, None, None, queries, keys, device="cpu")
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])


def _attend(attention: Attention, given: Sequence[Tensor], pull: Tensor | None) -> list[Tensor]:
    """Return the output, and the gradients where there is one to pull back."""
    if pull is None:
        with torch.inference_mode():
            return [attention(*given)]
    out = attention(*given)
    return [out.detach(), *torch.autograd.grad(out, given, pull)]


def _check(where: str, case: Case, dtype: torch.dtype, window: int | None, seed: int, *, training: bool) -> None:
    """Raise `GateError` unless KPT is about as near to float64 as SDPA is, output and gradients."""
    *tensors, pull = _tensors(case, dtype, seed)
    sides = []
    for make, wide in ((_kpt, dtype), (_sdpa, dtype), (_sdpa, torch.float64)):
        given = [tensor.detach().to(wide).requires_grad_(training) for tensor in tensors]
        attention = make(given[0], given[1], window)
        sides.append(_attend(attention, given, pull.to(wide) if training else None))
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    for name, values in zip(names, zip(*sides, strict=True), strict=False):
        require_accuracy(f"{where}: KPT's error of {name}", SDPA, values, 1.5, 3, torch.finfo(torch.float32).eps)
