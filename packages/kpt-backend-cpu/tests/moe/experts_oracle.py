"""`moe.experts` in float64, token by token: what the native kernels are compared with."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Call:
    """Arguments of `moe.experts`: `arguments` are positional, `options` are not."""

    arguments: list[Tensor | None]
    options: dict[str, Any] = field(default_factory=dict)


def make_call(
    tokens: int = 13,
    hidden: int = 40,
    inner: int = 24,
    num_experts: int = 5,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
    biased: bool = False,
    seed: int = 0,
    **options: Any,
) -> Call:
    """A random call; one id in the first token is of no expert."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    plain = options.get("activation", "swiglu") in ("silu", "gelu", "gelu_tanh", "relu", "relu2")
    width = inner if plain else 2 * inner
    index = torch.randint(num_experts, (tokens, top_k), generator=generator)
    if tokens > 0:
        index[0, 0] = -1
    up, down = (
        normal(num_experts, width, hidden) * (hidden or 1) ** -0.5,
        normal(num_experts, hidden, inner) * (inner or 1) ** -0.5,
    )
    if options.get("transposed"):
        up, down = up.mT.contiguous(), down.mT.contiguous()
    biases = [normal(num_experts, width), normal(num_experts, hidden)] if biased else [None, None]
    weights = torch.rand(tokens, top_k, generator=generator)
    return Call([normal(tokens, hidden), index, weights, up, down, *biases], options)


def truth(call: Call) -> tuple[Tensor, list[Tensor | None]]:
    """The result, and the gradients of its sum times what `cotangent` gives, both in float64."""
    leaves = [
        t.detach().double().requires_grad_() if t is not None and t.is_floating_point() else t for t in call.arguments
    ]
    x, index, weights, up, down, up_bias, down_bias = leaves
    assert x is not None and index is not None and weights is not None and up is not None and down is not None  # noqa: PT018
    options = {"activation": "swiglu", "alpha": 1.0, "beta": 0.0, "limit": None, **call.options}
    if not options.get("transposed"):
        up, down = up.mT, down.mT
    rows = []
    for token in range(x.shape[0]):
        row = torch.zeros(x.shape[1], dtype=torch.float64)
        for choice in range(index.shape[1]):
            expert = int(index[token, choice])
            if not 0 <= expert < up.shape[0]:
                continue
            h = x[token] @ up[expert] + (0 if up_bias is None else up_bias[expert])
            y = _activate(h, options) @ down[expert] + (0 if down_bias is None else down_bias[expert])
            row = row + weights[token, choice] * y
        rows.append(row)
    out = torch.stack(rows) if rows else torch.zeros(x.shape, dtype=torch.float64)
    if out.requires_grad:
        (out * cotangent(out)).sum().backward()
    return out.detach(), [t.grad if t is not None and t.is_floating_point() else None for t in leaves]


def cotangent(out: Tensor) -> Tensor:
    """What a result is multiplied by before it is summed: something of its shape, the same for every dtype."""
    return torch.linspace(-1, 1, max(out.numel(), 1))[: out.numel()].view(out.shape).to(torch.bfloat16).to(out.dtype)


def _activate(h: Tensor, options: dict[str, Any]) -> Tensor:
    name, functional = options["activation"], torch.nn.functional
    plain = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": functional.relu,
        "relu2": lambda x: functional.relu(x) ** 2,
    }
    if name in plain:
        return plain[name](h)
    gate, up = (h[::2], h[1::2]) if options.get("interleaved") else h.chunk(2)
    if name == "swiglu":
        if options["limit"] is not None:
            gate, up = gate.clamp(max=options["limit"]), up.clamp(-options["limit"], options["limit"])
        return gate * torch.sigmoid(options["alpha"] * gate) * (up + options["beta"])
    return plain[{"geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}[name]](gate) * up
