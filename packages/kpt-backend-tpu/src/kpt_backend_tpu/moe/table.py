"""The kernels for Mixture-of-Experts; nothing is imported for them: a kernel's module is imported when it is chosen."""

from typing import Any

from kpt_core import Kernel

_HERE = "kpt_backend_tpu.moe"


def _kernel(op: str, module: str, suffix: str = "", **more: Any) -> Kernel:
    return Kernel(
        op,
        forward=f"{_HERE}.{module}:forward{suffix}",
        requires={"tpu", "mxu", "bf16"},
        dtypes={"float32", "bfloat16"},
        priority=20,
        deterministic=True,
        aot=f"{_HERE}.programs:{op.partition('.')[2]}",
        **more,
    )


def _product(op: str, suffix: str = "") -> Kernel:
    backward, refusal = f"{_HERE}.grouped_mm:backward{suffix}", f"{_HERE}.refusals:grouped"
    return _kernel(op, "grouped_mm", suffix, backward=backward, unsupported=refusal)


KERNELS = (
    _kernel("moe.experts", "experts", backward=f"{_HERE}.experts:backward", unsupported=f"{_HERE}.refusals:experts"),
    _product("moe.grouped_mm"),
    _product("moe.grouped_mm_wgrad", "_wgrad"),
)
