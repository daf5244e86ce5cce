"""The steps of an optimisation, in the order of trial: each proposes a change of the recipe, or says why it can't."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from kpt_core.contract import Capability
from kpt_core.errors import InputError
from kpt_optimize.devices.facts import Peaks
from kpt_optimize.optimize import optimize
from kpt_optimize.padding import advise
from kpt_optimize.rewrite import LEVELS, check_max_error, check_objective, rewrites
from kpt_optimize.trial import Example

from .recipe import CAPTURING_MODES, FORMATS, Recipe

#: Optimisers whose update torch can run as one kernel.
FUSED = (Adam, AdamW, SGD, Adagrad)
#: Modes of `torch.compile` by level, the last ones the slowest to compile.
MODES = {
    "conservative": ("default",),
    "balanced": ("max-autotune-no-cudagraphs",),
    "aggressive": ("reduce-overhead", "max-autotune"),
}
#: Proposed recipes by what they set, or the reason why there is none.
Proposal = Mapping[str, Recipe] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """What `ModelOptimizer` may do beyond its level.

    Attributes:
        objective: `latency` (seconds of the sample) or `memory` (bytes of parameters and buffers; inference only).
        max_error: error budget, as `max |after - before| / max |before|`; None for that of the level.
        dtype: of `mixed_precision`, `torch.bfloat16` or `torch.float16`. Training in float16 scales the loss.
        compile_backend: handed to `torch.compile`. Modes are for `inductor`; another backend is called without one.
        seconds: about how long to time each step.
        skip: names of steps that must not be tried.

    Raises:
        InputError: another dtype, a negative budget, or no time to measure.
        UnknownNameError: no such objective.
    """

    objective: str = "latency"
    max_error: float | None = None
    dtype: torch.dtype = torch.bfloat16
    compile_backend: str | Callable[..., Any] = "inductor"
    seconds: float = 0.6
    skip: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_objective(self.objective)
        check_max_error(self.max_error)
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise InputError(f"dtype must be torch.bfloat16 or torch.float16; got {self.dtype!r}")
        if not self.seconds > 0:
            raise InputError(f"seconds must be above 0, or nothing is measured; got {self.seconds!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a step may look at.

    `no_accelerator` says why what only an accelerator has can't be tried, `peaks` are of the vendor's data sheet,
    `recipe` has the steps kept so far.
    """

    model: nn.Module
    device: torch.device
    sample: Example | None
    level: str
    config: OptimizerConfig
    training: bool = False
    optimizer: Optimizer | None = None
    no_accelerator: str | None = "needs an accelerator"
    capabilities: frozenset[Capability] = frozenset()
    peaks: Peaks | None = None
    recipe: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True, slots=True)
class Step:
    """One kind of change: its name, the lowest level that may try it, and how it changes a recipe.

    A `lossless` one keeps the numerics class: same dtypes, another order of sums. `memory`: it makes models smaller.
    """

    name: str
    level: str
    lossless: bool
    change: Callable[[Situation], Proposal]
    inference: bool = True
    training: bool = True
    memory: bool = False

    def propose(self, situation: Situation) -> Proposal:
        """Return the recipes to try, or why there are none."""
        if self.name in situation.config.skip:
            return "skipped, as the configuration says"
        if LEVELS.index(self.level) > LEVELS.index(situation.level):
            return f"belongs to level {self.level!r}; this is {situation.level!r}"
        if situation.config.objective == "memory" and not self.memory:
            return "changes nothing of the objective 'memory'"
        return "needs sample inputs to be measured on" if situation.sample is None else self.change(situation)


def _rewrites(situation: Situation) -> Proposal:
    model, config, sample = situation.model, situation.config, situation.sample
    assert sample is not None
    if not any(any(True for _ in rewrite.sites(model)) for rewrite in rewrites().values()):
        return "no rewrite of the installed packages applies to this model"
    # A lossy rewrite holds converted weights, which an optimiser must not train.
    level = "conservative" if situation.training else situation.level
    inputs = sample.kwargs or sample.args
    plan = optimize(model, level, config.objective, example_inputs=inputs, max_error=config.max_error).plan
    if not plan.kept:
        reason = plan.entries[0].reason if plan.entries else "this level allows none that applies"
        return f"optimize kept none of {len(plan.entries)} rewrites it tried: {reason}"
    return {f"{len(plan.kept)} modules": replace(situation.recipe, plan=plan)}


