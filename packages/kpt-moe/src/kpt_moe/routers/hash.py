"""Experts by the token's vocabulary id, through a fixed table."""

from typing import Unpack

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_moe._checks import require_bools, require_known, require_number, require_size
from kpt_moe.batch_invariant import linear
from kpt_moe.losses.balance import scored
from kpt_moe.top_k_gating import weigh_experts

from .base import Choices, Router, RouterOptions

#: How learned logits become scores.
HASH_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")

# Rows of the table that are drawn at once: bounds the memory of a large vocabulary with many experts.
_ROWS = 8192


class HashRouter(Router):
    """Choose experts by the token's vocabulary id, through a table that never changes.

    Hash layers (arXiv:2106.04426) balance themselves and train no router. The table is the buffer `table`
    `[vocab_size, top_k]` int64, distinct experts for each id; it is part of the state dict. An expert counts
    `1 / top_k`, or, with `learned_weights`, what a linear gate gives it, as in the first layers of DeepSeek-V4. Without
    a gate there are no parameters, and logits are zero.

    Ids are taken modulo `vocab_size`. Values aren't read on the host, so nothing can be raised for an id that is out of
    range, and an assertion on the device would end the process (CUDA) or not exist (others). The modulus is the
    identity for every valid id, spreads those of a vocabulary that grew, and makes any id of padding harmless, such as
    -100.

    Args:
        vocab_size: number of vocabulary ids.
        seed: of the table, which is drawn at random: the same one on every device. Give layers different seeds.
        learned_weights: weigh the experts by a linear gate.
        score: how the gate's logits become scores: `softmax` over all experts, `sigmoid`, or `sqrtsoftplus`
            (DeepSeek-V4). None is `softmax`. This and the two below belong to `learned_weights`.
        renormalize: divide learned weights by their sum; all stay zero where every score underflowed. None does so
            unless `top_k` is 1, see `TopKRouter`.
        scale: what learned weights are multiplied by in the end.
        device: of the parameters and the table.
        shared: `jitter`, `capacity_factor`, `eval_capacity_factor`, `priority`, as in `Router`.

    Raises:
        InputError: a size is not positive, `top_k` exceeds `num_experts`, or `score`, `renormalize`, `scale` or
            `jitter` is given without `learned_weights`.
        UnknownNameError: no such `score`.
    """

    table: Tensor

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        top_k: int = 1,
        vocab_size: int,
        seed: int = 0,
        learned_weights: bool = False,
        score: str | None = None,
        renormalize: bool | None = None,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **shared: Unpack[RouterOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts=num_experts, top_k=top_k, **shared)
        require_size(type(self).__name__, "vocab_size", vocab_size)
        require_size(type(self).__name__, "seed", seed, least=0)
        require_bools(type(self).__name__, learned_weights=learned_weights)
        require_number(type(self).__name__, "scale", scale)
        require_known("score", "softmax" if score is None else score, HASH_SCORES)
        usual = {"score": None, "renormalize": None, "scale": 1, "jitter": 0}
        given = {"score": score, "renormalize": renormalize, "scale": scale, "jitter": self.jitter}
        for name, value in given.items():
            if not learned_weights and value != usual[name]:
                raise InputError(
                    f"{type(self).__name__}: {name}={value!r} has no effect without a gate: set learned_weights=True, "
                    "or leave it out"
                )
        self.vocab_size = vocab_size
        self.seed = seed
        self.learned_weights = learned_weights
        self.score_function = score or "softmax"
        self.renormalize = self._renormalizes(renormalize)
        self.scale = scale
        self.register_buffer("table", torch.empty(vocab_size, top_k, dtype=torch.int64, device=device))
        weight = torch.empty(num_experts, hidden_size, device=device, dtype=dtype) if learned_weights else None
        self.weight = nn.Parameter(weight) if weight is not None else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the table anew, the same as before; the gate as that of `LinearRouter`."""
        if not self.table.is_meta:
            generator = torch.Generator("cpu").manual_seed(self.seed)
            for rows in self.table.split(_ROWS):
                drawn = torch.rand(len(rows), self.num_experts, generator=generator, device="cpu")
                rows.copy_(drawn.topk(self.top_k, dim=-1).indices)
        if self.weight is not None:
            nn.init.normal_(self.weight, std=self.hidden_size**-0.5)

    def gate(self, x: Tensor) -> Tensor:
        """`[tokens, num_experts]` of x's dtype; zeros without a learned gate."""
        if self.weight is None:
            return x.new_zeros(x.shape[0], self.num_experts)
        return linear(x, self.weight.to(x.dtype))

    def score(self, logits: Tensor) -> Tensor:
        """As `score` of the constructor says."""
        if self.weight is None:
            return logits
        return scored(logits, self.score_function)

    def choose(self, logits: Tensor, scores: Tensor, mask: Tensor | None, token_ids: Tensor | None) -> Choices:
        """The table's experts; there must be `token_ids`."""
        if token_ids is None:
            raise InputError(
                f"{type(self).__name__}: experts are chosen by vocabulary ids, and there are none; got token_ids=None, "
                f"expected integers [{logits.shape[0]}]: pass token_ids=input_ids to the layer or the router"
            )
        return self.table[token_ids.long().remainder(self.vocab_size)], None

    def weigh(self, scores: Tensor, index: Tensor) -> Tensor:
        """Equal weights, or the gate's."""
        if self.weight is None:
            return scores.new_full(index.shape, 1 / index.shape[1])
        return weigh_experts(scores, index, self.score_function, self.renormalize, self.scale)
