"""Layers: `Attention` with rotary embedding, windows and caches, `FlashAttention3`, `FlexAttention` by pattern."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_exporting as exporting

from kpt_core import InputError

from . import masks
from .dense import dense, wide_dtype
from .kv_cache import Step
from .mask_algebra import Mask
from .plan import Plan, allowed_keys

#: Patterns of `FlexAttention` by name, and what makes their masks of settings.
PATTERNS: dict[str, Callable[..., Mask]] = {
    "full": masks.everything,
    "causal": masks.causal,
    "sliding_window": masks.sliding_window,
    "prefix_lm": masks.prefix_lm,
    "document": lambda *args, **settings: masks.causal() & masks.document(*args, **settings),
    "dilated": masks.dilated,
    "global_tokens": lambda size, count: masks.window(size, size) | masks.global_tokens(count),
    "block_sparse": masks.block_sparse,
    "natten": masks.natten,
    "tree": masks.tree,
}


class Attention(nn.Module):
    """Self-attention over `[batch, tokens, embed_dim]`, by op `attention.dense`, or over a paged cache.

    Args:
        embed_dim: of the tokens.
        num_heads: of queries.
        num_kv_heads: of keys and values, which divides `num_heads`; as many if None.
        head_dim: of each head, `embed_dim // num_heads` if None.
        causal: whether a token sees none after it.
        window: a token sees the last `window`, itself included, 0 for all; of causal attention.
        dropout: rate at which probabilities are dropped in training.
        bias: whether the projections have one.
        rotary_base: base of the rotary embedding of queries and keys (arXiv:2104.09864, by halves as Llama's), 10000.0
            for instance; none if None.
        softcap: cap of the scores, 0 for none.
        sinks: whether each head learns a sink.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        InputError: sizes do not fit one another.

    Examples:
        >>> import torch
        >>> layer = Attention(64, 8, num_kv_heads=2, causal=True, rotary_base=10000.0)
        >>> layer(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        window: int = 0,
        dropout: float = 0.0,
        bias: bool = True,
        rotary_base: float | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name, num_kv_heads = type(self).__name__, num_heads if num_kv_heads is None else num_kv_heads
        counts = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "window": window}
        for setting, count in counts.items() if head_dim is None else (*counts.items(), ("head_dim", head_dim)):
            if type(count) is not int or count < (setting != "window"):
                raise InputError(
                    f"{name}: {setting} must be an int of at least {int(setting != 'window')}; got {count!r}"
                )
        if head_dim is None and embed_dim % num_heads:
            raise InputError(f"{name}: num_heads ({num_heads}) must divide embed_dim ({embed_dim}); or give head_dim")
        head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if num_heads % num_kv_heads:
            raise InputError(f"{name}: num_kv_heads ({num_kv_heads}) must divide num_heads ({num_heads})")
        if rotary_base is not None and head_dim % 2:
            raise InputError(f"{name}: a rotary embedding turns pairs; got head_dim {head_dim}")
        if rotary_base is not None and not 0 < rotary_base < math.inf:
            raise InputError(f"{name}: rotary_base must be positive and finite, or None for none; got {rotary_base}")
        if not 0 <= softcap < math.inf:
            raise InputError(f"{name}: softcap must be positive, or 0 for none; got {softcap}")
        if not 0 <= dropout < 1:
            raise InputError(f"{name}: dropout must be in [0, 1); got {dropout}")
        if window and not causal:
            raise InputError(f"{name}: window is of causal attention; got {window} with causal={causal}")
        self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim = embed_dim, num_heads, num_kv_heads, head_dim
        self.causal, self.window, self.dropout, self.softcap = causal, window, dropout, softcap
        self.rotary_base = rotary_base
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, **made)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, **made)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, **made)
        self.out_proj = nn.Linear(num_heads * head_dim, embed_dim, **made)
        self.sinks = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype)) if sinks else None

    def extra_repr(self) -> str:
        """Return the settings that are not those of the projections."""
        settings = ("num_heads", "num_kv_heads", "causal", "window", "dropout", "rotary_base", "softcap")
        return ", ".join(f"{name}={getattr(self, name)}" for name in settings)

    def forward(
        self,
        x: Tensor,
        mask: Mask | Plan | Tensor | None = None,
        *,
        positions: Tensor | None = None,
        need_weights: bool = False,
        step: Step | None = None,
        layer: int = 0,
    ) -> Any:  # a tensor or two: callers would have to tell a type checker which
        """Attend.

        Args:
            x: `[batch, tokens, embed_dim]`; with a step `[new tokens, embed_dim]`, of all its sequences.
            mask: beside what the layer's settings say: a `Mask`; a `Plan`, in place of them; a bool tensor `[batch,
                tokens]` that is False for padding, or one that broadcasts to `[batch, heads, tokens, tokens]`. One of
                two dimensions is refused where there are as many sequences as tokens, since it could be either.
            positions: `[tokens]` or `[batch, tokens]` for the rotary embedding; counted from 0 if None.
            need_weights: whether to return the probabilities, too. They are computed beside, in memory of all of them.
            step: of a `PagedCache`, whose window must be the layer's: new tokens are written, and all are attended to.
            layer: of the cache.

        Returns:
            As `x`; with `need_weights` the probabilities `[batch, heads, tokens, tokens]` beside it, without dropout.

        Raises:
            InputError: a shape or the mask does not fit.
        """
        name = type(self).__name__
        if x.dim() != (3 if step is None else 2) or x.shape[-1] != self.embed_dim:
            expected = f"[batch, tokens, {self.embed_dim}]" if step is None else f"[new tokens, {self.embed_dim}]"
            raise InputError(f"{name}: x must be {expected}; got {list(x.shape)}")
        projections = (self.q_proj, self.num_heads), (self.k_proj, self.num_kv_heads), (self.v_proj, self.num_kv_heads)
        q, k, v = (projection(x).unflatten(-1, (heads, self.head_dim)) for projection, heads in projections)
        if positions is not None:
            self._check_positions(positions, x)
        if self.rotary_base is not None:
            if positions is None:
                positions = torch.arange(x.shape[1], device=x.device) if step is None else step.positions
            q, k = (_rotated(each, positions, self.rotary_base) for each in (q, k))
        if step is not None:
            if mask is not None or need_weights or step.cache.window != self.window or not self.causal:
                raise InputError(
                    f"{name}: a cache serves causal attention without a mask or weights, in the cache's window of "
                    f"{step.cache.window}; got causal={self.causal} and window={self.window}"
                )
            step.update(layer, k, v)
            out = step.attend(layer, q, softcap=self.softcap, sinks=self.sinks)
            return self.out_proj(out.flatten(-2))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        plan = self._plan(mask, x)
        dropout = self.dropout if self.training else 0.0
        # As a tensor: a number would break a compiled graph, and make an accelerator's host wait.
        drawn_seed = torch.randint(1 << 62, (), device=x.device) if dropout else None
        out, lse = dense(
            q, k, v, **plan.arguments(q.shape[2], k.shape[2], *q.shape[:2]), sinks=self.sinks,
            return_lse=need_weights, softcap=self.softcap,
            dropout=dropout, drawn_seed=drawn_seed,
        )  # fmt: skip
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return (out, self._weights(q, k, plan, lse)) if need_weights else out

    def own_mask(self) -> Mask | None:
        """Return the mask of the layer's settings; None for none."""
        if not self.causal:
            return None
        return masks.causal() & masks.sliding_window(self.window) if self.window else masks.causal()

    def _check_positions(self, positions: object, x: Tensor) -> None:
        who, shape = type(self).__name__, list(x.shape[:-1])
        if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.device != x.device:
            raise InputError(
                f"{who}: positions must be a tensor of integers on {x.device}; got "
                + (
                    f"{positions.dtype} on {positions.device}"
                    if isinstance(positions, Tensor)
                    else f"{positions!r:.80}"
                )
            )
        given = positions.shape
        if not 1 <= len(given) <= len(shape) or given[-1] != shape[-1] or given[0] not in (1, shape[-len(given)]):
            raise InputError(f"{who}: positions must be {shape[-1:]}, or {shape} as x; got {list(given)}")

    def _plan(self, mask: Mask | Plan | Tensor | None, x: Tensor) -> Plan:
        if isinstance(mask, Plan):
            return mask.fitted(x.shape[1], x.shape[1])
        who = type(self).__name__
        if isinstance(mask, Tensor):
            if mask.dtype is not torch.bool or not 1 < mask.dim() < 5:
                raise InputError(
                    f"{who}: a tensor as mask must be bool, [batch, tokens] or to broadcast to [batch, heads, tokens, "
                    f"tokens]; got {mask.dtype} {list(mask.shape)}: pass mask.bool(), of an additive one mask == 0"
                )
            # An exported program is for all sizes: there two dimensions are padding.
            if mask.dim() == 2 and not exporting() and mask.shape[0] == mask.shape[1] == x.shape[0] == x.shape[1] > 1:
                raise InputError(
                    f"{who}: a mask of {list(mask.shape)} for {x.shape[0]} sequences of as many tokens may be padding "
                    "or say which keys a query sees: pass kpt_attention.padding(mask), or mask[None, None]"
                )
            while mask.dim() == 3 or (mask.dim() == 2 and mask.shape != x.shape[:2]):
                mask = mask.unsqueeze(0)
            mask = masks.padding(mask) if mask.dim() == 2 else masks.dense_mask(mask)
        elif mask is not None and not isinstance(mask, Mask):
            raise InputError(
                f"{who}: mask must be a Mask, a Plan or a bool tensor; got {type(mask).__name__} {mask!r:.80}: "
                "torch.as_tensor(...) makes a tensor, and kpt_attention.predicate(f) a mask of a function"
            )
        own = self.own_mask()
        mask = own if mask is None else mask if own is None else own & mask
        if mask is None:
            return Plan()
        tokens = x.shape[1]
        return mask.plan(tokens, tokens, batch=x.shape[0], heads=self.num_heads, device=x.device)

    def _weights(self, q: Tensor, k: Tensor, plan: Plan, lse: Tensor | None) -> Tensor:
        """Return the probabilities, of the scores and their log-sum-exp."""
        assert lse is not None
        wide, tokens = wide_dtype(q.dtype), range(q.shape[2])
        scores = (q.to(wide) / math.sqrt(self.head_dim)) @ k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        scores = self.softcap * (scores / self.softcap).tanh() if self.softcap else scores
        allowed = allowed_keys(plan, tokens, tokens, q.device)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -math.inf)
        return (scores - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)).exp().to(q.dtype)