def _channels_last(situation: Situation) -> Proposal:
    ranks = {convolution.weight.dim() for convolution in convolutions_of(situation.model)}
    if not ranks:
        return "the model has no Conv2d or Conv3d"
    form = FORMATS[min(ranks)]
    return {_short(form): replace(situation.recipe, memory_format=form)}


def _padding(situation: Situation) -> Proposal:
    model, recipe = situation.model, situation.recipe
    if isinstance(model, nn.Linear):
        return "the model is itself an nn.Linear, which can't be replaced"
    awkward = [advice for advice in advise(model, recipe.weights or recipe.autocast) if advice.kind == "linear"]
    if not awkward:
        return "the sizes of every linear layer suit matrix units"
    return {f"{len(awkward)} linear layers": replace(recipe, padded=True)}


def _tf32(situation: Situation) -> Proposal:
    if situation.no_accelerator is not None:
        return situation.no_accelerator
    if "tf32" not in situation.capabilities:
        return f"{situation.device} does not multiply TF32"
    if not _has_float32(situation.model):
        return "no parameter is float32"
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the older of torch's two interfaces can't tell once the newer one was written to
        return "the process sets torch.backends.*.fp32_precision itself"
    if precision != "highest":
        return f"the process allows it already: its precision is {precision!r}"
    return {"high": replace(situation.recipe, tf32=True)}


def _mixed_precision(situation: Situation) -> Proposal:
    dtype = situation.config.dtype
    if not _has_float32(situation.model):
        return "no parameter is float32"
    if situation.training:
        return {f"autocast {_short(dtype)}": replace(situation.recipe, autocast=dtype)}
    return {f"weights {_short(dtype)}": replace(situation.recipe, weights=dtype)}


def _compile(situation: Situation) -> Proposal:
    if any(isinstance(module, torch._dynamo.OptimizedModule) for module in situation.model.modules()):
        return "a part of the model is compiled already"
    modes = MODES[situation.level]
    if situation.config.compile_backend != "inductor":
        modes = ("default",)
    elif modes[0] in CAPTURING_MODES and situation.no_accelerator is not None:
        modes = MODES["balanced"]
    return {mode: replace(situation.recipe, compile_mode=mode) for mode in modes}


def _cuda_graph(situation: Situation) -> Proposal:
    if situation.no_accelerator is not None:
        return situation.no_accelerator
    if situation.recipe.compile_mode in CAPTURING_MODES:
        return f"torch.compile captures graphs of its own in mode {situation.recipe.compile_mode!r}"
    return {"one form": replace(situation.recipe, cuda_graph=True)}


def _fused_optimizer(situation: Situation) -> Proposal:
    optimizer = situation.optimizer
    if optimizer is None:
        return "needs the optimizer: pass it"
    if type(optimizer) not in FUSED:
        return f"{type(optimizer).__name__} has no fused form; {', '.join(kind.__name__ for kind in FUSED)} have one"
    if all(group.get("fused") for group in optimizer.param_groups):
        return f"{type(optimizer).__name__} is fused already"
    return {type(optimizer).__name__: replace(situation.recipe, fused=True)}


STEPS = (
    Step("rewrites", "conservative", True, _rewrites, memory=True),
    Step("channels_last", "conservative", True, _channels_last),
    Step("tf32", "balanced", False, _tf32),
    Step("mixed_precision", "balanced", False, _mixed_precision, memory=True),
    # After the precision, which decides what sizes are awkward.
    Step("padding", "conservative", True, _padding, training=False),
    Step("compile", "conservative", True, _compile),
    Step("cuda_graph", "aggressive", True, _cuda_graph),
    Step("fused_optimizer", "conservative", True, _fused_optimizer, inference=False),
)


def convolutions_of(model: nn.Module) -> list[nn.Conv2d | nn.Conv3d]:
    """Return the modules whose kernels prefer channels last."""
    return [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Conv3d)]


def _has_float32(model: nn.Module) -> bool:
    return any(parameter.dtype is torch.float32 for parameter in model.parameters())


def _short(value: torch.dtype | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")
