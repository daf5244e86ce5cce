"""Experts that add few parameters to a network that is there already."""

from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_core import InputError, UnknownNameError
from kpt_moe._checks import require_size
from kpt_moe._pairs import SortedPairs
from kpt_moe.activations import Activation
from kpt_moe.routing import Routing

from ._adapters import BottleneckAdapter, LowRankUpdate
from ._sequences import require_tokens, without_padding
from .base import ExpertNetwork
from .feed_forward import FeedForwardExpert

#: What is added to the base: low-rank updates of both its products, or a bottleneck after it.
Mode = Literal["lora", "adapter"]
MODES: tuple[Mode, ...] = ("lora", "adapter")


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
        num_experts: number of experts.
        hidden_size: size of a token.
        intermediate_size: inner width of the base; None gives four times `hidden_size`.
        mode: `lora` or `adapter`.
        rank: of the low-rank updates, or inner width of the bottleneck.
        alpha: of `lora`; None is `rank`, a scale of one.
        dropout: of the inputs of the low-rank updates, in training.
        freeze_base: the base's parameters take no gradient.
        activation: of the base, as of `FeedForwardExpert`. A bottleneck has `gelu`.
        bias: give both projections of the base a bias.
        device: of the parameters.
        dtype: of the parameters.

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
        num_experts: int,
        hidden_size: int,
        intermediate_size: int | None = None,
        *,
        mode: Mode = "lora",
        rank: int = 8,
        alpha: float | None = None,
        dropout: float = 0.0,
        freeze_base: bool = True,
        activation: str = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_experts, hidden_size)
        base = FeedForwardExpert(
            1,
            hidden_size,
            4 * hidden_size if intermediate_size is None else intermediate_size,
            activation=activation,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self._build(base, mode, rank, alpha, dropout, freeze_base)

    @classmethod
    def from_feed_forward(
        cls,
        experts: FeedForwardExpert,
        rank: int = 8,
        *,
        alpha: float | None = None,
        dropout: float = 0.0,
        freeze_base: bool = True,
    ) -> Self:
        """LoRA on every expert of a network that is there.

        The network itself becomes the base: its weights are not copied, and are frozen in place unless told otherwise.

        Args:
            experts: the network.
            rank: of the updates.
            alpha: as for the constructor.
            dropout: likewise.
            freeze_base: likewise.

        Raises:
            InputError: as for the constructor, or `experts` is no `FeedForwardExpert`.
        """
        if not isinstance(experts, FeedForwardExpert):
            raise InputError(f"{cls.__name__}: experts must be a FeedForwardExpert; got {type(experts).__name__}")
        network = cls.__new__(cls)
        ExpertNetwork.__init__(network, experts.num_experts, experts.hidden_size)
        network._build(experts, "lora", rank, alpha, dropout, freeze_base)
        return network.train(experts.training)

    def _build(
        self,
        base: FeedForwardExpert,
        mode: Mode,
        rank: int,
        alpha: float | None,
        dropout: float,
        freeze_base: bool,
    ) -> None:
        name = type(self).__name__
        if mode not in MODES:
            raise UnknownNameError("mode", mode, MODES)
        require_size(name, "rank", rank)
        if not 0 <= dropout < 1:
            raise InputError(f"{name}: dropout must be at least 0 and below 1; got {dropout}")
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
            self.adapter = BottleneckAdapter(
                experts, hidden, rank=rank, activation="gelu", device=weight.device, dtype=weight.dtype
            )
            return
        for update, inputs, outputs in (("up", hidden, weight.shape[1]), ("down", base.intermediate_size, hidden)):
            module = LowRankUpdate(
                experts,
                inputs,
                outputs,
                rank=rank,
                alpha=rank if alpha is None else alpha,
                dropout=dropout,
                device=weight.device,
                dtype=weight.dtype,
            )
            setattr(self, update, module)

    def reset_parameters(self) -> None:
        """The base as in `FeedForwardExpert`, and nothing added to it."""
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Tensor, routing: Routing, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """As in `ExpertNetwork`; each token is taken by itself.

        Raises:
            InputError: x is of another shape.
        """
        require_tokens(type(self).__name__, x, self.hidden_size)
        tokens = without_padding(x, routing.mask)
        pairs = SortedPairs.of(routing, self.num_experts)
        return (self._lora if self.mode == "lora" else self._adapter)(tokens, pairs).to(x.dtype)

    def _lora(self, x: Tensor, pairs: SortedPairs) -> Tensor:
        base, tokens = self.base, x.shape[0]
        rows = pairs.gather(x)
        if base.num_experts != 1:
            h = pairs.linear(rows, base.gate_up_proj, base.gate_up_proj_bias)
            a = self.activation(h + self.up(rows, pairs))
            y = pairs.linear(a, base.down_proj, base.down_proj_bias) + self.down(a, pairs)
            return pairs.combine(y, tokens)
        h = F.linear(x, base.gate_up_proj[0], _only(base.gate_up_proj_bias))
        a = self.activation(pairs.gather(h) + self.up(rows, pairs))
        out = F.linear(pairs.combine(a, tokens).to(x.dtype), base.down_proj[0])
        if base.down_proj_bias is not None:
            out = out + _total_weights(pairs, x) * base.down_proj_bias
        return out + pairs.combine(self.down(a, pairs), tokens)

    def _adapter(self, x: Tensor, pairs: SortedPairs) -> Tensor:
        every = torch.zeros(x.shape[0], 1, dtype=torch.int64, device=x.device)
        y = self.base.rows(x, every, torch.ones_like(every, dtype=x.dtype))
        added = pairs.combine(self.adapter(pairs.gather(y), pairs), x.shape[0])
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
        merged = FeedForwardExpert(
            self.num_experts,
            self.hidden_size,
            base.intermediate_size,
            activation=base.activation,
            bias=base.down_proj_bias is not None,
            device="meta",
        )
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


def _only(bias: Tensor | None) -> Tensor | None:
    """The bias of the one expert."""
    return None if bias is None else bias[0]


def _total_weights(pairs: SortedPairs, x: Tensor) -> Tensor:
    """`[tokens, 1]`: the sum of the weights of each token's experts."""
    return pairs.combine(x.new_ones(pairs.order.shape[0], 1), x.shape[0])
