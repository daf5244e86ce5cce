"""Faults that kernels really have, one to a kernel, and the check that must find each."""

from kpt_conformance.interpreter import interpreting

from . import (
    attention,
    citizens,
    coming_ops,
    experts,
    fp8,
    grouped_mm,
    grouped_mm_gradients,
    grouped_mm_wgrad,
    model_options,
    paged,
    scaled_grouped_mm,
    seldom,
    state,
    top_k_gating,
    wrappers,
)
from .mutant import Mutant

MODULES = (
    grouped_mm,
    grouped_mm_gradients,
    grouped_mm_wgrad,
    experts,
    scaled_grouped_mm,
    top_k_gating,
    seldom,
    wrappers,
    state,
    citizens,
    coming_ops,
    fp8,
    attention,
    paged,
    model_options,
)
MUTANTS: list[Mutant] = [mutant for module in MODULES for mutant in module.MUTANTS]
if interpreting():
    from . import triton_kernels

    MUTANTS = list(triton_kernels.MUTANTS)
