"""A model that dawdles by a clock that only moves when told: what ends that gains for certain."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clock import Clock
from kpt_optimize.model import OptimizerConfig
from kpt_optimize.model.steps import STEPS


class Dawdling(nn.Module):
    """Two linear layers of 24, 40 and 24 features, and two milliseconds where `slow(module, input)` holds."""

    def __init__(self, clock: Clock, slow: Callable[[nn.Module, Tensor], bool], sizes: tuple[int, ...] = (24, 40, 24)):
        super().__init__()
        torch.manual_seed(0)
        self.clock = clock
        self.slow = slow
        self.first = nn.Linear(sizes[0], sizes[1])
        self.dropout = nn.Dropout(0.25)
        self.norm = nn.BatchNorm1d(sizes[1])
        self.second = nn.Linear(sizes[1], sizes[2])

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.clock.sleep(0.002 if self.slow(self, x) else 0.0)
        return self.second(self.norm(self.dropout(self.first(x)).relu()))  # type: ignore[no-any-return]


def always(module: nn.Module, x: Tensor) -> bool:
    """Slow unless compiled."""
    return True


def never(module: nn.Module, x: Tensor) -> bool:
    """Slow in no case."""
    return False


def in_float32(module: nn.Module, x: Tensor) -> bool:
    """Slow as long as inputs are float32 outside of autocast."""
    return x.dtype is torch.float32 and not torch.is_autocast_enabled(x.device.type)


def not_in_float32(module: nn.Module, x: Tensor) -> bool:
    """Slow in reduced precision."""
    return not in_float32(module, x)


def only(*steps: str, **options: Any) -> OptimizerConfig:
    """A configuration that tries these steps alone."""
    skip = frozenset(step.name for step in STEPS) - set(steps)
    return OptimizerConfig(skip=skip, seconds=0.05, **{"compile_backend": "eager", **options})


def sample(seed: int = 1, width: int = 24) -> Tensor:
    """Eight rows."""
    return torch.randn(8, width, generator=torch.Generator().manual_seed(seed))


def relative(after: Tensor, before: Tensor) -> float:
    """`max |after - before| / max |before|`, in float64."""
    return ((after.double() - before.double()).abs().max() / before.double().abs().max()).item()
