"""`ModelOptimizer`: steps for a whole model that are kept only where they are measured to pay."""

from .optimizer import ModelOptimizer, OptimizedInference
from .recipe import OptimizedModel
from .report import OptimizationReport, OptimizationWarning, Recommendation, StepOutcome
from .steps import OptimizerConfig
from .training import OptimizedTraining

__all__ = [
    "ModelOptimizer",
    "OptimizationReport",
    "OptimizationWarning",
    "OptimizedInference",
    "OptimizedModel",
    "OptimizedTraining",
    "OptimizerConfig",
    "Recommendation",
    "StepOutcome",
]
