"""Gradients of a model, small enough to be kept: large ones are folded."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kpt_cli.errors import CliError

#: A gradient with more elements is folded to this many sums.
FOLDED = 65_536
#: The name of the gradient of what the embeddings gave, which is the model's input as far as numbers go.
EMBEDDINGS = "(embeddings)"


def signs(count: int, seed: int = 0) -> Tensor:
    """`count` numbers 1 or -1, float64, the same on every machine and in every version."""
    x = torch.arange(count, dtype=torch.int64) + seed * 0x9E3779B9
    # The finaliser of MurmurHash3 in 32 bits; int64 holds its products modulo 2**64, whose low half is all that counts.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (((x ^ (x >> shift)) & 0xFFFFFFFF) * factor) & 0xFFFFFFFF
    return 1.0 - 2.0 * (x & 1).double()


def fold(gradient: Tensor) -> Tensor:
    """The gradient itself if it is small, else `FOLDED` sums of its elements with fixed signs, in float64.

    Each element goes into one sum, so that an error anywhere, a NaN too, is an error of a sum; and the sum of squares
    of errors stays what it is, on average over signs.
    """
    flat = gradient.detach().cpu().flatten()
    if flat.numel() <= FOLDED:
        return gradient.detach().cpu().clone().contiguous()
    total = torch.zeros(FOLDED, dtype=torch.float64)
    for turn, part in enumerate(flat.split(FOLDED)):
        total[: part.numel()] += part.double() * signs(FOLDED, turn)[: part.numel()]
    return total


def run_backward(model: nn.Module, args: Any, kwargs: Any) -> list[tuple[str, Tensor]]:
    """Run the model and backpropagate a fixed sum: of its first differentiable output's elements, with fixed signs.

    Returns:
        Name and folded gradient: of what the embeddings gave, and of every parameter that got one.

    Raises:
        CliError: nothing in the output needs a gradient.
    """
    embedded: list[Tensor] = []
    embeddings = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        if not embedded and output.requires_grad:
            output.retain_grad()
            embedded.append(output)

    handle = embeddings.register_forward_hook(keep) if embeddings is not None else None
    model.zero_grad(set_to_none=True)
    try:
        with torch.enable_grad():
            output = model(*args, **kwargs)
            leaf = next((x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad), None)
            if leaf is None:
                raise CliError(
                    f"the output of {type(model).__name__} has no gradient; leave --backward out, or unfreeze its "
                    "parameters"
                )
            leaf.backward(signs(leaf.numel()).view(leaf.shape).to(leaf.device, leaf.dtype))
        found = [(EMBEDDINGS, fold(x.grad)) for x in embedded if x.grad is not None]
        found += [(name, fold(p.grad)) for name, p in model.named_parameters() if p.grad is not None]
    finally:
        model.zero_grad(set_to_none=True)
        if handle is not None:
            handle.remove()
    return found
