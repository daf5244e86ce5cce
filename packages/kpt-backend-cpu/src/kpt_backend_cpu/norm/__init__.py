"""The kernel for norms. Naming it imports nothing; its module is imported when it is chosen."""

from kpt_core import Kernel

KERNELS = (
    Kernel(
        "norm.rms",
        forward=f"{__name__}.rms:forward",
        unsupported=f"{__name__}.rms:unsupported",
        prepare=f"{__name__}.rms:prepare",
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        priority=20,
        deterministic=True,
    ),
)
