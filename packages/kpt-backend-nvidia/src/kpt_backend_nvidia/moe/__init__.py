"""The kernels for Mixture-of-Experts: those of kpt_triton as they are, with what they refuse here and what is tuned.

Naming them imports nothing; a kernel's module is imported when it is chosen.
"""

from kpt_core import Kernel

_HERE, _LIBRARY = "kpt_backend_nvidia.moe", "kpt_triton.moe"
_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2"})


def _kernel(
    op: str,
    module: str,
    aot: str,
    *,
    dtypes: frozenset[str] = _DTYPES,
    unsupported: str | None = None,
    configs: str | None = None,
) -> Kernel:
    return Kernel(
        op,
        forward=f"{_LIBRARY}.{module}:forward",
        backward=f"{_LIBRARY}.{module}:backward",
        requires={"cp_async", "bf16"},
        priority=20,
        dtypes=dtypes,
        unsupported=unsupported and f"{_HERE}.unsupported:{unsupported}",
        deterministic=True,
        configs=configs and f"{_HERE}.configs:{configs}",
        aot=f"{_LIBRARY}.{aot}:AOT",
    )


KERNELS = (
    _kernel("moe.experts", "experts", "contracts.experts", unsupported="experts", configs="experts"),
    _kernel("moe.grouped_mm", "grouped_mm", "contracts.grouped_mm", configs="grouped_mm"),
    _kernel("moe.grouped_mm_wgrad", "grouped_mm_wgrad", "contracts.grouped_mm_wgrad", configs="grouped_mm_wgrad"),
    _kernel(
        "moe.scaled_grouped_mm",
        "scaled_grouped_mm",
        "contracts.scaled_grouped_mm",
        dtypes=_DTYPES | _FLOAT8,
        unsupported="scaled_grouped_mm",
    ),
    _kernel("moe.top_k_gating", "gating", "gating", unsupported="top_k_gating"),
)
