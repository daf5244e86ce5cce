"""Delayed scales: the histories of largest magnitudes, and what they suggest."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kpt_core import InputError
from kpt_fp8.formats import FORMATS
from kpt_fp8.scales import scale_of

from .quantizing import AMAX, GRADIENT
from .recipe import FP8Recipe
from .watched import Watched, ready


def update_delayed_scales(model: nn.Module) -> None:
    """Add what the layers of a model observed to their histories, and compute the scales of the next step.

    Call it once after each step of the optimizer, outside of compiled code. Layers without delayed scales forget what
    they observed, and nothing else happens. Where several processes train together, all of them call it: the default
    process group shares what each saw, so that no process clamps by the scales of another one's data.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, Watched)]
    if layers:
        observed = [layer.observed for layer in layers]
        share_largest(*observed)
        for layer, own in zip(layers, observed, strict=True):
            layer.set_observed(own)
    remember(layers)
    for layer in layers:
        layer.reset_observed()


def delayed_state(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the histories and scales of a model's layers by name, to be saved beside its state dict.

    `FP8TrainingEngine.state_dict` has them already. Without them training goes on too, by the scales that are there.
    """
    return {name: each.clone() for name, each in _buffers(model).items()}


@torch.no_grad()
def load_delayed_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Set what `delayed_state` gave; raise `InputError`, and change nothing, where it is of other layers or recipes."""
    own = _buffers(model)
    wrong = sorted(own.keys() ^ state.keys()) + [n for n in own if n in state and own[n].shape != state[n].shape]
    if wrong:
        raise InputError(
            f"load_delayed_state: {wrong[0]!r} is not alike in the state and in the model: convert the model with the "
            "same recipe, include and exclude"
        )
    for name, each in own.items():
        each.copy_(state[name])
    for layer in model.modules():
        if isinstance(layer, Watched) and layer.scales is not None:
            layer.delayed_ready = ready(layer.scales.tolist())


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{own}" if name else own: buffer
        for name, layer in model.named_modules()
        if isinstance(layer, Watched)
        for own, buffer in (("amax_history", layer.amax_history), ("scales", layer.scales))
        if buffer is not None
    }


def share_largest(*found: Tensor) -> None:
    """Make numbers the largest of all processes, in place; NaN and infinity become infinity. One communication.

    Every process calls it with tensors of the same shapes.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    where = found[0].device
    together = torch.cat([each.to(where).reshape(-1) for each in found])
    # Reductions differ in what the larger of NaN and a number is.
    together.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(together, dist.ReduceOp.MAX)
    for each, part in zip(found, together.split([each.numel() for each in found]), strict=True):
        each.copy_(part.view_as(each))


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
        # Scales that are not trusted stay 0: a checkpoint tells by them how the next step scales.
        layer.scales.copy_(torch.where(layer.scales == 0, 0.0, _suggested(layer.amax_history, layer.recipe)))


def _suggested(history: Tensor, recipe: FP8Recipe) -> Tensor:
    """The scales of input, weight and gradient, `[3]`; 0 where nothing is remembered."""
    tops = history.amax(1)
    forward = scale_of(tops[:GRADIENT] * 2.0**recipe.margin, FORMATS[recipe.dtype].most, "none")
    gradient = tops[GRADIENT:] * 2.0**recipe.gradient_margin
    backward = scale_of(gradient, FORMATS[recipe.gradient_dtype].most, "none")
    return torch.where(tops == 0, 0.0, torch.cat((forward, backward)))