def _rotated(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Turn pairs of `[..., tokens, heads, dim]`, number `i` with number `i + dim / 2`, by their tokens' positions."""
    half = x.shape[-1] // 2
    rates = base ** -(torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = (positions.double()[..., None, None] * rates).to(wide_dtype(x.dtype))
    first, second = x.to(angles.dtype).split(half, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class FlashAttention3(Attention):
    """Self-attention in the way of flash attention: in tiles, without a matrix of all scores, on any device.

    The name is that of KPT's earlier layer. Which kernel runs is what `kpt_core.explain` says of `attention.dense`: a
    backend's, or one in plain PyTorch where there is none.

    Args:
        embed_dim: of the tokens.
        num_heads: which divides it.
        causal: whether a token sees none after it.
        dropout: rate at which probabilities are dropped in training.
        **settings: as `Attention` takes them.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, causal: bool = False, dropout: float = 0.0, **settings: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, causal=causal, dropout=dropout, **settings)


class FlexAttention(Attention):
    """Self-attention under a pattern: a name of `PATTERNS`, a `Mask`, or a function of (b, h, q, k).

    Args:
        embed_dim: of the tokens.
        num_heads: which divides it.
        pattern: full, causal, sliding_window (size), prefix_lm (length), document (ids or cu_seqlens), dilated (size,
            step), global_tokens (size, count), block_sparse (layout, block), natten (height, width, kernel), tree
            (parents); or a mask, or a `mask_mod`.
        settings: of the pattern, by the names in brackets.
        **others: as `Attention` takes them.

    Raises:
        InputError: there is no such pattern, or its settings do not fit.

    Examples:
        >>> import torch
        >>> layer = FlexAttention(32, 4, "sliding_window", {"size": 8})
        >>> layer(torch.randn(1, 20, 32)).shape
        torch.Size([1, 20, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: str | Mask | Callable[..., Tensor] = "causal",
        settings: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **others)
        if isinstance(pattern, str):
            if pattern not in PATTERNS:
                raise InputError(f"FlexAttention: pattern must be one of {', '.join(PATTERNS)}; got {pattern!r}")
            try:
                self.pattern: Mask = PATTERNS[pattern](**(settings or {}))
            except TypeError as error:
                raise InputError(f"FlexAttention: settings of {pattern!r} do not fit: {error}") from None
        else:
            self.pattern = pattern if isinstance(pattern, Mask) else masks.predicate(pattern)

    def own_mask(self) -> Mask | None:
        """Return the pattern, within what else the settings say."""
        own = super().own_mask()
        return self.pattern if own is None else own & self.pattern
