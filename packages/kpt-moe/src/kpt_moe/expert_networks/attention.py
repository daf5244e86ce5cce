"""Experts that are attention heads: Mixture of Attention heads."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_moe._checks import require_bools, require_size, require_tokens
from kpt_moe._pairs import SortedPairs
from kpt_moe.routing import Routing

from .base import ExpertNetwork, init_fan_in, init_zeros, matrices, sequence_of_tokens, vectors, without_padding


class AttentionExpert(ExpertNetwork):
    """Attention heads that tokens choose: Mixture of Attention heads (arXiv:2210.05144).

    Every expert has its own query and output projection. Keys and values are computed once from all tokens that are no
    padding, and shared by all experts: the `K` experts of a token are `K` groups of query heads over its sequence.
    Positions are not encoded here: a token must tell its own.

    A token whose key or value is not finite is NaN to those that see it, itself too, and to no other: with `causal`
    not to those before it, and never to another sequence.

    Memory: one sequence without padding needs no mask where row `t` is token `t`; otherwise there is a boolean mask
    `[rows, tokens]` over all sequences of the call, since their lengths are not read on the host. A batch of many short
    sequences is cheaper in several calls.

    Args:
        head_dim: size of a head.
        num_heads: heads of each expert, and of the keys and values.
        causal: a token sees none that come after it.
        bias: give all four projections a bias.

    Raises:
        InputError: a size is not a positive integer.
    """

    has_width: ClassVar[bool] = False
    needs_sequences: ClassVar[bool] = True

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        head_dim: int = 64,
        num_heads: int = 1,
        causal: bool = True,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, num_experts=num_experts)
        for what, size in (("head_dim", head_dim), ("num_heads", num_heads)):
            require_size(type(self).__name__, what, size)
        self.head_dim = head_dim
        self.num_heads = num_heads
        require_bools(type(self).__name__, causal=causal, bias=bias)
        self.causal = causal
        width = num_heads * head_dim
        self.query_proj = matrices(num_experts, width, hidden_size, device, dtype)
        self.out_proj = matrices(num_experts, hidden_size, width, device, dtype)
        self.query_proj_bias = vectors(bias, num_experts, width, device, dtype)
        self.out_proj_bias = vectors(bias, num_experts, hidden_size, device, dtype)
        self.key_proj = nn.Linear(hidden_size, width, bias=bias, device=device, dtype=dtype)
        self.value_proj = nn.Linear(hidden_size, width, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with deviation `fan_in ** -0.5` for matrices, zero for biases."""
        init_fan_in(self.query_proj, self.out_proj, self.key_proj.weight, self.value_proj.weight)
        init_zeros(self.query_proj_bias, self.out_proj_bias, self.key_proj.bias, self.value_proj.bias)

    def forward(self, x: Tensor, routing: Routing, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """As in `ExpertNetwork`; a token attends to its sequence."""
        require_tokens(type(self).__name__, x, self.hidden_size)
        tokens = without_padding(x, routing.mask)
        visible = self._visible(x, routing, cu_seqlens)
        # A weight of zero does not keep NaN out.
        key, value = self.key_proj(tokens), self.value_proj(tokens)
        lost = ~(key.isfinite().all(-1, keepdim=True) & value.isfinite().all(-1, keepdim=True))
        key, value = key.masked_fill(lost, 0), value.masked_fill(lost, 0)
        pairs = SortedPairs.of(routing, self.num_experts)
        queries = pairs.unsort(pairs.linear(pairs.gather(tokens), self.query_proj, self.query_proj_bias))
        attended = F.scaled_dot_product_attention(
            self._heads(queries),
            self._heads(key.unsqueeze(1)),
            self._heads(value.unsqueeze(1)),
            attn_mask=visible,
            is_causal=self.causal and visible is None,
            enable_gqa=True,
        )
        rows = attended.view(self.num_heads, *routing.index.t().shape, self.head_dim).permute(2, 1, 0, 3).flatten(2)
        if visible is not None:
            saw = (visible & lost.t()).any(1)
        else:
            saw = lost.squeeze(1).cumsum(0) > 0 if self.causal else lost.any().expand(rows.shape[0])
        rows = rows.masked_fill(saw.view(-1, 1, 1), float("nan"))
        out = pairs.linear(rows.flatten(0, 1)[pairs.order], self.out_proj, self.out_proj_bias)
        return pairs.combine(out, x).to(x.dtype)

    def _heads(self, x: Tensor) -> Tensor:
        """`[rows, K, num_heads * head_dim]` as `[1, num_heads * K, rows, head_dim]`."""
        heads = x.view(*x.shape[:2], self.num_heads, self.head_dim).permute(2, 1, 0, 3)
        return heads.flatten(0, 1).unsqueeze(0)

    def _visible(self, x: Tensor, routing: Routing, cu_seqlens: Tensor | None) -> Tensor | None:
        """`[rows, tokens]` bool: the keys of each row; None for all of them, or all up to its own if causal."""
        in_order = routing.token is None or not self.causal
        if cu_seqlens is None and routing.mask is None and in_order:
            return None
        sequence = sequence_of_tokens(type(self).__name__, x, cu_seqlens)
        key = torch.arange(x.shape[0], device=x.device)
        query = (key if routing.token is None else routing.token).unsqueeze(1)
        visible = sequence[query] == sequence
        if self.causal:
            visible = visible & (key <= query)
        if routing.mask is not None:
            # Padding sees itself, since a softmax over nothing is none; its choices are refused anyway.
            visible = visible & (routing.mask | (key == query))
        return visible

    def extra_repr(self) -> str:
        """For `print(module)`."""
        return (
            f"{self.num_experts}, {self.hidden_size}, head_dim={self.head_dim}, num_heads={self.num_heads}, "
            f"causal={self.causal}"
        )
