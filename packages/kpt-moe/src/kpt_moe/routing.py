"""What a router decides: which experts a token goes to, and with what weight."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node, tree_map_only

#: By what routers score experts: a softmax over all of them or over the chosen ones, sigmoids, roots of softplus.
SCORES = ("softmax", "softmax_after", "sigmoid", "sqrtsoftplus")
#: The tensors of a routing.
PARTS = ("index", "weights", "logits", "mask", "token")


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
        score: by what the router scores experts, of `SCORES`; a loss makes probabilities of the logits by it.
    """

    index: Tensor
    weights: Tensor
    logits: Tensor
    mask: Tensor | None = None
    token: Tensor | None = None
    score: str = "softmax"

    @property
    def num_experts(self) -> int:
        """Number of experts that could be chosen."""
        return self.logits.shape[-1]

    @property
    def top_k(self) -> int:
        """Choices per row."""
        return self.index.shape[1]

    @property
    def num_tokens(self) -> int:
        """How many tokens were routed, with or without logits."""
        if self.token is None:
            return self.index.shape[0]
        return self.logits.shape[0] if self.mask is None else self.mask.shape[0]

    def asked(self) -> Tensor:
        """`[rows, K]` int64: the expert that each choice asked for, whether it was refused or not."""
        return torch.where(self.index < 0, ~self.index, self.index)

    def counts(self) -> Tensor:
        """`[rows]` bool: whether the token of each row is one that counts."""
        if self.mask is None:
            return torch.ones(self.index.shape[0], dtype=torch.bool, device=self.index.device)
        return self.mask if self.token is None else self.mask[self.token]

    def counted_tokens(self) -> Tensor:
        """0-d int64: tokens that count."""
        if self.mask is not None:
            return self.mask.sum()
        return torch.full((), self.logits.shape[0], dtype=torch.int64, device=self.logits.device)

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

    def without_logits(self) -> "Routing":
        """The routing with logits `[0, num_experts]`: all that it takes to count, to move tokens and to replay.

        Where experts chose tokens, a missing mask becomes one of ones: it then tells how many tokens there are.
        """
        mask = self.mask
        if mask is None and self.token is not None:
            mask = torch.ones(self.num_tokens, dtype=torch.bool, device=self.index.device)
        return replace(self, logits=self.logits.new_empty(0, self.num_experts), mask=mask)

    def apply(self, x: Tensor, experts: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Send tokens `[tokens, hidden_size]` through experts, and get the same size in the experts' dtype.

        The experts take `(rows, index, weights)` and give the weighted sum of each row `[rows, hidden_size]`.
        """
        rows = x if self.token is None else x.index_select(0, self.token)
        out = experts(rows, self.index, self.weights)
        return self.by_token(out, x).to(out.dtype)

    def by_token(self, rows: Tensor, x: Tensor) -> Tensor:
        """What the tokens `x` `[tokens, ...]` get from the results `[rows, size]` of rows, `[tokens, size]`.

        Summed in float32 at least, where experts choose tokens. They choose none that holds NaN or infinity, or whose
        logits do, so it gets NaN here.
        """
        if self.token is None:
            return rows
        lost = ~x.isfinite().all(-1, keepdim=True)
        if self.logits.shape[0] == x.shape[0]:
            lost = lost | ~self.logits.isfinite().all(-1, keepdim=True)
        if self.mask is not None:
            lost = lost & self.mask.unsqueeze(1)
        total = torch.promote_types(rows.dtype, torch.float32)
        out = torch.zeros(x.shape[0], rows.shape[1], dtype=total, device=x.device).masked_fill(lost, float("nan"))
        return out.index_add(0, self.token, rows.to(total))


def _flatten(routing: Routing) -> tuple[list[Tensor], Any]:
    names = [name for name in PARTS if getattr(routing, name) is not None]
    return [getattr(routing, name) for name in names], [names, routing.score]


def _unflatten(tensors: Iterable[Any], context: Any) -> Routing:
    names, score = context
    return Routing(**dict(zip(names, tensors, strict=True)), score=score)


# So that torch.export and tree_map see its tensors, and vmap nothing else.
register_pytree_node(
    Routing,
    _flatten,
    _unflatten,
    serialized_type_name="kpt_moe.routing.Routing",
    flatten_with_keys_fn=lambda r: ([(GetAttrKey(n), getattr(r, n)) for n in _flatten(r)[1][0]], _flatten(r)[1]),
)


def _count(ids: Tensor, counted: Tensor, num_experts: int) -> Tensor:
    """How often each id from 0 to `num_experts - 1` is counted."""
    ids = torch.where(counted, ids, num_experts).reshape(-1)
    count = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return count.scatter_add(0, ids.long(), torch.ones_like(ids, dtype=torch.int64))[:num_experts]
