"""A model that runs with some layers converted for the time of a call, and how far its output is off then."""

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

from .native_linear import NativeFP8Linear

#: The loss of the model's output on a batch; less is better.
Loss = Callable[[Any, Any], Tensor | float]


@dataclass(frozen=True, slots=True)
class Effect:
    """What a change does to the model's output.

    Attributes:
        error: `|after - before| / |before|` of the worst row, in Euclidean norms.
        loss: mean over the batches; None where there is none.
    """

    error: float
    loss: float | None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients inside; every module has its own flag again afterwards."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def batches_of(owner: str, data: Iterable[Any], most: int | None) -> list[Any]:
    """The first batches in a list, as `each_batch`."""
    return list(each_batch(owner, data, most))


def each_batch(owner: str, data: Iterable[Any], most: int | None) -> Iterator[Any]:
    """The first batches, one after the other.

    Raises:
        InputError: there is none, or `data` is a batch itself.
    """
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
    """The model's output: for a tensor, keyword arguments in a mapping, or positional ones in a list or tuple."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


def instead(linear: nn.Linear, layer: NativeFP8Linear) -> Callable[[], None]:
    """Let a layer answer in another's place, wherever the model has it; returns what ends that."""

    def answer(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        return layer(*args, **named)

    # A hook, so that no module is swapped while others may look at the model.
    return linear.register_forward_hook(answer, with_kwargs=True).remove


class Trials:
    """Runs a model on batches with layers converted, and compares outputs.

    Args:
        owner: what messages call the caller.
        model: in evaluation mode.
        loss: of its output; None takes `output.loss` where there is one.
    """

    def __init__(self, owner: str, model: nn.Module, loss: Loss | None) -> None:
        self._owner, self._model, self._loss = owner, model, loss

    def exact(self, batch: Any) -> tuple[list[Tensor], float | None]:
        """Rows of the output, and the loss.

        Raises:
            InputError: the output has no floating tensor, or no finite number.
        """
        output = call(self._model, batch)
        rows = _rows(output)
        if not rows:
            raise InputError(
                f"{self._owner}: the model's output has no floating tensor; got {type(output).__name__}: wrap the "
                "model in a module that returns what matters"
            )
        if not any(each.isfinite().any() for each in rows):
            raise InputError(
                f"{self._owner}: the model's output must hold finite numbers to compare; got none among "
                f"{sum(each.numel() for each in rows)}: check the data and the weights"
            )
        return rows, self._loss_of(output, batch)

    def with_layers(
        self, swaps: Sequence[tuple[nn.Linear, NativeFP8Linear]], batch: Any, exact: Sequence[Tensor]
    ) -> Effect:
        """The effect on one batch of converting some layers.

        Args:
            swaps: what answers in whose place.
            batch: what the model runs on.
            exact: rows of its own output.

        Raises:
            InputError: the output's shape depends on its numbers.
        """
        with ExitStack() as stack:
            for linear, layer in swaps:
                stack.callback(instead(linear, layer))
            output = call(self._model, batch)
        rows = _rows(output)
        after, before = ([list(each.shape) for each in tensors] for tensors in (rows, exact))
        if after != before:
            raise InputError(
                f"{self._owner}: the model's output must have one shape with and without 8-bit layers; got {before}, "
                f"then {after}: wrap the model in a module that returns what can be compared, such as logits"
            )
        return Effect(max(map(worst_error, rows, exact)), self._loss_of(output, batch))

    def _loss_of(self, output: Any, batch: Any) -> float | None:
        value = self._loss(output, batch) if self._loss is not None else getattr(output, "loss", None)
        return None if value is None else float(value)


def mean_of(effects: Sequence[Effect]) -> Effect:
    """The worst error and the mean loss."""
    losses = [effect.loss for effect in effects if effect.loss is not None]
    return Effect(max(effect.error for effect in effects), sum(losses) / len(losses) if losses else None)


def worst_error(after: Tensor, before: Tensor) -> float:
    """`|after - before| / |before|` of the worst row, in Euclidean norms; infinite where it is no number.

    Args:
        after: `[R, K]`.
        before: the same shape. Its NaN and infinite numbers, as of masked scores, are left out.
    """
    exact = before.to(torch.float64)
    usable = exact.isfinite()
    if not usable.any():
        return 0.0
    noise, signal = (torch.where(usable, each, 0).norm(dim=-1) for each in (after.to(torch.float64) - exact, exact))
    worst = float(torch.where(noise == 0, 0.0, noise / signal).amax())
    return math.inf if math.isnan(worst) else worst


def _rows(output: Any) -> list[Tensor]:
    """Floating tensors of an output as matrices: logits or last hidden states alone where it names them."""
    for name in ("logits", "last_hidden_state"):
        output = getattr(output, name, output)
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return [leaf.reshape(-1, leaf.shape[-1]) if leaf.dim() else leaf.reshape(1, 1) for leaf in leaves]
