"""`NVIDIAOptimizer`: steps that are kept only where they are measured to pay."""

from .config import OptimizationWarning, OptimizerConfig
from .cuda_graphs import capture
from .optimized_model import OptimizedModel, prepare
from .optimizer import NVIDIAOptimizer, OptimizedInference
from .recipe import Recipe
from .recommendations import Profile, Recommendation
from .report import OptimizationReport, StepOutcome
from .training import OptimizedTraining

__all__ = [
    "NVIDIAOptimizer",
    "OptimizationReport",
    "OptimizationWarning",
    "OptimizedInference",
    "OptimizedModel",
    "OptimizedTraining",
    "OptimizerConfig",
    "Profile",
    "Recipe",
    "Recommendation",
    "StepOutcome",
    "capture",
    "prepare",
]
