"""Give XLA few shapes to compile, and optimise models for it."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_optimize.model import ModelOptimizer, OptimizerConfig

from .backend import BACKEND

#: Steps that XLA does by itself, or that torch_xla 2.9 fails in: its tensors have no memory that a fused update shares.
_XLAS_OWN = frozenset({"channels_last", "cuda_graph", "fused_optimizer"})


class TPUOptimizer(ModelOptimizer):
    """Optimise a model for a TPU: see `kpt_optimize.model.ModelOptimizer`.

    Steps are rewrites, bfloat16 (weights for inference, autocast for training), padding, and `torch.compile` with
    torch_xla's compiler, `openxla`; each is tried on the device and kept where it pays.

    Args:
        level: `conservative`, `balanced` or `aggressive`.
        device: `xla`, `xla:1`...; None for where the model is.
        config: everything else; by default `openxla`, without the steps that XLA does by itself.
    """

    backend = BACKEND

    def __init__(
        self,
        level: str = "balanced",
        *,
        device: str | torch.device | None = None,
        config: OptimizerConfig | None = None,
    ) -> None:
        super().__init__(
            level, device=device, config=config or OptimizerConfig(compile_backend="openxla", skip=_XLAS_OWN)
        )
        if self.device is not None and self.device.type in BACKEND.device_types:
            self.device = BACKEND.device(self.device)  # which makes it known to torch, too


def powers_of_two(least: int, most: int) -> tuple[int, ...]:
    """Return `least`, twice that and so on, up to the first that is at least `most`."""
    if not 0 < least <= most:
        raise InputError(f"powers_of_two: sizes must be positive and rise; got {least} and {most}")
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


class Bucketed(nn.Module):
    """Pad a dimension of the inputs to one of a few sizes, so that XLA compiles a model as often as there are sizes.

    For what treats rows along that dimension each by itself, or does not look past a row, as layers of experts without
    a capacity, linear layers and causal attention: rows that were added are zero, come last, and are cut off again.
    Inputs are best on the host, and results go back there; of those on the device, padding and cutting are small graphs
    of their own, compiled for each number of rows.

    Args:
        module: takes tensors that have the dimension in common, and gives one tensor or several that have it too.
        sizes: rising; `powers_of_two(16, 1024)` for instance.
        dim: which one.

    Raises:
        InputError: the sizes do not rise.
    """

    def __init__(self, module: nn.Module | Callable[..., Any], sizes: Sequence[int], dim: int = 0) -> None:
        super().__init__()
        if not sizes or list(sizes) != sorted({*sizes}) or sizes[0] < 1:
            raise InputError(f"Bucketed: sizes must be positive and rise; got {list(sizes)}")
        self.module, self.sizes, self.dim = module, tuple(sizes), dim

    def forward(self, *inputs: Tensor) -> Any:
        """Return what the module gives for the inputs alone.

        Raises:
            InputError: inputs differ in the dimension, or are larger than every size.
        """
        rows = inputs[0].shape[self.dim]
        if any(each.shape[self.dim] != rows for each in inputs):
            raise InputError(
                f"Bucketed: inputs must have one size of dimension {self.dim}; got {[list(x.shape) for x in inputs]}"
            )
        if rows > self.sizes[-1]:
            raise InputError(
                f"Bucketed: {rows} rows; the largest size is {self.sizes[-1]}: give larger ones, or fewer rows"
            )
        size = self.sizes[bisect_left(self.sizes, rows)]
        device = inputs[0].device
        padded = [torch.cat((x, _zeros(x, self.dim, size - rows)), self.dim) if size > rows else x for x in inputs]
        _end_graph(device)
        there = next((each.device for each in self.parameters()), device)
        out = self.module(*(each.to(there) for each in padded))
        _end_graph(device)
        several = [out] if isinstance(out, Tensor) else out
        cut = [each.to(device).narrow(self.dim, 0, rows) for each in several]
        return cut[0] if isinstance(out, Tensor) else type(out)(cut)


def _end_graph(device: torch.device) -> None:
    """Run what torch_xla has waiting, so that what follows is a graph of its own."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def _zeros(x: Tensor, dim: int, rows: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = rows
    return x.new_zeros(shape)
