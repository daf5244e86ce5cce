"""Delayed scales: the histories of largest magnitudes, and what they suggest."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from kpt_fp8.formats import FORMATS
from kpt_fp8.scales import scale_of

from .quantising import AMAX, GRADIENT
from .recipe import FP8Recipe
from .watched import Watched, ready


def update_delayed_scales(model: nn.Module) -> None:
    """Add what the layers of a model observed to their histories, and compute the scales of the next step.

    Call it once after each step of the optimizer, outside of compiled code. Layers without delayed scales forget what
    they observed, and nothing else happens.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, Watched)]
    remember(layers)
    for layer in layers:
        layer.reset_observed()


@torch.no_grad()
def remember(layers: Iterable[Watched]) -> None:
    """Add what layers observed to their histories; nothing happens to those without delayed scales."""
    changed = []
    for layer in layers:
        history, scales = layer.amax_history, layer.scales
        if not layer.recipe.delayed or history is None or scales is None:
            continue
        amax = layer.observed[:, AMAX : AMAX + 1]
        # What saw nothing, as the gradient does of a frozen layer, forgets nothing.
        seen = amax.isfinite() & (amax > 0)
        history.copy_(torch.where(seen, torch.cat((amax, history[:, :-1]), dim=1), history))
        scales.copy_(_suggested(history, layer.recipe))
        changed.append((layer, scales))
    if changed:
        # The host waits once for all of them.
        where = changed[0][1].device
        found = torch.stack([scales.to(where) for _, scales in changed]).tolist()
        for (layer, _), own in zip(changed, found, strict=True):
            layer.delayed_ready = ready(own)


@torch.no_grad()
def mistrust(layer: Watched) -> None:
    """Let the next step scale by what is there, and remember that beside what the steps before had."""
    if layer.scales is not None:
        layer.scales.zero_()
        layer.delayed_ready = (False, False, False)


@torch.no_grad()
def multiply_gradients(layer: Watched, factor: float) -> None:
    """Follow a change of the loss scale."""
    if layer.amax_history is not None and layer.scales is not None:
        layer.amax_history[GRADIENT] *= factor
        layer.scales.copy_(_suggested(layer.amax_history, layer.recipe))


def _suggested(history: Tensor, recipe: FP8Recipe) -> Tensor:
    """The scales of input, weight and gradient, `[3]`; 0 where nothing is remembered."""
    tops = history.amax(1)
    forward = scale_of(tops[:GRADIENT] * 2.0**recipe.margin, FORMATS[recipe.dtype].most, "none")
    gradient = tops[GRADIENT:] * 2.0**recipe.gradient_margin
    backward = scale_of(gradient, FORMATS[recipe.gradient_dtype].most, "none")
    return torch.where(tops == 0, 0.0, torch.cat((forward, backward)))
