"""Without a GPU the kernels run in Triton's interpreter, which must be asked for before Triton is imported."""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# CUDA is simulated here as in the tests of kpt-optimize.
sys.path.insert(1, str(Path(__file__).parents[2] / "kpt-optimize" / "tests"))
