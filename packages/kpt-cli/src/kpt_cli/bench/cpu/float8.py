"""8-bit weights as the benchmark has them."""

from torch import Tensor

#: Schemes of `kpt_moe.quantised_experts.quantise_weights`, and what tables call them.
SCHEMES = {"row": "fp8 row", "block128": "fp8 block"}
_BLOCK = 128


def dequantised(codes: Tensor, scale: Tensor) -> Tensor:
    """A matrix `[outputs, inputs]` in float64.

    Args:
        codes: `[outputs, inputs]` of a float8 dtype.
        scale: `[outputs]`, or one for each block of 128 by 128.
    """
    if scale.dim() == 1:
        return codes.double() * scale.double().unsqueeze(1)
    rows, columns = codes.shape
    spread = scale.double().repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)
    return codes.double() * spread[:, :columns]
