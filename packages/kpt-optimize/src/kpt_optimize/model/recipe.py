"""What an optimisation does to a model, as plain data."""

from dataclasses import dataclass

import torch

from kpt_optimize.plan import Plan

#: The modes in which Inductor captures CUDA graphs of its own.
CAPTURING_MODES = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The kept steps; `prepare` makes a model of it.

    Attributes:
        plan: rewrites that `kpt_core.optimize` kept.
        memory_format: of the weights and inputs of convolutions.
        padded: whether linear layers of awkward sizes are padded.
        weights: dtype that float32 weights and inputs are converted to.
        autocast: dtype of `torch.autocast`.
        tf32: whether float32 products may use TF32.
        compile_mode: of `torch.compile`.
        cuda_graph: whether forward (and backward, in training) are captured in CUDA graphs.
        fused: whether the optimiser is the fused one.
    """

    plan: Plan | None = None
    memory_format: torch.memory_format | None = None
    padded: bool = False
    weights: torch.dtype | None = None
    autocast: torch.dtype | None = None
    tf32: bool = False
    compile_mode: str | None = None
    cuda_graph: bool = False
    fused: bool = False
