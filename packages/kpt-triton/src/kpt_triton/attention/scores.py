"""What kernels of attention share: the hyperbolic tangent of scores, and numbers of softmax."""

import triton
import triton.language as tl

#: The least number of float32: what is subtracted from scores in rows that see nothing.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def tanh(x):
    """The hyperbolic tangent in float32, small arguments' too (Cephes' polynomial)."""
    size = tl.abs(x)
    square = x * x
    small = ((-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2) * square
    small = x + x * square * ((small + 1.33314422036e-1) * square - 3.33332819422e-1)
    large = 1.0 - 2.0 / (tl.exp(2 * size) + 1.0)
    return tl.where(size < 0.625, small, tl.where(x < 0, -large, large))
