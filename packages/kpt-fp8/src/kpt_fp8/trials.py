"""Run a model with some layers converted for the time of a call, and compare its output."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kpt_core import InputError

from .quality import QualityMeter

#: The loss of the model's output on a batch; less is better.
Loss = Callable[[Any, Any], Tensor | float]


@dataclass(frozen=True, slots=True)
class Effect:
    """What a change does to the model's output: the worst row's `|after - before| / |before|`, and the mean loss."""

    error: float
    loss: float | None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients inside; every module has its own flag again afterwards."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def each_batch(owner: str, data: Iterable[Any], most: int | None) -> Iterator[Any]:
    """Yield the first batches."""
    if isinstance(data, Tensor | Mapping | str) or not isinstance(data, Iterable):
        raise InputError(
            f"{owner}: data must be a sequence of batches; got one {type(data).__name__}: put it in a list"
        )
    if most is not None and most < 1:
        raise InputError(f"{owner}: max_batches must be at least 1; got {most}: leave it out for all")
    none = True
    for batch in islice(data, most):
        none = False
        yield batch
    if none:
        raise InputError(f"{owner}: data gave no batch; expected one at least: check the loader")


def call(model: nn.Module, batch: Any) -> Any:
    """Call the model: with a tensor, keyword arguments in a mapping, or positional ones in a list or tuple."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


def watch_output(original: nn.Module, layer: nn.Module, meter: QualityMeter) -> Callable[[], None]:
    """Compare a layer with what it stands for on the inputs that this gets in its model; return what ends that."""

    def compare(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        meter.add(output, layer(*args, **named))

    return original.register_forward_hook(compare, with_kwargs=True).remove


class Trials:
    """Run a model in evaluation mode with layers converted, and compare outputs; `loss` None is `output.loss`."""

    def __init__(self, owner: str, model: nn.Module, loss: Loss | None) -> None:
        self._owner, self._model, self._loss = owner, model, loss

    def exact(self, batch: Any) -> tuple[list[Tensor], float | None]:
        """Return the output's rows, and the loss."""
        rows, loss, kind = self._run(batch)
        if not rows:
            raise InputError(
                f"{self._owner}: the model's output has no floating tensor; got {kind}: wrap the model in a module "
                "that returns what matters"
            )
        if not any(each.isfinite().any() for each in rows):
            raise InputError(
                f"{self._owner}: the model's output must hold finite numbers to compare; got none among "
                f"{sum(each.numel() for each in rows)}: check the data and the weights"
            )
        return rows, loss

    def with_layers(self, swaps: Sequence[tuple[nn.Module, nn.Module]], batch: Any, exact: Sequence[Tensor]) -> Effect:
        """Measure the effect on one batch of layers that answer in others' place."""
        with ExitStack() as stack:
            for original, layer in swaps:
                # A hook, so that no module is swapped while others may look at the model.
                hook = original.register_forward_hook(
                    lambda _, args, named, output, layer=layer: layer(*args, **named), with_kwargs=True
                )
                stack.callback(hook.remove)
            rows, loss, _ = self._run(batch)
        after, before = ([list(each.shape) for each in tensors] for tensors in (rows, exact))
        if after != before:
            raise InputError(
                f"{self._owner}: the model's output must have one shape with and without 8-bit layers; got {before}, "
                f"then {after}: wrap the model in a module that returns what can be compared, such as logits"
            )
        return Effect(max(map(_worst_error, rows, exact)), loss)

    def _run(self, batch: Any) -> tuple[list[Tensor], float | None, str]:
        """Return floating tensors as matrices (logits or last hidden states where they are named), loss and type."""
        output = call(self._model, batch)
        value = self._loss(output, batch) if self._loss is not None else getattr(output, "loss", None)
        shown = output
        for name in ("logits", "last_hidden_state"):
            shown = getattr(shown, name, shown)
        leaves = [leaf for leaf in tree_leaves(shown) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        rows = [leaf.reshape(-1, leaf.shape[-1]) if leaf.dim() else leaf.reshape(1, 1) for leaf in leaves]
        return rows, None if value is None else float(value), type(output).__name__


def mean_of(effects: Sequence[Effect]) -> Effect:
    """Return the worst error and the mean loss."""
    losses = [effect.loss for effect in effects if effect.loss is not None]
    return Effect(max(effect.error for effect in effects), sum(losses) / len(losses) if losses else None)


def change_of_loss(loss: float | None, before: float | None) -> float | None:
    """Return what was added to the loss; None without one, infinite where it is no number."""
    if loss is None or before is None:
        return None
    return math.inf if math.isnan(loss - before) else loss - before


def _worst_error(after: Tensor, before: Tensor) -> float:
    """Return the worst row's error, infinite where it is no number; leave out what is not finite before, as masks."""
    exact = before.to(torch.float64)
    usable = exact.isfinite()
    if not usable.any():
        return 0.0
    noise, signal = (torch.where(usable, each, 0).norm(dim=-1) for each in (after.to(torch.float64) - exact, exact))
    worst = float(torch.where(noise == 0, 0.0, noise / signal).amax())
    return math.inf if math.isnan(worst) else worst
