"""Training with FP8 products: a linear layer, recipes of scaling, and an engine with guard rails."""

from .conversion import convert_to_fp8_training
from .engine import FP8TrainingEngine
from .experts import FP8TrainingExperts
from .guards import Guards
from .history import delayed_state, load_delayed_state, update_delayed_scales
from .layer import FP8TrainingLinear
from .recipe import FP8Recipe
from .report import DivergedError, Escalation, LayerState, StepReport, TrainingReport

__all__ = [
    "DivergedError",
    "Escalation",
    "FP8Recipe",
    "FP8TrainingEngine",
    "FP8TrainingExperts",
    "FP8TrainingLinear",
    "Guards",
    "LayerState",
    "StepReport",
    "TrainingReport",
    "convert_to_fp8_training",
    "delayed_state",
    "load_delayed_state",
    "update_delayed_scales",
]
