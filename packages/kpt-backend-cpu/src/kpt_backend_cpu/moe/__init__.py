"""The kernels for Mixture-of-Experts. Naming them imports nothing; a kernel's module is imported when it is chosen."""

from kpt_core import Kernel

_HERE = "kpt_backend_cpu.moe"
_DTYPES = {"float32", "bfloat16", "float16"}
_FLOAT8 = {"float8_e4m3fn", "float8_e5m2"}

KERNELS = (
    Kernel(
        "moe.experts",
        f"{_HERE}.decode:experts_decode",
        priority=30,
        dtypes=_DTYPES,
        unsupported=f"{_HERE}.decode:unsupported",
        forward_only=True,
        deterministic=True,
    ),
    Kernel(
        "moe.experts",
        f"{_HERE}.experts:experts",
        priority=20,
        dtypes=_DTYPES,
        unsupported=f"{_HERE}.experts:unsupported",
        deterministic=True,
    ),
    Kernel(
        "moe.grouped_mm",
        f"{_HERE}.grouped_mm:grouped_mm",
        priority=20,
        dtypes=_DTYPES,
        unsupported=f"{_HERE}.grouped_mm:unsupported",
        deterministic=True,
    ),
    Kernel(
        "moe.grouped_mm_wgrad",
        f"{_HERE}.grouped_mm:grouped_mm_wgrad",
        priority=20,
        dtypes=_DTYPES,
        unsupported=f"{_HERE}.grouped_mm:unsupported_wgrad",
        deterministic=True,
    ),
    Kernel(
        "moe.scaled_grouped_mm",
        f"{_HERE}.scaled_grouped_mm:scaled_grouped_mm",
        priority=20,
        dtypes=_DTYPES | _FLOAT8,
        unsupported=f"{_HERE}.scaled_grouped_mm:unsupported",
        deterministic=True,
    ),
    Kernel(
        "moe.top_k_gating",
        f"{_HERE}.top_k_gating:top_k_gating",
        priority=20,
        dtypes=_DTYPES,
        unsupported=f"{_HERE}.top_k_gating:unsupported",
        deterministic=True,
    ),
)
