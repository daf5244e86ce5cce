"""ROCm is simulated here with what simulates CUDA in the tests of kpt-optimize: PyTorch calls both `cuda`."""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[2] / "kpt-optimize" / "tests"))
