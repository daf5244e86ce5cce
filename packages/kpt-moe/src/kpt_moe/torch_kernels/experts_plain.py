"""`moe.experts` for torch.func and second derivatives: each expert over its own rows, in PyTorch that is all plain.

The reference, which vmap goes through too, has every expert compute all rows: that many times the work.
"""

import torch
from torch import Tensor

from kpt_core import Call
from kpt_moe._dtypes import wide_dtype
from kpt_moe.activations import activation_of
from kpt_moe.experts import matrices_of


def forward(call: Call) -> Tensor:
    """The output `[tokens, hidden_size]`."""
    x, act, wide = call.x, activation_of(call), wide_dtype(call.x.dtype)
    ups = matrices_of(call.gate_up_proj, call.gate_up_scale, call.transposed, x.dtype)
    downs = matrices_of(call.down_proj, call.down_scale, call.transposed, x.dtype)
    # Wide, because what comes back to a token is summed there.
    tokens, weights = x.to(wide), call.top_k_weights.to(wide)
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    # One without rows too: its gradient is zero, not absent.
    for expert, (up, down) in enumerate(zip(ups, downs, strict=True)):
        token, choice = (call.top_k_index == expert).nonzero(as_tuple=True)
        h = tokens[token].to(x.dtype) @ up
        h = h if call.gate_up_proj_bias is None else h + call.gate_up_proj_bias[expert]
        y = act(h) @ down
        y = y if call.down_proj_bias is None else y + call.down_proj_bias[expert]
        out = out.index_add(0, token, y.to(wide) * weights[token, choice].unsqueeze(1))
    return out.to(x.dtype)
