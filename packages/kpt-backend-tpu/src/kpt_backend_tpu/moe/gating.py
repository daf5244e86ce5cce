"""`moe.top_k_gating`, and the calls that it refuses."""

from typing import Any

import torch
from torch import Tensor

from kpt_backend_tpu.bridge import call as jax
from kpt_backend_tpu.layouts import Choice
from kpt_core import Call, Refusal

#: A tile's scores must fit in VMEM several times over, and the loops over choices and groups are written out.
MOST_EXPERTS, MOST_CHOICES, MOST_GROUPS = 1024, 32, 16


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for the kernel, or None."""
    for name, number, most in (
        ("experts", call.logits.shape[1], MOST_EXPERTS),
        ("choices", call.top_k, MOST_CHOICES),
        ("groups", call.num_groups, MOST_GROUPS),
    ):
        if number > most:
            return Refusal("{number} {name}; this kernel is for {most} at most", number=number, name=name, most=most)
    if call.correction_bias is not None and call.correction_bias.dtype is not torch.float32:
        return Refusal("a correction bias in {dtype}; this kernel takes float32", dtype=call.correction_bias.dtype)
    return None if call.logits.numel() else "no tokens; needs some"


def _choice(call: Call) -> Choice:
    how = (call.top_k, call.score, call.renormalize, float(call.scale), call.num_groups, call.top_groups)
    return Choice(*how)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return the weights and the ids; the lower one of equal scores comes first."""
    weights, index = jax("gating:forward", call.logits, call.correction_bias, choice=_choice(call))
    return weights, index.long()


def backward(call: Call, saved: tuple[Tensor, Tensor], grad: Tensor, _: Any) -> dict[str, Tensor]:
    """Return the gradient of the logits; `saved` is what `forward` gave."""
    index = saved[1].to(torch.int32)
    return {"logits": jax("gating:backward", call.logits, index, grad, choice=_choice(call))}
