"""The Switch Transformer's router: one expert per token."""

from typing import Unpack

from torch import Tensor

from kpt_core import InputError

from .base import Choices, LinearOptions, LinearRouter

#: The paper's, unless something else is asked for.
_DEFAULTS: LinearOptions = {"jitter": 1e-2, "capacity_factor": 1.25, "eval_capacity_factor": 2.0}


class SwitchRouter(LinearRouter):
    """Choose the most probable expert of a linear gate, and weigh it by that probability (arXiv:2101.03961).

    The weight isn't made one: it is what teaches the gate.

    Args:
        top_k: always 1.
        shared: as in `LinearRouter`. The defaults are the paper's: a `jitter` of 0.01, a `capacity_factor` of 1.25, an
            `eval_capacity_factor` of 2.0.

    Raises:
        InputError: `top_k` is not 1, or as in `Router`.
    """

    def __init__(self, hidden_size: int, *, num_experts: int, top_k: int = 1, **shared: Unpack[LinearOptions]) -> None:
        options: LinearOptions = {**_DEFAULTS, **shared}
        super().__init__(hidden_size, num_experts=num_experts, top_k=1, **options)
        if top_k != 1:
            raise InputError(f"SwitchRouter: top_k is always 1; got {top_k}; TopKRouter takes any")

    def choose(self, logits: Tensor, scores: Tensor, mask: Tensor | None, token_ids: Tensor | None) -> Choices:
        """The most probable expert."""
        return scores.argmax(-1, keepdim=True), None
