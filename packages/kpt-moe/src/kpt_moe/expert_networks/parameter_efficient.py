"""Experts that add few parameters to a network that is there already."""

from typing import Any, Literal, Self, Unpack, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_core import InputError
from kpt_moe._checks import require_bools, require_known, require_number, require_size, require_tokens
from kpt_moe._pairs import SortedPairs
from kpt_moe.activations import Activation
from kpt_moe.routing import Routing

from .base import ExpertNetwork, init_fan_in, init_zeros, matrices, vectors, without_padding
from .feed_forward import FeedForwardExpert, FeedForwardOptions, require_feed_forward

#: What is added to the base: low-rank updates of both its products, or a bottleneck after it.
Mode = Literal["lora", "adapter"]
MODES: tuple[Mode, ...] = get_args(Mode)


class LowRankUpdate(nn.Module):
    """`scale * lora_B[e] @ lora_A[e]` beside a product of expert `e` (LoRA, arXiv:2106.09685).

    `lora_A` is `[num_experts, rank, inputs]`, random; `lora_B` `[num_experts, outputs, rank]`, zero at first.
    """

    def __init__(
        self, num_experts: int, inputs: int, outputs: int, *, rank: int, scale: float, dropout: float, like: Tensor
    ) -> None:
        super().__init__()
        self.scale = scale
        self.dropout = dropout
        self.lora_A = matrices(num_experts, rank, inputs, like.device, like.dtype)
        self.lora_B = matrices(num_experts, outputs, rank, like.device, like.dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """No update: `lora_B` is zero."""
        init_fan_in(self.lora_A)
        nn.init.zeros_(self.lora_B)

    def forward(self, rows: Tensor, pairs: SortedPairs) -> Tensor:
        """The update of sorted pairs, `[pairs, inputs]` to `[pairs, outputs]`."""
        inner = pairs.linear(F.dropout(rows, self.dropout, self.training), self.lora_A)
        return pairs.linear(inner * self.scale, self.lora_B)

    def merged(self, weight: Tensor) -> Tensor:
        """`weight` `[num_experts or 1, outputs, inputs]` with the update in it, a new tensor of all experts."""
        return torch.baddbmm(weight, self.lora_B, self.lora_A, alpha=self.scale)

    def extra_repr(self) -> str:
        """For `print(module)`."""
        experts, outputs, rank = self.lora_B.shape
        return f"{experts}, {self.lora_A.shape[2]}, {outputs}, rank={rank}, scale={self.scale}"


class BottleneckAdapter(nn.Module):
    """`up[e](gelu(down[e](y)))`, with biases, beside the output `y` of a block (adapters, arXiv:1902.00751).

    `up` and its bias are zero at first.
    """

    def __init__(self, num_experts: int, hidden_size: int, *, rank: int, like: Tensor) -> None:
        super().__init__()
        self.down_proj = matrices(num_experts, rank, hidden_size, like.device, like.dtype)
        self.down_proj_bias = vectors(True, num_experts, rank, like.device, like.dtype)
        self.up_proj = matrices(num_experts, hidden_size, rank, like.device, like.dtype)
        self.up_proj_bias = vectors(True, num_experts, hidden_size, like.device, like.dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Nothing is added: the projection up is zero."""
        init_fan_in(self.down_proj)
        init_zeros(self.down_proj_bias, self.up_proj, self.up_proj_bias)

    def forward(self, rows: Tensor, pairs: SortedPairs) -> Tensor:
        """What is added to sorted pairs, `[pairs, hidden_size]` to the same."""
        inner = F.gelu(pairs.linear(rows, self.down_proj, self.down_proj_bias))
        return pairs.linear(inner, self.up_proj, self.up_proj_bias)

    def extra_repr(self) -> str:
        """For `print(module)`."""
        experts, hidden, rank = self.up_proj.shape
        return f"{experts}, {hidden}, rank={rank}"


class ParameterEfficientExpert(ExpertNetwork):
    """One feed-forward network that all experts share, and few parameters of each expert's own.

    With `lora` (arXiv:2106.09685), both products of the base get a low-rank update of the expert:
    `y = (D + s B'_e A'_e) act((U + s B_e A_e) x)`, `s = alpha / rank`. With `adapter` (arXiv:1902.00751), a bottleneck
    follows the base: `y = b + up_e(act(down_e(b)))`, `b = base(x)`. At first every expert gives what the base gives.

    Each expert has `rank * (hidden_size + width + intermediate_size + hidden_size)` parameters of its own with `lora`,
    where width is `2 * intermediate_size` for a gated base, and `2 * hidden_size * rank + rank + hidden_size` with
    `adapter`. The products of a shared base are computed once per token, however many experts the token has: `U x` is
    the same for all of them, and `D` is applied to their weighted sum.

    `from_feed_forward` puts LoRA on experts that have weights of their own.

    Args:
        mode: `lora` or `adapter`.
        rank: of the low-rank updates, or inner width of the bottleneck.
        alpha: of `lora`; None is `rank`, a scale of one.
        dropout: of the inputs of the low-rank updates, in training.
        freeze_base: the base's parameters take no gradient.
        base: its `intermediate_size`, `activation`, `bias`, `device` and `dtype`, as in `FeedForwardExpert`.

    Attributes:
        base: the `FeedForwardExpert` underneath, of one expert if it is shared. Load trained weights into it.

    Raises:
        InputError: a size is not a positive integer, `dropout` is not in `[0, 1)`, or `alpha` or `dropout` is given
            with `adapter`.
        UnknownNameError: no such mode or activation.
    """

    base: FeedForwardExpert
    up: LowRankUpdate
    down: LowRankUpdate
    adapter: BottleneckAdapter

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        mode: Mode = "lora",
        rank: int = 8,
        alpha: float | None = None,
        dropout: float = 0.0,
        freeze_base: bool = True,
        **base: Unpack[FeedForwardOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts=num_experts)
        shared = FeedForwardExpert(hidden_size, num_experts=1, **base)
        self._build(shared, mode, rank, alpha, dropout, freeze_base)

    @classmethod
    def from_feed_forward(
        cls,
        experts: FeedForwardExpert,
        *,
        rank: int = 8,
        alpha: float | None = None,
        dropout: float = 0.0,
        freeze_base: bool = True,
    ) -> Self:
        """LoRA on every expert of a network that is there.

        The network itself becomes the base: its weights are not copied, and are frozen in place unless told otherwise.

        Args:
            experts: the network.
            rank: as for the constructor.
            alpha: likewise.
            dropout: likewise.
            freeze_base: likewise.

        Raises:
            InputError: as for the constructor, or `experts` is no `FeedForwardExpert`.
        """
        require_feed_forward(cls.__name__, experts)
        network = cls.__new__(cls)
        ExpertNetwork.__init__(network, experts.hidden_size, num_experts=experts.num_experts)
        network._build(experts, "lora", rank, alpha, dropout, freeze_base)
        return network.train(experts.training)

    def _build(
        self, base: FeedForwardExpert, mode: Mode, rank: int, alpha: float | None, dropout: float, freeze_base: bool
    ) -> None:
        name = type(self).__name__
        require_known("mode", mode, MODES)
        require_size(name, "rank", rank)
        require_number(name, "dropout", dropout, "at least 0 and below 1")
        require_bools(name, freeze_base=freeze_base)
        if alpha is not None:
            require_number(name, "alpha", alpha)
        if mode == "adapter" and (alpha is not None or dropout != 0):
            raise InputError(
                f"{name}: alpha and dropout are of mode 'lora', leave them at None and 0.0 with 'adapter'; "
                f"got alpha={alpha} and dropout={dropout}"
            )
        self.mode = mode
        self.base = base.requires_grad_(not freeze_base)
        self.activation = Activation(base.activation)
        experts, hidden, weight = self.num_experts, self.hidden_size, base.gate_up_proj
        if mode == "adapter":
            self.adapter = BottleneckAdapter(experts, hidden, rank=rank, like=weight)
            return
        scale = 1.0 if alpha is None else alpha / rank
        lora: dict[str, Any] = {"rank": rank, "scale": scale, "dropout": dropout, "like": weight}
        self.up = LowRankUpdate(experts, hidden, weight.shape[1], **lora)
        self.down = LowRankUpdate(experts, base.intermediate_size, hidden, **lora)

    @property
    def intermediate_size(self) -> int:
        """Return the base's."""
        return self.base.intermediate_size

    def reset_parameters(self) -> None:
        """The base as in `FeedForwardExpert`, and nothing added to it."""
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Tensor, routing: Routing, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """As in `ExpertNetwork`; each token is taken by itself."""
        require_tokens(type(self).__name__, x, self.hidden_size)
        tokens = without_padding(x, routing.mask)
        return self._by_pairs(tokens, SortedPairs.of(routing, self.num_experts))

    def rows(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each row: `[rows, hidden_size]`, `[rows, K]` and `[rows, K]`.

        Of as many experts as there are parameters for: those of a rank, where experts are spread.
        """
        held = (self.up.lora_A if self.mode == "lora" else self.adapter.up_proj).shape[0]
        return self._by_pairs(x, SortedPairs.of(Routing(index, weights, weights.new_empty(0, held)), held))

    def _by_pairs(self, x: Tensor, pairs: SortedPairs) -> Tensor:
        return (self._lora if self.mode == "lora" else self._adapter)(x, pairs).to(x.dtype)

    def _lora(self, x: Tensor, pairs: SortedPairs) -> Tensor:
        base = self.base
        rows = pairs.gather(x)
        if base.num_experts != 1:
            h = pairs.linear(rows, base.gate_up_proj, base.gate_up_proj_bias)
            a = self.activation(h + self.up(rows, pairs))
            y = pairs.linear(a, base.down_proj, base.down_proj_bias) + self.down(a, pairs)
            return pairs.combine(y, x)
        h = F.linear(x, base.gate_up_proj[0], None if base.gate_up_proj_bias is None else base.gate_up_proj_bias[0])
        a = self.activation(pairs.gather(h) + self.up(rows, pairs))
        out = F.linear(pairs.combine(a, x).to(x.dtype), base.down_proj[0])
        if base.down_proj_bias is not None:
            out = out + _total_weights(pairs, x) * base.down_proj_bias
        return out + pairs.combine(self.down(a, pairs), x)

    def _adapter(self, x: Tensor, pairs: SortedPairs) -> Tensor:
        every = torch.zeros(x.shape[0], 1, dtype=torch.int64, device=x.device)
        y = self.base.rows(x, every, torch.ones_like(every, dtype=x.dtype))
        added = pairs.combine(self.adapter(pairs.gather(y), pairs), x)
        return y * _total_weights(pairs, x) + added

    def merge(self) -> FeedForwardExpert:
        """A `FeedForwardExpert` of `num_experts` experts with the updates in its own weights, and equal outputs.

        Nothing is shared with this network, which stays as it is. Merging rounds to the weights' dtype.

        Raises:
            InputError: a bottleneck, which is no linear map, can't be merged.
        """
        if self.mode != "lora":
            raise InputError(
                f"{type(self).__name__}: merge is of mode 'lora'; a bottleneck of mode {self.mode!r} has an activation "
                "and can't be part of a matrix"
            )
        base = self.base
        # On meta, so that nothing is allocated twice and no random numbers are drawn.
        merged = FeedForwardExpert(**(base.sizes() | {"num_experts": self.num_experts}), device="meta")
        with torch.no_grad():
            merged.gate_up_proj = nn.Parameter(self.up.merged(base.gate_up_proj))
            merged.down_proj = nn.Parameter(self.down.merged(base.down_proj))
            for name in ("gate_up_proj_bias", "down_proj_bias"):
                bias = getattr(base, name)
                if bias is not None:
                    setattr(merged, name, nn.Parameter(bias.expand(self.num_experts, -1).clone()))
        return merged.train(self.training)

    def extra_repr(self) -> str:
        """For `print(module)`."""
        frozen = not self.base.gate_up_proj.requires_grad
        return f"{self.num_experts}, {self.hidden_size}, mode={self.mode!r}, freeze_base={frozen}"


def _total_weights(pairs: SortedPairs, x: Tensor) -> Tensor:
    """`[tokens, 1]`: the sum of the weights of each token's experts."""
    return pairs.combine(x.new_ones(pairs.order.shape[0], 1), x)
