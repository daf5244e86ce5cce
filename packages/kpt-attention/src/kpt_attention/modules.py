"""Layers: `Attention` with rotary embedding, windows and caches, `CrossAttention`, `FlexAttention` by pattern."""

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


class _Projected(nn.Module):
    """What layers share: projections of queries, keys and values, a mask in each call, and the op."""

    _told: tuple[str, ...] = ("num_heads", "num_kv_heads", "dropout", "softcap")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_dim: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        softcap: float = 0.0,
        sinks: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name, num_kv_heads = type(self).__name__, num_heads if num_kv_heads is None else num_kv_heads
        kv_dim = embed_dim if kv_dim is None else kv_dim
        counts = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "kv_dim": kv_dim}
        for setting, count in counts.items() if head_dim is None else (*counts.items(), ("head_dim", head_dim)):
            if type(count) is not int or count < 1:
                raise InputError(f"{name}: {setting} must be an int of at least 1; got {count!r}")
        if head_dim is None and embed_dim % num_heads:
            raise InputError(f"{name}: num_heads ({num_heads}) must divide embed_dim ({embed_dim}); or give head_dim")
        head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if num_heads % num_kv_heads:
            raise InputError(f"{name}: num_kv_heads ({num_kv_heads}) must divide num_heads ({num_heads})")
        if not 0 <= softcap < math.inf:
            raise InputError(f"{name}: softcap must be positive, or 0 for none; got {softcap}")
        if not 0 <= dropout < 1:
            raise InputError(f"{name}: dropout must be in [0, 1); got {dropout}")
        self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim = embed_dim, num_heads, num_kv_heads, head_dim
        self.dropout, self.softcap = dropout, softcap
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, **made)
        self.k_proj = nn.Linear(kv_dim, num_kv_heads * head_dim, **made)
        self.v_proj = nn.Linear(kv_dim, num_kv_heads * head_dim, **made)
        self.out_proj = nn.Linear(num_heads * head_dim, embed_dim, **made)
        self.sinks = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype)) if sinks else None

    def own_mask(self) -> Mask | None:
        """Return the mask of the layer's settings; None for none."""
        return None

    def extra_repr(self) -> str:
        """Return the settings that are not those of the projections."""
        return ", ".join(f"{name}={getattr(self, name)}" for name in self._told)

    def _heads(self, projection: nn.Linear, x: Tensor) -> Tensor:
        """Return `[..., heads, head_dim]`: heads by number, since no size can be found where there are no tokens."""
        found: Tensor = projection(x).unflatten(-1, (projection.out_features // self.head_dim, self.head_dim))
        return found

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | Plan | Tensor | None, need_weights: bool) -> Any:
        """Attend with `[batch, heads, tokens, head_dim]`, and project; the probabilities beside it if asked for."""
        plan = self._plan(mask, q, k.shape[2])
        dropout = self.dropout if self.training else 0.0
        # As a tensor: a number would break a compiled graph, and make an accelerator's host wait.
        drawn_seed = torch.randint(1 << 62, (), device=q.device) if dropout else None
        out, lse = dense(
            q, k, v, **plan.arguments(q.shape[2], k.shape[2], *q.shape[:2]), sinks=self.sinks,
            return_lse=need_weights, softcap=self.softcap,
            dropout=dropout, drawn_seed=drawn_seed,
        )  # fmt: skip
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return (out, self._weights(q, k, plan, lse)) if need_weights else out

    def _plan(self, mask: Mask | Plan | Tensor | None, q: Tensor, keys: int) -> Plan:
        batch, _, tokens, _ = q.shape
        if isinstance(mask, Plan):
            return mask.fitted(tokens, keys)
        who = type(self).__name__
        if isinstance(mask, Tensor):
            if mask.dtype is not torch.bool or not 1 < mask.dim() < 5:
                raise InputError(
                    f"{who}: a tensor as mask must be bool, [batch, keys] or to broadcast to [batch, heads, tokens, "
                    f"keys]; got {mask.dtype} {list(mask.shape)}: pass mask.bool(), of an additive one mask == 0"
                )
            # An exported program is for all sizes: there two dimensions are padding.
            if mask.dim() == 2 and not exporting() and mask.shape == (tokens, keys) and batch == tokens > 1:
                raise InputError(
                    f"{who}: a mask of {list(mask.shape)} for {batch} sequences of as many tokens may be padding "
                    "or say which keys a query sees: pass kpt_attention.padding(mask), or mask[None, None]"
                )
            if mask.dim() == 3 and not exporting() and mask.shape[0] == batch == self.num_heads > 1:
                raise InputError(
                    f"{who}: a mask of {list(mask.shape)} for {batch} sequences and as many heads may have one "
                    "for each of either: pass mask[:, None] for sequences, mask[None] for heads"
                )
            while mask.dim() == 3 or (mask.dim() == 2 and mask.shape != (batch, keys)):
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
        return mask.plan(tokens, keys, batch=batch, heads=self.num_heads, device=q.device)

    def _weights(self, q: Tensor, k: Tensor, plan: Plan, lse: Tensor | None) -> Tensor:
        """Return the probabilities, of the scores and their log-sum-exp."""
        assert lse is not None
        wide, tokens, keys = wide_dtype(q.dtype), range(q.shape[2]), range(k.shape[2])
        scores = (q.to(wide) / math.sqrt(self.head_dim)) @ k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        scores = self.softcap * (scores / self.softcap).tanh() if self.softcap else scores
        allowed = allowed_keys(plan, tokens, keys, q.device)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -math.inf)
        return (scores - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)).exp().to(q.dtype)


