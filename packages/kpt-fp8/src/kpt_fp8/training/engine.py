"""FP8 training with guard rails: `FP8TrainingEngine`."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kpt_core import InputError
from kpt_fp8.selection import holds_matrices, require_module, trained

from .conversion import convert_to_fp8_training
from .guards import Guards, Observation, causes
from .history import delayed_state, load_delayed_state, mistrust, multiply_gradients, remember, share_largest
from .quantizing import ROLES, largest_of
from .recipe import FP8Recipe
from .report import ACCUMULATED, SKIPPED, TAKEN, DivergedError, Escalation, LayerState, StepReport, TrainingReport
from .state import load_state, require_fitting, state_of
from .watched import Watched

_SENTENCES = 10
_NUMBERS = ("loss_scale", "steps", "skipped", "taken_in_row", "skipped_in_row")


class FP8TrainingEngine:
    """Train a model whose linear layers multiply 8-bit numbers; what goes wrong is found, told, and mended.

    A step is skipped if a gradient, or what some layer quantises, is NaN or infinite: then the loss scale is halved. It
    is skipped too if numbers saturate under a delayed scale: then the next step scales by what is there, and joins the
    histories. Every so often errors are measured; a layer where they stay high, or that overflows again and
    again, goes on to finer scales, at last to none. `report` tells all of this.

    Where several processes train together (`DistributedDataParallel`, `fully_shard`), the default process group shares
    what each saw, so that all decide alike. Convert, wrap, make the optimizer, and then the engine.

    Args:
        model: its layers `nn.Linear` are converted in place, as `convert_to_fp8_training` does; a model that has
            `FP8TrainingLinear` already stays as it is.
        optimizer: of the model's parameters; it goes on with them.
        recipe: an `FP8Recipe`, or `tensor`, `delayed`, `row`, `block` or `none`.
        guards: the limits.
        accumulation: batches whose gradients make a step; losses are divided by it.
        clip_norm: clip gradients to this norm.
        include: patterns of layers, as `convert_to_fp8_training` takes them.
        exclude: likewise.
        min_features: likewise.

    Attributes:
        layers: by name, what is watched.
        left: by name, why another `nn.Linear`, or other experts, train as they are.
        loss_scale: what the loss is multiplied by.

    Raises:
        InputError: an argument does not fit, or as in `convert_to_fp8_training`.
        UnknownNameError: no such recipe.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        recipe: FP8Recipe | str = "tensor",
        guards: Guards | None = None,
        accumulation: int = 1,
        clip_norm: float | None = None,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] = (),
        min_features: int = 64,
    ) -> None:
        owner = type(self).__name__
        require_module(owner, model)
        if not isinstance(optimizer, Optimizer):
            raise InputError(f"{owner}: optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
        if accumulation < 1:
            raise InputError(f"{owner}: accumulation must be a positive integer; got {accumulation}")
        if clip_norm is not None and not clip_norm > 0:
            raise InputError(f"{owner}: clip_norm must be positive; got {clip_norm}: leave it out for no clipping")
        if any(isinstance(each, Watched) for each in model.modules()):
            self.left = {
                name: "it was left as it is when the model was converted"
                for name, each in model.named_modules()
                if holds_matrices(each) and trained(each) is each
            }
        else:
            self.left = convert_to_fp8_training(
                model, recipe, include=include, exclude=exclude, min_features=min_features
            )
        self.model, self.optimizer = model, optimizer
        self.guards = guards or Guards()
        self.accumulation, self.clip_norm = accumulation, clip_norm
        self.layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Watched)}
        self.loss_scale = self.guards.loss_scale
        self.steps = self.skipped = 0
        self.taken_in_row = self.skipped_in_row = 0
        self.bad_signs = dict.fromkeys(self.layers, 0)
        self.escalations: list[Escalation] = []
        self.last_skips: deque[str] = deque(maxlen=_SENTENCES)
        self.errors: dict[str, tuple[float, ...]] = {}
        self._observed: dict[str, Observation] = {}
        self._pending = 0
        self._prepare_step()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def step(self, loss: Tensor) -> StepReport:
        """Go backward from a loss, one number; after `accumulation` of them, let the optimizer step or skip it.

        Raises:
            InputError: the loss is no such number, or no parameter of the optimizer has a gradient.
            DivergedError: too many steps in a row were skipped.
        """
        if loss.numel() != 1 or not loss.requires_grad:
            raise InputError(
                f"{type(self).__name__}: loss must be one number that requires a gradient; got {list(loss.shape)}, "
                f"requires_grad={loss.requires_grad}: take the mean over batch and sequence"
            )
        (loss.sum() * (self.loss_scale / self.accumulation)).backward()
        self._pending += 1
        if self._pending < self.accumulation:
            return StepReport(ACCUMULATED, self.loss_scale)
        self._pending = 0
        try:
            return self._finish()
        finally:
            self.optimizer.zero_grad()
            for layer in self.layers.values():
                layer.reset_observed()
            self._prepare_step()

    def _finish(self) -> StepReport:
        wrong, observed = self._look()
        self.steps += 1
        self._observed = observed
        against = causes(wrong, observed, self.guards.most_saturated)
        if against:
            return self._skip("; ".join(against), bool(wrong), observed)
        if self.loss_scale != 1:
            torch._foreach_mul_(self._gradients(), 1 / self.loss_scale)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters(), self.clip_norm)
        self.optimizer.step()
        self.taken_in_row, self.skipped_in_row = self.taken_in_row + 1, 0
        remember(self.layers.values())
        if self.taken_in_row % self.guards.growth_interval == 0 and self.loss_scale < self.guards.loss_scale:
            self._multiply_loss_scale(2.0)
        escalations = self._judge(observed) if self._measures() else ()
        return StepReport(TAKEN, self.loss_scale, "", escalations)

    def _look(self) -> tuple[list[str], dict[str, Observation]]:
        """The parameters whose gradient is not finite, and what layers observed: the host waits for the device here."""
        gradients = self._gradients()
        if not gradients:
            raise InputError(
                f"{type(self).__name__}: no parameter of the optimizer has a gradient: give the optimizer the model's "
                "parameters, and compute the loss with the model"
            )
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        where = gradients[0].device
        tops = torch.stack([largest_of(each).float().to(where) for each in gradients])
        observed = torch.stack([layer.observed.to(where) for layer in self.layers.values()])
        share_largest(tops, observed)
        for layer, own in zip(self.layers.values(), observed, strict=True):
            layer.set_observed(own)  # what is remembered is of all processes, too
        owners = [names.get(id(each), "a parameter of the optimizer") for each in self._parameters()]
        wrong = [name for name, top in zip(owners, tops.tolist(), strict=True) if not top < math.inf]
        return wrong, {
            name: Observation(*zip(*each, strict=True))
            for name, each in zip(self.layers, observed.tolist(), strict=True)
        }

    def _skip(self, reason: str, lower: bool, observed: Mapping[str, Observation]) -> StepReport:
        self.skipped += 1
        self.taken_in_row, self.skipped_in_row = 0, self.skipped_in_row + 1
        escalations = []
        saturated = False
        for name, seen in observed.items():
            lower |= bool(seen.not_finite())
            overflown = seen.overflown(self.guards.most_saturated)
            saturated |= bool(overflown)
            if overflown:
                escalations += self._bad_sign(name, f"its {ROLES[overflown[0]]} saturates again and again")
        if saturated:
            # All of them: what one layer clamped did not reach the others as large as it was.
            for layer in self.layers.values():
                mistrust(layer)
        if lower:
            self._multiply_loss_scale(0.5)
        self.last_skips.append(f"step {self.steps} skipped: {reason}")
        if self.skipped_in_row >= self.guards.most_skipped:
            raise DivergedError(
                f"{type(self).__name__}: {self.skipped_in_row} steps in a row were skipped, the last one because "
                f"{reason}: load the last checkpoint and lower the learning rate, or look at the data"
            )
        return StepReport(SKIPPED, self.loss_scale, reason, tuple(escalations))

    def _judge(self, observed: Mapping[str, Observation]) -> tuple[Escalation, ...]:
        escalations = []
        for name, seen in observed.items():
            if not self.layers[name].recipe.quantises:
                continue
            self.errors[name] = seen.errors
            error, role = seen.worst()
            if error > self.guards.most_error:
                limit = f"above {100 * self.guards.most_error:.1f} %"
                escalations += self._bad_sign(name, f"the error of its {role} stays {limit}, now {100 * error:.1f} %")
            else:
                self.bad_signs[name] = 0
        return tuple(escalations)

    def _bad_sign(self, name: str, reason: str) -> list[Escalation]:
        self.bad_signs[name] += 1
        layer = self.layers[name]
        finer = layer.recipe.escalated()
        if self.bad_signs[name] < self.guards.patience or finer is None:
            return []
        made = Escalation(self.steps, name, str(layer.recipe), str(finer), reason)
        layer.set_recipe(finer)
        self.bad_signs[name] = 0
        self.errors.pop(name, None)  # of the recipe before
        self.escalations.append(made)
        return [made]

    def _multiply_loss_scale(self, factor: float) -> None:
        self.loss_scale *= factor
        for layer in self.layers.values():
            multiply_gradients(layer, factor)

    def _measures(self) -> bool:
        return self.steps % self.guards.check_every == 0

    def _prepare_step(self) -> None:
        measures = (self.steps + 1) % self.guards.check_every == 0
        for layer in self.layers.values():
            layer.measures = measures

    def _parameters(self) -> list[Tensor]:
        groups = self.optimizer.param_groups
        return [each for group in groups for each in group["params"] if each.grad is not None and each.numel()]

    def _gradients(self) -> list[Tensor]:
        return [_local(each.grad) for each in self._parameters() if each.grad is not None]

    @property
    def report(self) -> TrainingReport:
        """What happened so far, the layers with the greatest error first."""
        none = (0.0,) * len(ROLES)
        layers = []
        for name, layer in self.layers.items():
            seen = self._observed.get(name)
            saturated, zeros = (seen.saturated, seen.zeros) if seen else (none, none)
            layers.append(LayerState(name, str(layer.recipe), saturated, zeros, self.errors.get(name, none)))
        layers.sort(key=lambda each: -max(each.errors))
        return TrainingReport(self.steps, self.skipped, tuple(self.last_skips), tuple(self.escalations), tuple(layers))

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on bit for bit: model, optimizer, engine, and torch's random generators.

        It holds tensors, numbers, strings, lists and dictionaries, so that `torch.load` reads it with `weights_only`.
        Raise `InputError` where gradients of a step are accumulated, which no checkpoint would hold.
        """
        if self._pending:
            raise InputError(
                f"{type(self).__name__}: state_dict is for between two steps; got {self._pending} of "
                f"{self.accumulation} batches accumulated: save after the step"
            )
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "engine": {
                **state_of(self.layers),
                "delayed": delayed_state(self.model),
                **{name: getattr(self, name) for name in _NUMBERS},
                "bad_signs": dict(self.bad_signs),
                "escalations": [list(astuple(each)) for each in self.escalations],
                "last_skips": list(self.last_skips),
                "errors": {name: list(errors) for name, errors in self.errors.items()},
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another engine was, with a model, optimizer and recipe that were made alike.

        torch's random generators are set, too: dropout goes on with what it would have drawn. Raise `InputError` for a
        state of other layers or recipes, or of no engine; nothing is changed then.
        """
        require_fitting(type(self).__name__, self.layers, state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(dict(state["optimizer"]))
        own = state["engine"]
        for name in _NUMBERS:
            setattr(self, name, own[name])
        self.bad_signs = dict(own["bad_signs"])
        self.escalations = [Escalation(*each) for each in own["escalations"]]
        self.last_skips = deque(own["last_skips"], maxlen=_SENTENCES)
        self.errors = {name: tuple(errors) for name, errors in own["errors"].items()}
        load_state(self.layers, own)
        load_delayed_state(self.model, own["delayed"])
        self._pending = 0
        self.optimizer.zero_grad()
        self._prepare_step()


def _local(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor that FSDP2 shards, in the same memory; others as they are."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
