"""The kernel for linear layers. Naming it imports nothing; its module is imported when it is chosen."""

from kpt_core import Kernel

KERNELS = (
    Kernel(
        "linear.dense",
        forward=f"{__name__}.few_rows:forward",
        unsupported=f"{__name__}.few_rows:unsupported",
        prepare=f"{__name__}.few_rows:prepare",
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        priority=20,
        deterministic=True,
    ),
)
