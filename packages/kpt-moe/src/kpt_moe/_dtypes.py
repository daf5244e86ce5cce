"""What dtypes the ops of this package take, and what they sum in."""

import torch

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAMES_OF_DTYPES = "float64, float32, bfloat16 or float16"
#: What weights may be quantised to.
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NAMES_OF_FLOAT8 = "float8_e4m3fn or float8_e5m2"


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """What products of these dtypes are summed in."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