class Attention(_Projected):
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

    _told = ("num_heads", "num_kv_heads", "causal", "window", "dropout", "rotary_base", "softcap")

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
        super().__init__(
            embed_dim, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dropout=dropout, bias=bias,
            softcap=softcap, sinks=sinks, device=device, dtype=dtype,
        )  # fmt: skip
        name, dim = type(self).__name__, self.head_dim
        if rotary_base is not None and dim % 2:
            raise InputError(f"{name}: a rotary embedding turns pairs; got head_dim {dim}")
        if rotary_base is not None and not 0 < rotary_base < math.inf:
            raise InputError(f"{name}: rotary_base must be positive and finite, or None for none; got {rotary_base}")
        if type(window) is not int or window < 0:
            raise InputError(f"{name}: window must be an int of at least 0; got {window!r}")
        if window and not causal:
            raise InputError(f"{name}: window is of causal attention; got {window} with causal={causal}")
        self.causal, self.window, self.rotary_base = causal, window, rotary_base

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
                two dimensions is refused where there are as many sequences as tokens, since it could be either. With a
                step that of `step.tree`, `[new tokens, n]` over the last n keys of each sequence, or None.
            positions: `[tokens]` or `[batch, tokens]` for the rotary embedding; counted from 0 if None, with a step
                from what was cached. A tree's are those of `step.tree`.
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
        q, k, v = (self._heads(projection, x) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if positions is not None:
            self._check_positions(positions, x)
        if step is not None and mask is not None:
            self._check_tree(mask, positions)
        if self.rotary_base is not None:
            if positions is None:
                positions = torch.arange(x.shape[1], device=x.device) if step is None else step.positions
            q, k = (_rotated(each, positions, self.rotary_base) for each in (q, k))
        if step is not None:
            if need_weights or step.cache.window != self.window or not self.causal:
                raise InputError(
                    f"{name}: a cache serves causal attention without weights, in the cache's window of "
                    f"{step.cache.window}; got causal={self.causal} and window={self.window}"
                )
            step.update(layer, k, v)
            out = step.attend(layer, q, mask=mask, softcap=self.softcap, sinks=self.sinks)
            return self.out_proj(out.flatten(-2))
        return self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, need_weights)

    def own_mask(self) -> Mask | None:
        """Return the mask of the layer's settings; None for none."""
        if not self.causal:
            return None
        return masks.causal() & masks.sliding_window(self.window) if self.window else masks.causal()

    def _check_tree(self, mask: object, positions: Tensor | None) -> None:
        """Raise if a step's mask is none of `step.tree`: before anything is written to the cache."""
        if not isinstance(mask, Tensor):
            wanted = "with a step, mask must be the bool tensor [new tokens, n] of step.tree"
            raise InputError(f"{type(self).__name__}: {wanted}; got {type(mask).__name__}")
        if self.rotary_base is not None and positions is None:
            wanted = "give the positions of a tree's tokens with its mask: mask, positions = step.tree(parents)"
            raise InputError(f"{type(self).__name__}: {wanted}; got positions=None")

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


