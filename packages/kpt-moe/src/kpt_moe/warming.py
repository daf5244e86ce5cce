"""Compile what layers launch before traffic comes."""

from collections.abc import Iterable

import torch
from torch import nn

from kpt_core import InputError

from .layers import MoELayer


def warm_up(model: nn.Module, token_counts: Iterable[int]) -> None:
    """Run each layer of a model once for each number of tokens, so that no call of as many waits for a compiler.

    GPU kernels are compiled for a tile, which follows from how many rows an expert has on average. Within a tile one
    program serves any number of tokens. Layers run as they serve, in evaluation and without gradients, on zeros, which
    a `RouterStatistics` in force counts too.

    Args:
        model: a `MoELayer`, or a model with some.
        token_counts: tokens of a step, such as the powers of two up to the largest batch.

    Raises:
        InputError: there is no number of tokens or one is not positive, or the model has no `MoELayer`.
    """
    counts = sorted(set(token_counts))
    if not counts or counts[0] < 1:
        raise InputError(f"warm_up: token_counts must be positive numbers of tokens; got {counts}")
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if not layers:
        raise InputError(f"warm_up: {type(model).__name__} has no MoELayer; kpt_moe.conversion makes them of blocks")
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        for layer in layers:
            _run(layer, counts)
    finally:
        for module, before in training.items():
            module.training = before


@torch.no_grad()
def _run(layer: MoELayer, counts: list[int]) -> None:
    # Experts of 8 bits have scales in float32 whatever tokens are in; routers may be kept in float32 beside others.
    named = (*layer.experts.named_parameters(), *layer.router.named_parameters())
    like = next(each for name, each in named if each.itemsize > 1 and not name.endswith("_scale_inv"))
    for tokens in counts:
        x = like.new_zeros(tokens, layer.config.hidden_size)
        layer(x, token_ids=x.new_zeros(tokens, dtype=torch.int64))
