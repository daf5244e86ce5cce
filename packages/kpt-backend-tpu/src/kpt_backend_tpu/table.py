"""The kernels; nothing is imported for them: a kernel's module is imported when it is chosen."""

from kpt_core import Kernel

_HERE = "kpt_backend_tpu"
_FP8 = frozenset({"float8_e4m3fn", "float8_e5m2"})


def _kernel(
    op: str,
    module: str,
    refusal: str,
    suffix: str = "",
    *,
    compiled: bool = True,
    gradient: bool = True,
    dtypes: frozenset[str] = frozenset(),
) -> Kernel:
    feature, _, name = op.partition(".")
    here = f"{_HERE}.{feature}"
    return Kernel(
        op,
        forward=f"{here}.{module}:forward{suffix}",
        backward=f"{here}.{module}:backward{suffix}" if gradient else None,
        unsupported=f"{here}.{refusal}",
        requires={"tpu", "mxu", "bf16"},
        dtypes={"float32", "bfloat16"} | dtypes,
        priority=20,
        deterministic=True,
        aot=f"{here}.programs:{name}" if compiled else None,
    )


KERNELS = (
    _kernel("moe.experts", "experts", "refusals:experts"),
    _kernel("moe.grouped_mm", "grouped_mm", "refusals:grouped"),
    _kernel("moe.grouped_mm_wgrad", "grouped_mm", "refusals:grouped", "_wgrad"),
    _kernel("moe.top_k_gating", "gating", "gating:unsupported"),
    _kernel("attention.dense", "dense", "dense:unsupported"),
    _kernel("attention.paged", "paged", "paged:unsupported", gradient=False),
    # By XLA alone: no kernel to hold to anything.
    _kernel("fp8.linear", "linear", "linear:unsupported", compiled=False),
    _kernel("fp8.scaled_mm", "scaled_mm", "scaled_mm:unsupported", gradient=False, dtypes=_FP8),
    _kernel("fp8.quantize", "quantize", "quantize:unsupported", gradient=False, dtypes=_FP8),
)
