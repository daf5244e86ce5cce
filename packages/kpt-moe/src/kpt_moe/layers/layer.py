"""The Mixture-of-Experts layer."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_moe._checks import require_same_tokens, require_sequences, shape_of
from kpt_moe.batch_invariant import MODE
from kpt_moe.expert_networks import ExpertNetwork, QuantizedFeedForwardExpert
from kpt_moe.routers import Router
from kpt_moe.routing import Routing

from .config import MoEConfig
from .shared import SharedExperts


class MoELayer(nn.Module):
    """A router and its experts: the drop-in for a transformer's feed-forward block.

    Args:
        config: sizes and choices.
        router: used instead of the one that the configuration describes.
        experts: likewise.
        device: of the parameters that are made here.
        dtype: likewise.

    Raises:
        InputError: the configuration has an option that its router or experts don't take, or one that has no effect, or
            a given router or network of experts is of other sizes.

    Examples:
        >>> layer = MoELayer(MoEConfig(hidden_size=64, num_experts=8, top_k=2, intermediate_size=128))
        >>> layer(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    #: What a kind of layer has always, and what it has unless the configuration says otherwise.
    fixed: ClassVar[Mapping[str, Any]] = {}
    defaults: ClassVar[Mapping[str, Any]] = {}

    router: Router
    experts: ExpertNetwork

    def __init__(
        self,
        config: MoEConfig,
        *,
        router: Router | None = None,
        experts: ExpertNetwork | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config = config.filled(type(self), router, experts)
        self.router = router if router is not None else config.make_router(device, dtype)
        self.experts = experts if experts is not None else config.make_experts(device, dtype)
        self.shared_experts: SharedExperts | None = None
        if config.num_shared_experts:
            self.shared_experts = SharedExperts(
                config.hidden_size,
                intermediate_size=config.shared_intermediate_size or config.num_shared_experts * config.expert_width,
                activation=config.activation,
                bias=config.bias,
                gated=config.shared_gate,
                device=device,
                dtype=dtype,
            )
        for part in (self.router, self.experts):
            sizes = part.hidden_size, part.num_experts
            if sizes != (config.hidden_size, config.num_experts):
                raise InputError(
                    f"{type(self).__name__}: {type(part).__name__} is for hidden_size {sizes[0]} and {sizes[1]} "
                    f"experts, the configuration for {config.hidden_size} and {config.num_experts}"
                )

    def reset_parameters(self) -> None:
        """As router, experts and shared experts do themselves."""
        for part in (self.router, self.experts, self.shared_experts):
            if part is not None:
                part.reset_parameters()  # type: ignore[operator]

    def route(self, x: Tensor, *, mask: Tensor | None = None, token_ids: Tensor | None = None) -> Routing:
        """Return the routing of `x` `[..., hidden_size]`, tokens flattened; the rest as for `forward`."""
        tokens = self._flatten(x)
        if mask is not None or token_ids is not None:
            require_same_tokens(type(self).__name__, x.shape[:-1], mask, token_ids)
            mask = None if mask is None else mask.reshape(-1)
            token_ids = None if token_ids is None else token_ids.reshape(-1)
        return self.router(tokens, mask=mask, token_ids=token_ids)  # type: ignore[no-any-return]

    def forward(
        self,
        x: Tensor,
        routing: Routing | None = None,
        *,
        mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer.

        A token whose every choice was refused for want of capacity gets what the shared experts give, or zero: the
        residual around the layer passes it through. `routing.dropped()` counts the refused choices.

        Args:
            x: `[..., hidden_size]`.
            routing: a routing of x's flattened tokens to use instead of the router's. A balancing loss takes it:
                `routing = layer.route(x)`, `layer(x, routing)`, `switch_loss(routing)`.
            mask: `[...]` bool, False for padding, which no routed expert sees; of a given routing, its own counts.
            token_ids: `[...]` the vocabulary's ids, for routers that go by them; a given routing needs none.
            cu_seqlens: `[sequences + 1]` int32, where sequences of packed tokens begin, and the end, for experts that
                look at neighbours; None takes each row of `[batch, length, hidden_size]` for a sequence.

        Returns:
            x's shape and dtype.

        Raises:
            InputError: x's last size is not `hidden_size`, another shape does not fit, or there is a mask beside a
                routing that was made without one.
        """
        experts: nn.Module = self.experts
        network = experts if isinstance(experts, ExpertNetwork) else _wrapped(experts)
        if not network.has_batch_invariant_mode and MODE.on:
            raise InputError(
                f"{type(self).__name__}: {type(network).__name__} has no batch-invariant way of computing: "
                "call it outside of batch_invariant(), or use FeedForwardExpert"
            )
        replaced = routing is not None
        if routing is None:
            routing = self.route(x, mask=mask, token_ids=token_ids)
        elif not isinstance(routing, Routing):
            raise InputError(
                f"{type(self).__name__}: the second argument is a Routing, as route() gives it; got a "
                f"{type(routing).__name__}: give a mask as mask=..., ids as token_ids=..."
            )
        elif mask is not None and routing.mask is None:
            raise InputError(
                f"{type(self).__name__}: the routing was made without a mask, so that its padding has experts; got a "
                "mask beside it: give it to route()"
            )
        tokens = self._flatten(x) if replaced else x.reshape(-1, x.shape[-1])
        if cu_seqlens is not None and not network.needs_sequences:  # others check it themselves
            require_sequences(type(self).__name__, cu_seqlens, tokens.shape[0])
        if cu_seqlens is None and network.needs_sequences and x.dim() > 2:
            cu_seqlens = torch.arange(tokens.shape[0] // max(x.shape[-2], 1) + 1, device=x.device, dtype=torch.int32)
            cu_seqlens = cu_seqlens * x.shape[-2]
        out = experts(tokens, routing, cu_seqlens=cu_seqlens)
        if self.shared_experts is not None:
            out = out + self._shared(tokens)
        return out.view(x.shape).to(x.dtype)  # type: ignore[no-any-return]

    def _shared(self, tokens: Tensor) -> Tensor:
        return self.shared_experts(tokens)  # type: ignore[misc,no-any-return]

    def _flatten(self, x: Any) -> Tensor:
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] != self.config.hidden_size:
            raise InputError(
                f"{type(self).__name__}: the last size of x must be hidden_size={self.config.hidden_size}; "
                f"got {shape_of(x)}"
            )
        return x.reshape(-1, x.shape[-1])


def _wrapped(experts: nn.Module) -> ExpertNetwork:
    """Return the network that a wrapper (of an adapter, of a compiler) holds."""
    if hasattr(experts, "needs_sequences"):
        return experts  # type: ignore[return-value]
    network = next((module for module in experts.modules() if isinstance(module, ExpertNetwork)), None)
    kind = type(experts).__name__
    if network is None:
        raise InputError(f"MoELayer: experts must be an ExpertNetwork, or a wrapper of one; got {kind}")
    if isinstance(network, QuantizedFeedForwardExpert) and hasattr(experts, "parameter_name"):
        raise InputError(
            f"MoELayer: {kind} adds to {experts.parameter_name} of {type(network).__name__}, whose 8-bit numbers mean "
            "nothing without their scales: adapt the experts before they are quantised, or other modules alone"
        )
    return network
