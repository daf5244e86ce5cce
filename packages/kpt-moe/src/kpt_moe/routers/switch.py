"""The Switch Transformer's router: one expert per token."""

from typing import ClassVar

import torch
from torch import Tensor

from kpt_core import InputError
from kpt_moe.capacity import Priority

from .base import LinearRouter


class SwitchRouter(LinearRouter):
    """Choose the most probable expert of a linear gate, and weigh it by that probability (arXiv:2101.03961).

    The weight isn't made one: it is what teaches the gate.

    Args:
        hidden_size: size of a token.
        num_experts: number of experts.
        top_k: always 1.
        capacity_factor: in training, an expert takes at most this many times the average number of tokens; None is no
            limit. The defaults of both factors are the paper's.
        eval_capacity_factor: the same outside of training; None is `capacity_factor`.
        jitter: in training, tokens are multiplied by uniform random numbers of `[1 - jitter, 1 + jitter]`.
        priority: which tokens a full expert refuses, see `kpt_moe.capacity`.
        bias: give the gate a bias.
        device: of the parameters.
        dtype: of the parameters; they are raised to the tokens' float32 or float64 where they are used.

    Raises:
        InputError: `top_k` is not 1, a size is not positive, a factor or jitter is out of range.
        UnknownNameError: no such `priority`.
    """

    fixed_top_k: ClassVar[bool] = True

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int = 1,
        *,
        capacity_factor: float | None = 1.25,
        eval_capacity_factor: float | None = 2.0,
        jitter: float = 1e-2,
        priority: Priority = "position",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size,
            num_experts,
            1,
            bias=bias,
            device=device,
            dtype=dtype,
            jitter=jitter,
            capacity_factor=capacity_factor,
            eval_capacity_factor=eval_capacity_factor,
            priority=priority,
        )
        if top_k != 1:
            raise InputError(f"SwitchRouter: top_k is always 1; got {top_k}; TopKRouter takes any")

    def choose(
        self, logits: Tensor, scores: Tensor, mask: Tensor | None, token_ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The most probable expert."""
        return scores.argmax(-1, keepdim=True), None
