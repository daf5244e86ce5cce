"""The kernels for Mixture-of-Experts. Naming them imports nothing; a kernel's module is imported when it is chosen."""

from kpt_core import Kernel

_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2"})


def _kernel(
    op: str, module: str, *, dtypes: frozenset[str] = _DTYPES, priority: int = 20, trains: bool = True
) -> Kernel:
    functions = f"kpt_backend_cpu.moe.{module}"
    return Kernel(
        op,
        forward=f"{functions}:forward",
        backward=f"{functions}:backward" if trains else None,
        unsupported=f"{functions}:unsupported",
        dtypes=dtypes,
        priority=priority,
        deterministic=True,
    )


KERNELS = (
    _kernel("moe.experts", "decode", priority=30, trains=False),
    _kernel("moe.experts", "experts"),
    _kernel("moe.grouped_mm", "grouped_mm"),
    _kernel("moe.grouped_mm_wgrad", "grouped_mm_wgrad"),
    _kernel("moe.scaled_grouped_mm", "scaled_grouped_mm", dtypes=_DTYPES | _FLOAT8),
    _kernel("moe.top_k_gating", "top_k_gating"),
)
