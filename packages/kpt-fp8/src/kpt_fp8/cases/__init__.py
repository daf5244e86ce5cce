"""What the ops of this package are tried on, for the entry-point group `kpt.cases`."""

from .dequantize import DEQUANTIZE
from .linear import LINEAR
from .quantize import QUANTIZE
from .scaled_mm import SCALED_MM

TABLES = (DEQUANTIZE, LINEAR, QUANTIZE, SCALED_MM)
