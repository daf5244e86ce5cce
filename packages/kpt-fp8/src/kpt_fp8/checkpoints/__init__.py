"""Checkpoints of other tools: converted, quantised file by file, and checked."""

from .checking import check_checkpoint
from .converting import convert_checkpoint
from .formats import FORMATS
from .report import CheckpointReport, ConvertedTensor

__all__ = ["FORMATS", "CheckpointReport", "ConvertedTensor", "check_checkpoint", "convert_checkpoint"]
