"""Op `attention.merge`: attention over two sets of keys from the attention over each of them."""

import torch
from torch import Tensor

from kpt_core import Call, InputError, op

from .dense import DTYPES, wide_dtype

_NAME = "attention.merge"


def _check(call: Call) -> None:
    for name, out, lse in (("", call.out, call.lse), ("other_", call.other_out, call.other_lse)):
        if out.shape != call.out.shape or out.dim() == 0 or lse.shape != out.shape[:-1]:
            raise InputError(
                f"{_NAME}: both outputs must have one shape, and a log-sum-exp each of their rows; got {name}out "
                f"{list(out.shape)} and {name}lse {list(lse.shape)} beside out {list(call.out.shape)}"
            )
        if out.dtype not in DTYPES or out.dtype != call.out.dtype or lse.dtype not in DTYPES:
            raise InputError(
                f"{_NAME}: outputs must have one floating dtype, and log-sum-exps a floating one; got {name}out "
                f"{out.dtype} and {name}lse {lse.dtype} beside out {call.out.dtype}"
            )
    for name in ("lse", "other_out", "other_lse"):
        value = getattr(call, name)
        if value.device != call.out.device:
            raise InputError(
                f"{_NAME}: all tensors must be on one device; got out on {call.out.device} and {name} on {value.device}"
            )


def _wide(call: Call) -> torch.dtype:
    return torch.promote_types(wide_dtype(call.out.dtype), torch.promote_types(call.lse.dtype, call.other_lse.dtype))


def _fake(call: Call) -> tuple[Tensor, Tensor]:
    out = call.out
    return out.new_empty(out.shape), out.new_empty(out.shape[:-1], dtype=_wide(call))


@op(_NAME, check=_check, fake=_fake)
def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over some keys with attention over others: what one call over all of them would give.

    A row that sees no key in either part stays zero.

    Args:
        out: `[..., Dv]` float32, bfloat16, float16 or float64: output over some keys.
        lse: `[...]` floating, float32 as a rule: its log-sum-exp, as `attention.dense` gives it.
        other_out: over other keys.
        other_lse: likewise.

    Returns:
        The output, in their dtype, and the log-sum-exp, float32 (float64 where anything is), over all
        keys. A sink must be in one of the two alone.

    Raises:
        InputError: shapes, dtypes or devices do not fit.

    Source: arXiv:1805.02867, in the form of FlashDecoding.
    """
    wide = _wide(merge.bind(out, lse, other_out, other_lse))
    lse, other_lse = lse.to(wide), other_lse.to(wide)
    largest = torch.maximum(lse, other_lse).detach().clamp(min=torch.finfo(lse.dtype).min)
    one, two = (lse - largest).exp(), (other_lse - largest).exp()
    total = one + two
    dead = total == 0
    total = total.masked_fill(dead, 1)
    mean = out.to(wide) * (one / total).unsqueeze(-1) + other_out.to(wide) * (two / total).unsqueeze(-1)
    return mean.to(out.dtype), (largest + total.log()).masked_fill(dead, -torch.inf)
