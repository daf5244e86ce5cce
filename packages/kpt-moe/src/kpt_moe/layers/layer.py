"""The Mixture-of-Experts layer."""

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_moe.expert_networks import ExpertNetwork, FeedForwardExpert
from kpt_moe.routers import Router, TopKRouter
from kpt_moe.routing import Routing

from .config import MoEConfig


class MoELayer(nn.Module):
    """A router and its experts: the drop-in for a transformer's feed-forward block.

    Args:
        config: sizes and choices.
        router: used instead of the one that the configuration describes.
        experts: likewise.
        device: of the parameters that are made here.
        dtype: likewise.

    Example:
        >>> layer = MoELayer(MoEConfig(hidden_size=64, num_experts=8, top_k=2, intermediate_size=128))
        >>> layer(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

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
        self.config = config
        self.router = (
            router
            if router is not None
            else TopKRouter(
                config.hidden_size,
                config.num_experts,
                config.top_k,
                score=config.score,
                renormalize=config.renormalize,
                device=device,
                dtype=dtype,
            )
        )
        self.experts = (
            experts
            if experts is not None
            else FeedForwardExpert(
                config.num_experts,
                config.hidden_size,
                config.expert_width,
                activation=config.activation,
                bias=config.bias,
                device=device,
                dtype=dtype,
            )
        )

    def route(self, x: Tensor, *, mask: Tensor | None = None, token_ids: Tensor | None = None) -> Routing:
        """The routing of `x` `[..., hidden_size]`, tokens flattened; the rest as for `forward`."""
        flat = [None if t is None else t.reshape(-1) for t in (mask, token_ids)]
        return self.router(self._flatten(x), mask=flat[0], token_ids=flat[1])  # type: ignore[no-any-return]

    def forward(
        self,
        x: Tensor,
        routing: Routing | None = None,
        *,
        mask: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer.

        A token whose every choice was refused for want of capacity gets zero: the residual around the layer passes it
        through.

        Args:
            x: `[..., hidden_size]`.
            routing: a routing of x's flattened tokens to use instead of the router's.
            mask: `[...]` bool, False for padding, which no expert sees.
            token_ids: `[...]` the vocabulary's ids, for routers that go by them.

        Returns:
            x's shape and dtype.

        Raises:
            InputError: x's last size is not `hidden_size`, or another shape does not fit.
        """
        routing = routing if routing is not None else self.route(x, mask=mask, token_ids=token_ids)
        tokens = self._flatten(x)
        return self.experts(tokens, routing).view(x.shape).to(x.dtype)  # type: ignore[no-any-return]

    def _flatten(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.config.hidden_size:
            raise InputError(
                f"{type(self).__name__}: the last size of x must be hidden_size={self.config.hidden_size}; "
                f"got {list(x.shape)}"
            )
        return x.reshape(-1, x.shape[-1])
