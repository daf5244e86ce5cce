"""Checkpoints of other tools: converted, quantised file by file, widened, and checked."""

from .changing import ConvertedTensor
from .checking import CheckpointExamination, check_checkpoint, examine_checkpoint
from .converting import CheckpointReport, convert_checkpoint
from .formats import FORMATS
from .widening import PLAIN

__all__ = [
    "FORMATS",
    "PLAIN",
    "CheckpointExamination",
    "CheckpointReport",
    "ConvertedTensor",
    "check_checkpoint",
    "convert_checkpoint",
    "examine_checkpoint",
]
