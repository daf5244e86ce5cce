"""The kernels as rows that a backend makes `kpt_core.Kernel` of: `Kernel(**row, requires=...)`.

Nothing is imported for it: a kernel's module is imported when it is chosen.
"""

from typing import Any

_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2"})
_FNUZ = frozenset({"float8_e4m3fnuz", "float8_e5m2fnuz"})


def _row(
    op: str, module: str, aot: str, *, refusal: bool = False, configs: bool = False, **more: Any
) -> dict[str, Any]:
    feature, _, name = op.partition(".")
    here = f"kpt_triton.{feature}"
    row = {
        "op": op,
        "forward": f"{here}.{module}:forward",
        "backward": f"{here}.{module}:backward",
        "dtypes": _DTYPES,
        "deterministic": True,
        "priority": 20,
        "aot": f"{here}.{aot}:AOT",
    }
    if refusal:
        row["unsupported"] = f"{here}.refusals:{name}"
    if configs:
        row["configs"] = f"{here}.configs:{name}"
    return row | more


KERNELS = (
    _row("moe.experts", "experts", "contracts.experts", refusal=True, configs=True),
    _row("moe.grouped_mm", "grouped_mm", "contracts.grouped_mm", configs=True),
    _row("moe.grouped_mm_wgrad", "grouped_mm_wgrad", "contracts.grouped_mm_wgrad", configs=True),
    _row(
        "moe.scaled_grouped_mm",
        "scaled_grouped_mm",
        "contracts.scaled_grouped_mm",
        refusal=True,
        dtypes=_DTYPES | _FLOAT8,
    ),
    _row("moe.top_k_gating", "gating", "gating", refusal=True),
    _row(
        "fp8.quantize",
        "quantize",
        "quantize",
        backward=None,
        unsupported="kpt_triton.fp8.quantize:unsupported",
    ),
    _row("fp8.linear", "linear", "linear", unsupported="kpt_triton.fp8.linear:unsupported"),
    # Behind the vendor's own, which is there for less and faster.
    _row(
        "fp8.scaled_mm",
        "scaled_mm",
        "scaled_mm",
        backward=None,
        unsupported="kpt_triton.fp8.scaled_mm:unsupported",
        dtypes=_DTYPES | _FLOAT8 | _FNUZ | {"float8_e8m0fnu"},
        priority=10,
    ),
    _row(
        "attention.dense",
        "dense",
        "dense",
        dtypes=_DTYPES - {"float32"},
        unsupported="kpt_triton.attention.dense:unsupported",
    ),
    _row("attention.merge", "merge", "merge", unsupported="kpt_triton.attention.merge:unsupported"),
    _row(
        "attention.paged",
        "paged",
        "paged",
        backward=None,
        unsupported="kpt_triton.attention.paged:unsupported",
    ),
    _row(
        "attention.update_cache",
        "update_cache",
        "update_cache",
        backward=None,
        unsupported="kpt_triton.attention.update_cache:unsupported",
        dtypes=_DTYPES | _FLOAT8,
    ),
)
