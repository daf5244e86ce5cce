"""What a router decides: which experts a token goes to, and with what weight."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map_only


@dataclass(frozen=True, slots=True)
class Routing:
    """What a router decides. A row is a token, unless `token` says of which token it is.

    Attributes:
        index: `[rows, K]` int64, the experts of each row, best first. A negative id `~e` is a choice of expert `e` that
            was refused: for want of capacity, or because the token is padding. An id of `num_experts` or above is no
            choice at all. Neither contributes anything.
        weights: `[rows, K]`, how much each of them counts; float32, or float64 if the tokens were. Zero where nothing
            is contributed.
        logits: `[tokens, num_experts]`, of the dtype of `weights`, before any normalisation: what load-balancing losses
            need.
        mask: `[tokens]` bool, False for padding; None if every token counts.
        token: `[rows]` int64, the token of each row, where experts choose tokens; None if row `t` is token `t`.
    """

    index: Tensor
    weights: Tensor
    logits: Tensor
    mask: Tensor | None = None
    token: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """Number of experts that could be chosen."""
        return self.logits.shape[-1]

    @property
    def top_k(self) -> int:
        """Choices per row."""
        return self.index.shape[1]

    def asked(self) -> Tensor:
        """`[rows, K]` int64: the expert that each choice asked for, whether it was refused or not."""
        return torch.where(self.index < 0, ~self.index, self.index)

    def counts(self) -> Tensor:
        """`[rows]` bool: whether the token of each row is one that counts."""
        if self.mask is None:
            return torch.ones(self.index.shape[0], dtype=torch.bool, device=self.index.device)
        return self.mask if self.token is None else self.mask[self.token]

    def tokens_per_expert(self) -> Tensor:
        """`[num_experts]` int64: choices that each expert serves; read nowhere on the host."""
        return _count(self.index, (self.index >= 0) & (self.index < self.num_experts), self.num_experts)

    def asked_per_expert(self) -> Tensor:
        """`[num_experts]` int64: choices of tokens that count, of each expert, served or refused."""
        asked = self.asked()
        return _count(asked, self.counts().unsqueeze(1) & (asked < self.num_experts), self.num_experts)

    def dropped(self) -> Tensor:
        """0-d int64: choices of tokens that count, refused for want of capacity."""
        return ((self.index < 0) & self.counts().unsqueeze(1)).sum()

    def to(self, device: torch.device | str, *, copy: bool = False) -> "Routing":
        """The routing on a device; the same tensors if they are there, unless `copy`."""
        return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=copy), self)  # type: ignore[no-any-return]

    def detach(self) -> "Routing":
        """The routing without its gradients."""
        return tree_map_only(Tensor, Tensor.detach, self)  # type: ignore[no-any-return]

    def save(self, path: str | os.PathLike[str], *, logits: bool = True) -> None:
        """Write it to a safetensors file, see `kpt_moe.routing_files.save_routing`."""
        from .routing_files import save_routing

        save_routing(self, path, logits=logits)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Routing":
        """Read what `save` wrote, on the CPU, see `kpt_moe.routing_files.load_routing`."""
        from .routing_files import load_routing

        return load_routing(path)

    def apply(self, x: Tensor, experts: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Send tokens through experts that take `(rows, index, weights)`.

        Args:
            x: `[tokens, hidden_size]`.
            experts: gives the weighted sum of each row `[rows, hidden_size]`.

        Returns:
            `[tokens, hidden_size]` of the experts' dtype.
        """
        if self.token is None:
            return experts(x, self.index, self.weights)
        rows = experts(x.index_select(0, self.token), self.index, self.weights)
        total = torch.promote_types(rows.dtype, torch.float32)
        out = torch.zeros(x.shape[0], rows.shape[1], dtype=total, device=x.device)
        return out.index_add(0, self.token, rows.to(total)).to(rows.dtype)


# So that torch.export and tree_map see its tensors.
register_dataclass(Routing)


def _count(ids: Tensor, counted: Tensor, num_experts: int) -> Tensor:
    """How often each id from 0 to `num_experts - 1` is counted."""
    ids = torch.where(counted, ids, num_experts).reshape(-1)
    count = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return count.scatter_add(0, ids.long(), torch.ones_like(ids, dtype=torch.int64))[:num_experts]
