"""The kernels for 8-bit numbers. Naming them imports nothing; a kernel's module is imported when it is chosen."""

from kpt_core import Kernel

_DTYPES = frozenset({"float32", "bfloat16", "float16"})

KERNELS = (
    Kernel(
        "fp8.linear",
        forward=f"{__name__}.linear:forward",
        backward=f"{__name__}.linear:backward",
        unsupported=f"{__name__}.linear:unsupported",
        prepare=f"{__name__}.linear:prepare",
        dtypes=_DTYPES,
        composed_of=("fp8.quantize",),
        priority=20,
        deterministic=True,
    ),
    Kernel(
        "fp8.quantize",
        forward=f"{__name__}.quantize:forward",
        unsupported=f"{__name__}.quantize:unsupported",
        dtypes=_DTYPES,
        priority=20,
        deterministic=True,
    ),
    Kernel(
        "fp8.scaled_mm",
        forward=f"{__name__}.scaled_mm:forward",
        unsupported=f"{__name__}.scaled_mm:unsupported",
        dtypes=_DTYPES | {"float8_e4m3fn", "float8_e5m2"},  # of the operands, and of results
        priority=20,
        deterministic=True,
    ),
)
