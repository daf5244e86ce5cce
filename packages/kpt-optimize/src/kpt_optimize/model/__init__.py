"""`ModelOptimizer`: steps for a whole model that are kept only where they are measured to pay."""

from .config import OptimizationWarning, OptimizerConfig
from .cuda_graphs import capture
from .optimized_model import OptimizedModel, prepare
from .optimizer import ModelOptimizer, OptimizedInference
from .recipe import Recipe
from .recommendations import Profile, Recommendation
from .report import OptimizationReport, StepOutcome
from .training import OptimizedTraining

__all__ = [
    "ModelOptimizer",
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
