"""FP8 for PyTorch: bit-exact quantisation, and linear layers whose weights stay 8-bit on any device."""

from .calibration import calibrate
from .conversion import ConversionReport, conversion_report, convert_model_to_fp8
from .dequantize import dequantize
from .engine import FP8InferenceEngine
from .experts import NativeFP8Experts
from .fp8_tensor import FP8Tensor, from_tensors, to_tensors
from .functions import compute_fp8_scale, dequantize_from_fp8, quantize_to_fp8
from .linear import linear
from .native_linear import NativeFP8Linear
from .quantize import quantize
from .scaled_mm import scaled_mm
from .scales import scale_shape

__version__ = "0.1.0"

__all__ = [
    "ConversionReport",
    "FP8InferenceEngine",
    "FP8Tensor",
    "NativeFP8Experts",
    "NativeFP8Linear",
    "calibrate",
    "compute_fp8_scale",
    "conversion_report",
    "convert_model_to_fp8",
    "dequantize",
    "dequantize_from_fp8",
    "from_tensors",
    "linear",
    "quantize",
    "quantize_to_fp8",
    "scale_shape",
    "scaled_mm",
    "to_tensors",
]
