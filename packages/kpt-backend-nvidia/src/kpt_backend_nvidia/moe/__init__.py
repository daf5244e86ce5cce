"""The kernels for Mixture-of-Experts. Naming them imports nothing; a kernel's module is imported when it is chosen."""

from kpt_core import Kernel

_HERE = "kpt_backend_nvidia.moe"
_CONTRACTS = "kpt_triton.moe.contracts"
_DTYPES = {"float32", "bfloat16", "float16"}
_FLOAT8 = {"float8_e4m3fn", "float8_e5m2"}

KERNELS = (
    Kernel(
        "moe.experts",
        f"{_HERE}.experts:experts",
        requires={"cp_async", "bf16"},
        priority=20,
        dtypes=_DTYPES,
        unsupported=f"{_HERE}.experts:unsupported",
        deterministic=True,
        configs=f"{_HERE}.experts:configs",
        aot=f"{_CONTRACTS}.experts:AOT",
    ),
    Kernel(
        "moe.grouped_mm",
        f"{_HERE}.grouped_mm:grouped_mm",
        requires={"cp_async", "bf16"},
        priority=20,
        dtypes=_DTYPES,
        deterministic=True,
        configs=f"{_HERE}.grouped_mm:configs",
        aot=f"{_CONTRACTS}.grouped_mm:AOT",
    ),
    Kernel(
        "moe.grouped_mm_wgrad",
        f"{_HERE}.grouped_mm:grouped_mm_wgrad",
        requires={"cp_async", "bf16"},
        priority=20,
        dtypes=_DTYPES,
        deterministic=True,
        configs=f"{_HERE}.grouped_mm:configs_of_wgrad",
        aot=f"{_CONTRACTS}.grouped_mm_wgrad:AOT",
    ),
    Kernel(
        "moe.scaled_grouped_mm",
        f"{_HERE}.scaled_grouped_mm:scaled_grouped_mm",
        requires={"cp_async", "bf16"},
        priority=20,
        dtypes=_DTYPES | _FLOAT8,
        unsupported=f"{_HERE}.scaled_grouped_mm:unsupported",
        deterministic=True,
        aot=f"{_CONTRACTS}.scaled_grouped_mm:AOT",
    ),
    Kernel(
        "moe.top_k_gating",
        "kpt_triton.moe.gating:top_k_gating",
        requires={"cp_async", "bf16"},
        priority=20,
        dtypes=_DTYPES,
        unsupported="kpt_triton.moe.gating:unsupported",
        deterministic=True,
        aot="kpt_triton.moe.gating:AOT",
    ),
)