class CrossAttention(_Projected):
    """Attention of one sequence's tokens to another's, as a decoder's to what its encoder gave, by `attention.dense`.

    Args:
        embed_dim: of the tokens that attend.
        num_heads: of queries.
        kv_dim: of the tokens that are attended to; as `embed_dim` if None.
        num_kv_heads: of keys and values, which divides `num_heads`; as many if None.
        head_dim: of each head, `embed_dim // num_heads` if None.
        dropout: rate at which probabilities are dropped in training.
        bias: whether the projections have one.
        softcap: cap of the scores, 0 for none.
        sinks: whether each head learns a sink.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        InputError: sizes do not fit one another.

    Examples:
        >>> import torch
        >>> layer = CrossAttention(64, 8, kv_dim=48, num_kv_heads=2)
        >>> encoded = torch.randn(2, 30, 48)
        >>> layer(torch.randn(2, 10, 64), encoded).shape
        torch.Size([2, 10, 64])
        >>> kv = layer.project(encoded)  # once, for all steps of a decoder
        >>> layer(torch.randn(2, 1, 64), kv=kv).shape
        torch.Size([2, 1, 64])
    """

    def project(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of `[batch, keys, kv_dim]`, each `[batch, kv heads, keys, head_dim]`, for `kv`.

        Raises:
            InputError: the context has another shape.
        """
        if context.dim() != 3 or context.shape[-1] != self.k_proj.in_features:
            expected = f"[batch, keys, {self.k_proj.in_features}]"
            raise InputError(f"{type(self).__name__}: context must be {expected}; got {list(context.shape)}")
        return tuple(self._heads(each, context).transpose(1, 2) for each in (self.k_proj, self.v_proj))  # type: ignore[return-value]

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Mask | Plan | Tensor | None = None,
        *,
        kv: tuple[Tensor, Tensor] | None = None,
        need_weights: bool = False,
    ) -> Any:  # a tensor or two, as Attention's
        """Attend.

        Args:
            x: `[batch, tokens, embed_dim]`.
            context: `[batch, keys, kv_dim]`; or None, with `kv`.
            mask: a `Mask`; a `Plan` for as many tokens and keys; a bool tensor `[batch, keys]` that is False for
                padding, or one that broadcasts to `[batch, heads, tokens, keys]`. One of two dimensions is refused
                where there are as many sequences as tokens, one of three where there are as many as heads, since it
                could be either.
            kv: what `project` gave of a context, in its place.
            need_weights: whether to return the probabilities, too. They are computed beside, in memory of all of them.

        Returns:
            As `x`; with `need_weights` the probabilities `[batch, heads, tokens, keys]` beside it, without dropout.

        Raises:
            InputError: a shape or the mask does not fit, or not one of `context` and `kv` is given.
        """
        name = type(self).__name__
        if x.dim() != 3 or x.shape[-1] != self.embed_dim:
            raise InputError(f"{name}: x must be [batch, tokens, {self.embed_dim}]; got {list(x.shape)}")
        if (context is None) == (kv is None):
            raise InputError(
                f"{name}: give one of context and kv; got {'neither' if kv is None else 'both'}: layer(x, context), or "
                "layer(x, kv=layer.project(context))"
            )
        k, v = self.project(context) if context is not None else kv  # type: ignore[misc]  # one of them is there
        if k.dim() != 4 or k.shape[0] != x.shape[0] or (k.shape[1], k.shape[3]) != (self.num_kv_heads, self.head_dim):
            raise InputError(
                f"{name}: keys and values must be [{x.shape[0]}, {self.num_kv_heads}, keys, {self.head_dim}], of as "
                f"many sequences as x; got {list(k.shape)}: layer.project(context) gives them"
            )
        return self._attend(self._heads(self.q_proj, x).transpose(1, 2), k, v, mask, need_weights)


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


def create_flash_attention_3(
    embed_dim: int, num_heads: int, *, require: str | None = None, tokens: int = 256, **settings: Any
) -> FlashAttention3:
    """Make a `FlashAttention3`, and refuse to where another kernel than the one that is asked for would serve it.

    Args:
        embed_dim: of the tokens.
        num_heads: which divides it.
        require: a backend (`nvidia`, `cpu`), or a kernel as `kpt_core.explain` names it, whole or by its module
            (`gpu_flex`), that must serve inference and training of one sequence on the layer's device, in its dtype;
            None for whatever serves.
        tokens: of that sequence.
        **settings: as `FlashAttention3` takes them, as `causal`, `window`, `dropout`, `device` and `dtype`.

    Raises:
        InputError: sizes do not fit one another, or something else would serve; the message has the refusals.

    Examples:
        >>> create_flash_attention_3(64, 8, causal=True).num_heads
        8
        >>> create_flash_attention_3(64, 8, require="gpu_flex")
        Traceback (most recent call last):
        kpt_core.errors.InputError: create_flash_attention_3: 'gpu_flex' must serve inference on cpu ...
    """
    layer = FlashAttention3(embed_dim, num_heads, **settings)
    if require is None:
        return layer
    for training in (False, True):
        q, k, v = (
            layer.q_proj.weight.new_empty((1, heads, tokens, layer.head_dim)).requires_grad_(training)
            for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        )
        dropout = layer.dropout if training else 0.0
        found = dense.explain(
            q, k, v, **layer._plan(None, q, tokens).arguments(tokens, tokens, 1, layer.num_heads), sinks=layer.sinks,
            softcap=layer.softcap, dropout=dropout,
            drawn_seed=torch.zeros((), dtype=torch.int64, device=q.device) if dropout else None,
        )  # fmt: skip
        if require not in (found.backend, found.kernel, found.kernel.partition(":")[0].rpartition(".")[2]):
            told = "; ".join(map(str, found.refusals)) or "nothing came before it"
            raise InputError(
                f"create_flash_attention_3: {require!r} must serve {'training' if training else 'inference'} on "
                f"{q.device} in {q.dtype}; {found.kernel} of {found.backend} would: {told}"
            )
    return layer


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
